"""Steps that nobody asked for: one of every kind that can be planned, and the largest of all.

Knows plans alone. Whoever runs them has memory of its own for that: they fill slots, pages and
seats with whatever comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from millpond.plan.sampling import SamplingParams
from millpond.plan.step import (
    PAGE_SIZE,
    Capabilities,
    Export,
    FanOut,
    PageUpdate,
    Row,
    SeatLoad,
    SeatMask,
    StepPlan,
    VerifyRow,
)
from millpond.state.lease import PageId, Seat, SlotId

SLOTS, PAGES, SEATS = 8, 8, 16
"""What `every_kind` needs; more is not touched."""

GROUP = 4
"""Seats of most of its steps."""

PROMPT = 100
"""Tokens of its prompts, where so many fit: more than a page, and no whole number of them."""

NO_SLOT = SlotId(-1)
"""Spelt as on the device: the row reads the zero state and writes none."""

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
NOISY = SamplingParams(max_tokens=1, seed=7)
SAMPLING = (
    NOISY,
    SamplingParams(max_tokens=1, top_k=5, top_p=0.9, min_p=0.01),
    SamplingParams(max_tokens=1, repetition_penalty=1.1, frequency_penalty=0.5),
    SamplingParams(max_tokens=1, temperature=0.0, presence_penalty=0.5),
    SamplingParams(max_tokens=1, logit_bias=((0, 1.0),)),
    SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=(0,)),
    SamplingParams(max_tokens=1, logprobs=0),
    SamplingParams(max_tokens=1, temperature=0.0, logprobs=20),
)
"""Ways in which tokens are drawn, each by code of its own."""

HEAVY = SamplingParams(
    max_tokens=9, min_tokens=9, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
    presence_penalty=0.5, frequency_penalty=0.5, logit_bias=((0, 1.0),), stop_token_ids=(0,),
    logprobs=20,
)  # fmt: skip
"""All of them at once: what a draw takes at most."""


ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
TOKENS = (24, 32, 48, 64, 96, 128, 512, 2048, 8192)
"""Kernels may have tiles of their own for few rows or tokens, and for many. What changes above as
many rows as these does so in steps that are measured or captured."""


def every_kind(c: Capabilities, most_tokens: int = TOKENS[-1]) -> Iterator[StepPlan]:
    """One step of every kind, in an order in which they can be run.

    `c` has room for `SLOTS`, `PAGES` and `SEATS`. No prompts have more than `most_tokens` together.
    """
    plans = _Plans(c)
    yield from plans.prompts()
    yield from plans.singles()
    yield from plans.near()
    yield from plans.far()
    yield from plans.numbers(most_tokens)
    yield from plans.fanning_out()
    for params in SAMPLING:
        yield from plans.drawing(params)
    yield from plans.drawing(NOISY, masked=True)
    yield plans.poisoning()


def few_kinds(c: Capabilities) -> Iterator[StepPlan]:
    """The commonest of them, where nothing is compiled and warming up is for buffers alone."""
    plans = _Plans(c)
    yield from plans.prompts()
    yield from plans.singles()
    yield from plans.drawing(NOISY)


def largest(c: Capabilities, prefill_tokens: int) -> Iterator[StepPlan]:
    """Three steps, two of them the largest there can be; `prefill_tokens` is their prompts' part.

    All seats run and draw in every way at once, at the end of the longest sequence there may be: in
    the second step beside one long prompt, in the third each with a short prompt of its own.
    """
    plans = _Plans(c)
    last, seats = plans.last, plans.all_seats
    loads, tables = plans.loads(seats, HEAVY), plans.tables(seats)
    beginning = tuple(plans.row(seat, last - 1, 1, NO_SLOT) for seat in seats)
    yield plans.step(decode=beginning, seat_loads=loads, page_updates=tables)
    prompts: list[Row] = []
    used = 0
    for seat in seats:
        count = min(prefill_tokens - used, max(1, last // PAGE_SIZE * PAGE_SIZE))
        if count < 1:
            break
        start = (last - count) // PAGE_SIZE * PAGE_SIZE
        scored = 20 if not prompts else None
        prompts.append(plans.row(seat, start, count, NO_SLOT, prompt_logprobs=scored))
        used += count
    others = seats[len(prompts) :]
    live = plans.verify(others, last, NO_SLOT) if plans.is_live else ()
    known = () if plans.is_live else tuple(plans.row(s, last, 1, NO_SLOT) for s in others)
    yield plans.step(
        prefill=tuple(prompts), decode=known, verify=live, masks=plans.masks(seats, others)
    )
    count = max(1, min(prefill_tokens // len(seats), last // PAGE_SIZE * PAGE_SIZE))
    start = (last - count) // PAGE_SIZE * PAGE_SIZE
    short = tuple(plans.row(seat, start, count, NO_SLOT) for seat in seats)
    yield plans.step(prefill=short, masks=plans.masks(seats, ()))


@dataclass(slots=True)
class _Plans:
    """Makes plans whose rows all look at the same few pages."""

    c: Capabilities
    steps: int = field(default=0, init=False)

    @property
    def all_seats(self) -> tuple[Seat, ...]:
        """Every seat there is."""
        return tuple(Seat(s) for s in range(self.c.num_seats))

    @property
    def is_live(self) -> bool:
        """Whether sequences that have drawn a token go on as verify rows."""
        return self.c.num_draft_tokens > 0 or self.c.runs_ahead

    @property
    def last(self) -> int:
        """The last position from which a row can go on, all its drafts included."""
        return max(1, self.c.max_position - self.c.num_draft_tokens - 1)

    @property
    def prompt(self) -> int:
        """Tokens of a prompt after which a few steps have room."""
        return max(1, min(PROMPT, self.last - 3 * (self.c.num_draft_tokens + 1)))

    # The kinds.

    def prompts(self) -> Iterator[StepPlan]:
        """From nothing and from a state, with and without exports, draws and scores."""
        n, seats = self.prompt, self.all_seats[:GROUP]
        yield self.step(
            prefill=(self.row(seats[0], 0, n, 0, emits=False, exports=self.exports(n, 4)),),
            seat_loads=self.loads(seats, GREEDY),
            page_updates=self.tables(seats),
        )
        yield self.step(prefill=tuple(self.row(s, 0, max(1, n - s % 2), s) for s in seats[:2]))
        start = PAGE_SIZE if n > PAGE_SIZE else 0
        state = 4 if start else None
        mixed = self.row(seats[0], start, n - start, 0, state_in=state, prompt_logprobs=2)
        yield self.step(
            prefill=(mixed, self.row(seats[1], 0, n, 1, exports=self.exports(n, 5))),
            decode=tuple(self.row(s, n, 1 + s % 2, s, state_in=state) for s in seats[2:]),
        )
        if self.is_live:
            yield self.step(
                prefill=(self.row(seats[0], 0, n, 0),),
                decode=(self.row(seats[1], n, 2, 1, state_in=1),),
                verify=self.verify(seats[2:], n + 1, 2),
            )

    def singles(self) -> Iterator[StepPlan]:
        """Rows of single tokens: one, several, recomputed ones; and those that verify drafts."""
        n, seats = self.prompt, self.all_seats[:3]
        yield self.step(decode=(self.row(seats[0], n, 1, 0, state_in=0),))
        yield self.step(decode=(self.row(seats[0], n, 2, 0, state_in=0, emits=False),))
        yield self.step(decode=tuple(self.row(s, n, 1 + s % 2, s, state_in=s) for s in seats))
        if not self.is_live:
            return
        yield self.step(verify=self.verify(seats[:1], n + 1, 0))
        for seat in seats:  # known again, so that what they drafted leaves room
            yield self.step(decode=(self.row(seat, n, 1, seat, state_in=seat),))
        yield self.step(verify=self.verify(seats, n + 1, 0, export=True), tell_drafts=seats)

    def near(self) -> Iterator[StepPlan]:
        """At the beginning, where nothing has to be left out of the past."""
        seats = self.all_seats[:3]
        yield self.step(
            prefill=tuple(self.row(s, 0, 1 + s % 2, s) for s in seats),
            seat_loads=self.loads(seats, GREEDY),
            page_updates=self.tables(seats),
        )
        yield self.step(decode=tuple(self.row(s, 2, 1, s, state_in=s) for s in seats))
        if self.is_live:
            yield self.step(verify=self.verify(seats, 3, 0))

    def far(self) -> Iterator[StepPlan]:
        """At the end of the longest sequence: what looks at a part of the past does so there."""
        last, seats = self.last, self.all_seats[:3]
        start = max(0, last - 3) // PAGE_SIZE * PAGE_SIZE
        begun = 6 if start else None
        rows = tuple(self.row(s, last - 1, 1, s, state_in=s) for s in seats[1:])
        yield self.step(
            prefill=(self.row(seats[0], start, last - start, 0, state_in=begun),), decode=rows
        )
        if self.is_live:
            yield self.step(verify=self.verify(seats, last, 0))
        else:
            yield self.step(decode=(self.row(seats[0], last, 1, 0, state_in=0),))

    def numbers(self, most: int) -> Iterator[StepPlan]:
        """So many rows that draw, and so many tokens of prompts."""
        seats = self.all_seats[:SEATS]
        loads, tables = self.loads(seats, GREEDY), self.tables(seats)
        yield self.step(seat_loads=loads, page_updates=tables)
        for rows in ROWS:
            yield self.step(decode=tuple(self.row(s, 2, 1, NO_SLOT) for s in seats[:rows]))
        for tokens in TOKENS:
            each = min(self.last, tokens)
            if tokens <= most and each * len(seats) >= tokens:
                lengths = [each] * (tokens // each) + [tokens % each] * (tokens % each > 0)
                rows_of = zip(seats, lengths, strict=False)
                yield self.step(prefill=tuple(self.row(s, 0, n, NO_SLOT) for s, n in rows_of))

    def fanning_out(self) -> Iterator[StepPlan]:
        """One prompt, tokens for all seats, with and without a page that is not full."""
        seats, n = self.all_seats[:GROUP], self.prompt
        for length in sorted({n, n // PAGE_SIZE * PAGE_SIZE} - {0}):
            partial = length % PAGE_SIZE > 0
            yield self.step(
                prefill=(self.row(seats[0], 0, length, 0, emit_seats=seats),),
                fan_outs=tuple(
                    FanOut(
                        seats[0],
                        target,
                        PageId(0) if partial else None,
                        PageId(int(target)) if partial else None,
                    )
                    for target in seats[1:]
                ),
                seat_loads=self.loads(seats, NOISY),
                page_updates=self.tables(seats),
            )

    def drawing(self, params: SamplingParams, masked: bool = False) -> Iterator[StepPlan]:
        """Draws after a prompt and after single tokens, beside one that is greedy."""
        n, seats = self.prompt, self.all_seats[:3]
        loads = (*self.loads(seats[:2], params), *self.loads(seats[2:], GREEDY))
        yield self.step(
            prefill=(self.row(seats[0], 0, n, 0),),
            decode=tuple(self.row(s, n, 1, s, state_in=s) for s in seats[1:]),
            seat_loads=loads,
            page_updates=self.tables(seats),
            masks=self.masks(seats[:2], ()) if masked else (),
        )
        masks = self.masks(seats[:2], seats[:2] if self.is_live else ()) if masked else ()
        if self.is_live:  # the first has drafts after its prompt, the others after one token more
            rows = (*self.verify(seats[:1], n, 0), *self.verify(seats[1:], n + 1, 1))
            yield self.step(verify=rows, masks=masks)
        else:
            rows_known = tuple(self.row(s, n + 1, 1, s, state_in=s) for s in seats)
            yield self.step(decode=rows_known, masks=masks)

    def poisoning(self) -> StepPlan:
        """What is freed is made unreadable."""
        return self.step(poison_slots=(SlotId(SLOTS - 1),), poison_pages=(PageId(PAGES - 1),))

    # Their parts.

    def step(self, **parts: tuple[object, ...]) -> StepPlan:
        """The next plan."""
        self.steps += 1
        return StepPlan(step=self.steps, **parts)  # type: ignore[arg-type]

    def row(
        self,
        seat: Seat,
        start: int,
        count: int,
        slot: int,
        *,
        state_in: int | None = None,
        exports: tuple[Export, ...] = (),
        emits: bool = True,
        emit_seats: tuple[Seat, ...] | None = None,
        prompt_logprobs: int | None = None,
    ) -> Row:
        """`count` tokens from `start` on, into `slot`."""
        return Row(
            request=f"warm-{seat}",
            seat=seat,
            start=start,
            tokens=tuple(i % self.c.vocab_size for i in range(count)),
            state_in=None if state_in is None else SlotId(state_in),
            state_out=SlotId(slot),
            exports=exports,
            emit_seats=emit_seats or ((seat,) if emits else ()),
            prompt_logprobs=prompt_logprobs,
        )

    def verify(
        self, seats: Sequence[Seat], start: int, slot: int, *, export: bool = False
    ) -> tuple[VerifyRow, ...]:
        """Rows of seats that drew the token at `start`; slots from `slot` on, if any."""
        found = []
        for place, seat in enumerate(seats):
            held = SlotId(slot + place) if slot >= 0 else NO_SLOT
            found.append(
                VerifyRow(
                    request=f"warm-{seat}",
                    seat=seat,
                    start=start,
                    pending=0,
                    num_drafts=max(0, self.c.num_draft_tokens - place % 2),
                    state_in=held,
                    state_out=held,
                    export=Export(start + 2, SlotId(4 + place)) if export else None,
                )
            )
        return tuple(found)

    def exports(self, end: int, slot: int) -> tuple[Export, ...]:
        """One within `end` tokens from the beginning, where one is possible."""
        at = self.c.export_granularity
        return (Export(at, SlotId(slot)),) if at < end else ()

    def loads(self, seats: Sequence[Seat], params: SamplingParams) -> tuple[SeatLoad, ...]:
        """`seats` are taken by requests that draw like this."""
        return tuple(
            SeatLoad(
                seat=seat, request=f"warm-{seat}", sample_index=0, params=params, tokens=(0, 0),
                prompt_len=1,
            )
            for seat in seats
        )  # fmt: skip

    def tables(self, seats: Sequence[Seat]) -> tuple[PageUpdate, ...]:
        """Pages for the longest sequence: few, over and over; the last one is nobody's."""
        count = -(-self.c.max_position // PAGE_SIZE)
        several = max(1, min(PAGES, self.c.num_pages) - 1)
        pages = tuple(PageId(i % several) for i in range(count))
        return tuple(PageUpdate(seat, 0, pages) for seat in seats)

    def masks(self, seats: Sequence[Seat], live: Sequence[Seat]) -> tuple[SeatMask, ...]:
        """All tokens but the first; at every place of those that are `live`."""
        words = -(-self.c.vocab_size // 32)
        allowed = bytes(chain((0xFE,), (0xFF for _ in range(4 * words - 1))))
        width = self.c.num_draft_tokens + 1
        return tuple(SeatMask(s, (allowed,) * (width if s in live else 1)) for s in seats)
