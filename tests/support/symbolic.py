"""A device tower in which a slot holds the very tokens folded into it; no torch.

A state is a fold over tokens, so here a slot's content is a tuple of them, a page holds a digest
per position, and a seat its table, its pool tail and its history. What was never written, or was
poisoned, is None, and reading it raises `Violation`, as does every other breach of the rules of a
`StepPlan`. The "model" is a pure function of (tokens, seed, sample index), computed from what was
*read*, so any mistake of ownership also shows in the text.

Two plans may be in flight where the capabilities say so: a test decides for each whether it runs
when it is launched, or as late as possible.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from millpond.errors import StepFailed
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import (
    PAGE_SIZE,
    Capabilities,
    Emitted,
    Ended,
    Export,
    Launched,
    Row,
    RowLogprobs,
    SeatLoad,
    StepPlan,
    StepResult,
    TokenLogprob,
    Verified,
    VerifyRow,
    Written,
)

VOCAB = 50
POOL = 4  # tokens of one pooled indexer key; a seat keeps those of the unfinished one
State = tuple[int, ...]
"""Tokens in order: t when folded in chunk form, ~t when folded in per-token form."""


class Violation(AssertionError):
    """The plan breaks a rule, or something was read that its reader did not write."""


def as_state(tokens: Sequence[int], prompt_len: int) -> State:
    """The one right content: the prompt in chunk form, what was generated in per-token form."""
    return (*tokens[:prompt_len], *(~t for t in tokens[prompt_len:]))


def as_tokens(state: State) -> tuple[int, ...]:
    """What was folded, whatever the form."""
    return tuple(t if t >= 0 else ~t for t in state)


def draw(tokens: Sequence[int], seed: int, sample_index: int) -> int:
    """The token after `tokens`."""
    return _digest(tokens, seed, sample_index) % VOCAB


def naive_text(
    prompt: Sequence[int],
    params: SamplingParams,
    sample_index: int,
    *,
    eos: Sequence[int] = (),
    token_limit: int,
) -> tuple[list[int], str]:
    """What a loop without any engine generates, and why it ends."""
    tokens = list(prompt)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    while True:
        tokens.append(draw(tokens, params.seed, sample_index))
        made = len(tokens) - len(prompt)
        if tokens[-1] in stops and made >= params.min_tokens:
            return tokens[len(prompt) :], "stop"
        if made >= params.max_tokens or len(tokens) >= token_limit:
            return tokens[len(prompt) :], "length"


def _digest(tokens: Sequence[int], *more: int) -> int:
    data = array("q", [*tokens, *more]).tobytes()
    return int.from_bytes(blake2b(data, digest_size=4).digest(), "little")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


@dataclass
class SymbolicSeat:
    """What a seat holds on the device."""

    load: SeatLoad
    history: list[int]
    table: list[int] = field(default_factory=list)
    tail: tuple[int, ...] = ()
    entries: list[int] = field(default_factory=list)  # what its pages must hold
    live: bool = False  # drew a token since it was loaded
    pending: int = 0  # accepted drafts that no state has yet
    broken: bool = False  # its state was not written: what comes of it is nonsense
    drafts: tuple[int, ...] = ()

    @property
    def guess(self) -> int:
        """What drafts leave on a page where nothing is certain yet."""
        return -1 - self.load.seat


@dataclass(eq=False)
class SymbolicFlight:
    """A plan that was launched."""

    executor: SymbolicExecutor
    plan: StepPlan
    is_ahead: bool  # launched while another was in flight
    outcome: Ended | None = None

    def result(self) -> StepResult:
        """Let time pass until it has ended."""
        flights = self.executor.flights
        _require(flights[:1] == [self], "results are asked for out of order")
        outcome = self.executor.land(self)
        flights.remove(self)
        if outcome.failed:
            self.executor.wreck()
        return outcome.result()


@dataclass
class SymbolicExecutor:
    """Runs plans on symbols. The hooks let a test interfere where a device could."""

    capabilities: Capabilities
    mode: str = "interior"
    max_prefill_tokens: int | None = None
    during: Callable[[StepPlan], None] | None = None  # while the forward runs
    fail: Callable[[StepPlan], Exception | None] | None = None
    writes: Callable[[int, int], bool] = lambda slot, end: True  # whether all layers write a pair
    finite: Callable[[Row | VerifyRow], bool] = lambda row: True
    right: Callable[[], int] = lambda: 0  # how many of the next drafts will be accepted
    any_form: bool = False  # prompts may start from what was folded token by token
    is_late: Callable[[StepPlan], bool] = lambda plan: False  # runs when its result is asked for
    flights: list[SymbolicFlight] = field(default_factory=list)  # results not asked for yet
    plans: list[StepPlan] = field(default_factory=list)
    closed: bool = False
    violation: Violation | None = None

    def __post_init__(self) -> None:
        caps = self.capabilities
        self.slots: list[State | None] = [None] * caps.num_slots
        self.pages: list[list[int | None]] = [[None] * PAGE_SIZE for _ in range(caps.num_pages)]
        self.seats: dict[int, SymbolicSeat] = {}
        self._is_ahead = False  # the plan that runs
        self._tables: dict[int, list[int]] = {}  # by seat: its pages, as of the last launch

    def close(self) -> None:
        self.closed = True

    def launch(self, plan: StepPlan) -> Launched:
        """Run a plan now, or later."""
        flight = SymbolicFlight(self, plan, is_ahead=bool(self.flights))
        self.flights.append(flight)
        try:
            self._check_flights(plan)
        except Violation as violation:
            self.violation = violation
            flight.outcome = Ended(violation)
        if not self.is_late(plan):
            self.land(flight)
        return flight

    def land(self, last: SymbolicFlight) -> Ended:
        """Run what was launched, in order, up to `last`."""
        for flight in self.flights[: self.flights.index(last) + 1]:
            if flight.outcome is None:
                self._is_ahead = flight.is_ahead
                flight.outcome = Ended.inline(self.run, flight.plan)
            if flight.outcome.failed:
                self.wreck()
        assert last.outcome is not None
        return last.outcome

    def wreck(self) -> None:
        """A step failed: so does what was launched after it."""
        for flight in self.flights:
            if flight.outcome is None:
                self._break(flight.plan)
                flight.outcome = Ended(StepFailed("the step before failed"))

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan; a `Violation` is kept, since an engine swallows what its device raises."""
        try:
            return self._execute(plan)
        except Violation as violation:
            self.violation = violation
            raise

    def _execute(self, plan: StepPlan) -> StepResult:
        _require(not self.closed, "a closed executor is asked to run")
        self.plans.append(plan)
        self._check_plan(plan)
        error = self.fail(plan) if self.fail is not None else None
        if error is not None:
            self._break(plan)
            if self.during is not None:
                self.during(plan)
            raise error
        self._prepare(plan)
        before = {slot: self.slots[slot] for slot in _inputs(plan) if slot is not None}
        verified: list[Verified] = []
        emitted: list[Emitted] = []
        written: list[Written] = []
        logprobs: list[RowLogprobs] = []
        for row in plan.prefill:
            self._fold(row, before, written, emitted, logprobs, chunk=True)
        for row in plan.decode:
            self._fold(row, before, written, emitted, logprobs, chunk=False)
        for live in plan.verify:
            self._verify(live, before, written, emitted, verified)
        if self.during is not None:
            self.during(plan)
        for fan_out in plan.fan_outs:
            source, target = self.seats[fan_out.source], self.seats[fan_out.target]
            target.tail = source.tail
            if fan_out.source_page is not None and fan_out.target_page is not None:
                _require(self.pages[fan_out.target_page] == [None] * PAGE_SIZE, "copy onto content")
                self.pages[fan_out.target_page] = list(self.pages[fan_out.source_page])
        for number in {one.seat for one in emitted}:
            self._propose(self.seats[number])
        return StepResult(
            step=plan.step,
            emitted=tuple(emitted),
            verified=tuple(verified),
            written=tuple(written),
            prompt_logprobs=tuple(logprobs),
        )

    def page_content(self, tokens: Sequence[int], depth: int) -> list[int]:
        """What page `depth` of these tokens holds, when it is full."""
        first = depth * PAGE_SIZE
        return [page_entry(tokens, position) for position in range(first, first + PAGE_SIZE)]

    # The rules of a plan that need no content.

    def _check_flights(self, plan: StepPlan) -> None:
        others = [flight.plan for flight in self.flights[:-1]]
        _require(
            len(others) <= self.capabilities.runs_ahead, f"{len(others) + 1} steps are in flight"
        )
        flying = {seat: tuple(table) for seat, table in self._tables.items()}
        for load in plan.seat_loads:
            self._tables[load.seat] = []
        for update in plan.page_updates:
            self._tables[update.seat].extend(update.pages)
        for other in others:
            self._check_rows_follow(plan, other)
            self._check_nothing_is_reused(plan, other, flying)

    def _check_rows_follow(self, plan: StepPlan, other: StepPlan) -> None:
        """A row after one in flight goes on where that ends, from what only the device knows."""
        flying = {row.seat: row for row in other.prefill + other.decode + other.verify}
        parted = {fan_out.target for fan_out in other.fan_outs}
        for row in plan.prefill + plan.decode + plan.verify:
            before = flying.get(row.seat)
            _require(row.seat not in parted, f"{row.request} goes on before its samples part")
            if before is None:
                continue
            _require(before.request == row.request, f"seat {row.seat} changes hands in flight")
            _require(row.state_in == before.state_out, f"{row.request} does not follow its row")
            if isinstance(before, VerifyRow):
                _require(isinstance(row, VerifyRow), "a live row is followed by known tokens")
                _require(before.start < row.start <= before.end, f"a row ahead at {row.start}")
                continue
            emits, live = bool(before.emit_seats), isinstance(row, VerifyRow)
            _require(len(before.emit_seats) < 2, f"{row.request} goes on before its samples part")
            _require(emits == live, f"{row.request} takes a token for known, or known ones for one")
            _require(row.start == before.end, f"a row ahead at {row.start}, not {before.end}")
            _require(not (live and row.end > row.start + 1), "drafts before there were any")

    def _check_nothing_is_reused(
        self, plan: StepPlan, other: StepPlan, tables: Mapping[int, Sequence[int]]
    ) -> None:
        """What a row in flight reads and writes is its own until it has ended."""
        for row in other.prefill + other.decode + other.verify:
            seats = {row.seat, *(() if isinstance(row, VerifyRow) else row.emit_seats)}
            loaded = seats & {load.seat for load in plan.seat_loads}
            _require(not loaded, f"seats {loaded} change hands in flight")
            written = {row.state_out, *(export.slot for export in _exports(row))}
            touched = written | {row.state_in}
            _require(not touched & {*plan.poison_slots}, "a slot is poisoned that is in flight")
            table, pages = {*tables[row.seat]}, self._pages_written(row, tables)
            copies = {fan_out.target_page for fan_out in other.fan_outs if fan_out.target in seats}
            table, pages = table | copies, pages | copies
            _require(not table & {*plan.poison_pages}, "a page is poisoned that is in flight")
            for after in plan.prefill + plan.decode + plan.verify:
                writes = {after.state_out, *(export.slot for export in _exports(after))}
                if after.seat == row.seat:
                    writes.discard(row.state_out)
                    _require(not writes & touched, f"{row.request}: its own slot is reused")
                    continue
                _require(not writes & touched, f"slots {writes & touched} are reused in flight")
                _require(after.state_in not in written, "what is written in flight is read")
                its, own = {*self._tables[after.seat]}, self._pages_written(after, self._tables)
                _require(not its & pages, f"pages {its & pages} are written in flight")
                _require(not table & own, f"pages {table & own} are read in flight")

    def _pages_written(self, row: Row | VerifyRow, tables: Mapping[int, Sequence[int]]) -> set[int]:
        """Those of the tokens a row folds, and of all drafts before and after."""
        end = row.end
        if isinstance(row, VerifyRow):
            end += row.num_drafts + self.capabilities.num_draft_tokens
        elif row.emit_seats:
            end += self.capabilities.num_draft_tokens
        return {*tables[row.seat][row.start // PAGE_SIZE : -(-end // PAGE_SIZE)]}

    def _check_plan(self, plan: StepPlan) -> None:
        rows = plan.prefill + plan.decode + plan.verify
        _require(bool(rows), "a step without rows")
        _require(len({row.seat for row in rows}) == len(rows), "two rows in one seat")
        outputs = [row.state_out for row in rows]
        outputs += [export.slot for row in rows for export in _exports(row)]
        _require(len(set(outputs)) == len(outputs), "two writes to one slot")
        inputs = [slot for slot in _inputs(plan) if slot is not None]
        for row in plan.prefill + plan.decode:
            _require(bool(row.tokens), "a row without tokens")
        for row in rows:
            _require((row.state_in is None) == (row.start == 0), "no state, or one too many")
            readers = inputs.count(row.state_out)
            own = row.state_in == row.state_out
            _require(readers == own, f"slot {row.state_out} is read by others while written")
            for export in _exports(row):
                _require(export.slot not in inputs, "an export overwrites what is read")
        poisoned = {*plan.poison_slots}
        _require(not poisoned.intersection(inputs), "a slot is poisoned and read")
        self._check_budget(plan)

    def _check_budget(self, plan: StepPlan) -> None:
        if self.max_prefill_tokens is None:
            return
        oldest = len(plan.prefill[0].tokens) if plan.prefill else 0
        others = sum(len(row.tokens) for row in plan.prefill[1:])
        others += sum(len(row.tokens) for row in plan.decode if len(row.tokens) > 1)
        _require(
            oldest + others <= self.max_prefill_tokens
            or (oldest <= PAGE_SIZE and others <= self.max_prefill_tokens),
            f"{oldest} and {others} tokens under a budget of {self.max_prefill_tokens}",
        )

    # One forward.

    def _prepare(self, plan: StepPlan) -> None:
        for slot in plan.poison_slots:
            self.slots[slot] = None
        for page in plan.poison_pages:
            self.pages[page] = [None] * PAGE_SIZE
        for load in plan.seat_loads:
            self.seats[load.seat] = SymbolicSeat(load, list(load.tokens))
        for update in plan.page_updates:
            table = self.seats[update.seat].table
            _require(update.first == len(table), "a page update leaves a gap, or repeats itself")
            table.extend(update.pages)

    def _break(self, plan: StepPlan) -> None:
        """A forward that stopped half way: garbage in everything it may write, nothing prepared."""
        for row in plan.prefill + plan.decode + plan.verify:
            for slot in (row.state_out, *(export.slot for export in _exports(row))):
                self.slots[slot] = (VOCAB + 1,)
        for load in plan.seat_loads:
            self.seats.pop(load.seat, None)

    def _fold(
        self,
        row: Row,
        before: dict[int, State | None],
        written: list[Written],
        emitted: list[Emitted],
        logprobs: list[RowLogprobs],
        *,
        chunk: bool,
    ) -> None:
        if self._is_ahead and self.seats[row.seat].broken:
            for slot in (row.state_out, *(export.slot for export in row.exports)):
                self.slots[slot] = (VOCAB + 1,)
            emitted += [Emitted(seat=number, token=0) for number in row.emit_seats]
            for number in row.emit_seats:
                self.seats[number].broken = True
            return
        seat, state = self._begin(row, before)
        known, prompt_len = seat.history, seat.load.prompt_len
        verifies = seat.drafts or self.capabilities.runs_ahead
        _require(not (seat.live and verifies), f"{row.request} is live and does not verify")
        _require(row.tokens == tuple(known[row.start : row.end]), f"{row.request}: not its tokens")
        self._check_grid(row, prompt_len, chunk=chunk)
        after = (*state, *(row.tokens if chunk else (~t for t in row.tokens)))
        self._write_pages(row, seat)
        self._write_tail(row, seat)
        self._write_slots(row, after, written)
        self._emit(row, tuple(known), emitted, logprobs)

    def _begin(
        self, row: Row | VerifyRow, before: dict[int, State | None]
    ) -> tuple[SymbolicSeat, State]:
        """The seat of a row and the state it starts from, which must be its own."""
        seat = self.seats.get(row.seat)
        _require(seat is not None, f"seat {row.seat} was never loaded")
        assert seat is not None
        _require(seat.load.request == row.request, f"seat {row.seat} is of {seat.load.request}")
        state = () if row.state_in is None else before[row.state_in]
        _require(state is not None, f"{row.request} reads slot {row.state_in}, which holds nothing")
        assert state is not None
        prompt_len = seat.load.prompt_len
        _require(len(state) == row.start, f"row starts at {row.start}, its state at {len(state)}")
        given = state
        if self.any_form:
            given = (*as_tokens(state[:prompt_len]), *state[prompt_len:])
        _require(
            given == as_state(seat.history[: row.start], prompt_len),
            f"{row.request} reads another's",
        )
        return seat, state

    def _write_slots(self, row: Row | VerifyRow, after: State, written: list[Written]) -> None:
        targets = [(row.state_out, len(after)), *((e.slot, e.end) for e in _exports(row))]
        for slot, end in targets:
            fresh = slot != row.state_in
            _require(not fresh or self.slots[slot] is None, f"slot {slot} is written, but not free")
            if end > len(after):
                continue  # not reached
            if self.writes(slot, end):
                self.slots[slot] = after[:end]
                written.append(Written(slot, end))
            elif slot == row.state_out:
                self.seats[row.seat].broken = True

    # Drafts.

    def _verify(
        self,
        row: VerifyRow,
        before: dict[int, State | None],
        written: list[Written],
        emitted: list[Emitted],
        verified: list[Verified],
    ) -> None:
        if self._is_ahead and self.seats[row.seat].broken:
            self.slots[row.state_out] = (VOCAB + 1,)
            emitted.append(Emitted(seat=row.seat, token=0))
            verified.append(Verified(row.seat, 0, 0))
            return
        seat, state = self._begin(row, before)
        known, most = seat.history, self.capabilities.num_draft_tokens
        _require(most > 0 or self.capabilities.runs_ahead, "a verify row where nobody drafts")
        _require(seat.live, f"{row.request} verifies before it drew a token in its seat")
        _require(row.start >= seat.load.prompt_len, "prompt tokens are folded in a verify row")
        bound, pending = row.pending, seat.pending
        right = pending <= bound if self._is_ahead else pending == bound
        _require(right, f"{row.request}: {pending} drafts are not folded, {bound} told")
        end = row.start + pending + 1
        _require(end == len(known), f"{row.request} ends at {end} of {len(known)}")
        _require(0 <= row.num_drafts <= most, f"{row.num_drafts} drafts of {most}")
        if row.export is not None:
            _require(self.mode != "off", "an export in mode off")
            _require(row.start < row.export.end < row.end, f"export at {row.export.end} outside")
            _require(row.export.end % PAGE_SIZE == 0, f"export at {row.export.end} off the grid")
        self._write_slots(row, (*state, *(~t for t in known[row.start :])), written)
        drafts = seat.drafts[: row.num_drafts]
        drawn: list[int] = []
        params, index = seat.load.params, seat.load.sample_index
        for draft in (*drafts, None):
            drawn.append(draw((*known, *drawn), params.seed, index))
            if drawn[-1] != draft:
                break
        self._write_verified(row, seat, [*known, *drawn[:-1]])
        sound = self.finite(row)
        last = len(drawn) - 1
        emitted += [
            Emitted(seat=seat.load.seat, token=token, finite=sound or at < last)
            for at, token in enumerate(drawn)
        ]
        verified.append(Verified(seat.load.seat, len(drafts), last))
        known += drawn
        seat.pending = last

    def _write_verified(self, row: VerifyRow, seat: SymbolicSeat, sure: list[int]) -> None:
        """Writes the certain token and all drafts; what was rejected leaves guesses."""
        first = len(seat.history) - 1
        end = first + 1 + row.num_drafts
        room = len(seat.table) * PAGE_SIZE
        _require(row.end + row.num_drafts <= room, f"{row.request} has no page for its drafts")
        right = seat.entries
        right += [page_entry(sure, position) for position in range(len(right), len(sure))]
        have = [self._entry(seat, position) for position in range(end)]
        _require(have[:first] == right[:first], f"{row.request}: other's page")
        _require(set(have[first:]) <= {None, seat.guess}, f"{row.request} overwrites a page")
        for position in range(first, end):
            certain = position < len(sure)
            self._set_entry(seat, position, right[position] if certain else seat.guess)
        pool = first // POOL * POOL
        _require(seat.tail == tuple(sure[pool:first]), f"{row.request}: other tail")
        seat.tail = tuple(sure[len(sure) // POOL * POOL :])

    def _propose(self, seat: SymbolicSeat) -> None:
        """Drafts of which some are right; they leave guesses on pages that are there."""
        seat.live = True
        count = self.capabilities.num_draft_tokens
        if not count or seat.broken:
            return
        params, tokens, right = seat.load.params, list(seat.history), self.right()
        for place in range(count):
            token = draw(tokens, params.seed, seat.load.sample_index)
            tokens.append((token + (place == right)) % VOCAB)
        seat.drafts = tuple(tokens[-count:])
        first = len(seat.history) - 1
        for position in range(first, min(first + count, len(seat.table) * PAGE_SIZE)):
            have = self._entry(seat, position)
            _require(have in (None, seat.guess), "a guess is written over what is certain")
            self._set_entry(seat, position, seat.guess)

    def _entry(self, seat: SymbolicSeat, position: int) -> int | None:
        return self.pages[seat.table[position // PAGE_SIZE]][position % PAGE_SIZE]

    def _set_entry(self, seat: SymbolicSeat, position: int, value: int) -> None:
        self.pages[seat.table[position // PAGE_SIZE]][position % PAGE_SIZE] = value

    def _check_grid(self, row: Row, prompt_len: int, *, chunk: bool) -> None:
        if not chunk:
            _require(row.start >= prompt_len, "prompt tokens are folded in per-token form")
            _require(not row.exports, "an export from a row in per-token form")
            return
        _require(row.start % PAGE_SIZE == 0, f"a prefill row starts at {row.start}")
        _require(row.end <= prompt_len, "generated tokens are folded in chunk form")
        _require(
            row.end % PAGE_SIZE == 0 or row.end == prompt_len, f"a prefill row ends at {row.end}"
        )
        _require(self.mode == "interior" or not row.exports, f"an export in mode {self.mode}")
        for export in row.exports:
            _require(
                row.start < export.end < row.end, f"export at {export.end}, not inside its row"
            )
            granularity = self.capabilities.export_granularity
            _require(export.end % granularity == 0, f"no kernel exports at {export.end}")

    def _write_pages(self, row: Row, seat: SymbolicSeat) -> None:
        _require(row.end <= len(seat.table) * PAGE_SIZE, f"{row.request} has no page for its end")
        tokens, right = seat.history, seat.entries
        for position in range(len(right), row.end):
            right.append(page_entry(tokens, position))
        for first in range(0, row.end, PAGE_SIZE):
            page = self.pages[seat.table[first // PAGE_SIZE]]
            folded = min(max(row.start - first, 0), PAGE_SIZE)
            end = min(row.end - first, PAGE_SIZE)
            _require(page[:folded] == right[first : first + folded], f"{row.request}: other's page")
            _require(
                page[folded:end] == [None] * (end - folded), f"{row.request} overwrites a page"
            )
            page[folded:end] = right[first + folded : first + end]

    def _write_tail(self, row: Row, seat: SymbolicSeat) -> None:
        tokens = tuple(seat.history)
        have = seat.tail if row.start % POOL else ()
        _require(have == tokens[row.start // POOL * POOL : row.start], f"{row.request}: other tail")
        seat.tail = tokens[row.end // POOL * POOL : row.end]

    def _emit(
        self, row: Row, seat_tokens: State, emitted: list[Emitted], logprobs: list[RowLogprobs]
    ) -> None:
        tokens = seat_tokens[: row.end]
        if row.prompt_logprobs is not None:
            follow = list(row.tokens[1:]) + ([] if row.next_token is None else [row.next_token])
            entries = [
                TokenLogprob(position=at, token=token, logprob=logprob(tokens[:at], token))
                for at, token in enumerate(follow, row.start + 1)
            ]
            logprobs.append(RowLogprobs(request=row.request, entries=tuple(entries)))
        for number in row.emit_seats:
            seat = self.seats[number]
            _require(seat.history == list(tokens), f"seat {number} of {row.request} draws early")
            _require(seat.load.request == row.request, f"seat {number} is not of {row.request}")
            token = draw(tokens, seat.load.params.seed, seat.load.sample_index)
            seat.history.append(token)
            emitted.append(Emitted(seat=seat.load.seat, token=token, finite=self.finite(row)))


def logprob(before: Sequence[int], token: int) -> float:
    """A made-up log probability of `token` after `before`."""
    return -(_digest(before, token) % 1000) / 100


def page_entry(tokens: Sequence[int], position: int) -> int:
    """What attention stores at `position`: it depends on every token up to there."""
    # A window is enough to tell one request from another, and keeps long prompts affordable.
    return hash((position, *tokens[max(0, position - 7) : position + 1]))


def _inputs(plan: StepPlan) -> list[int | None]:
    return [row.state_in for row in plan.prefill + plan.decode + plan.verify]


def _exports(row: Row | VerifyRow) -> tuple[Export, ...]:
    if isinstance(row, Row):
        return row.exports
    return () if row.export is None else (row.export,)


def step_failure(plan: StepPlan) -> StepFailed:
    """For the `fail` hook: every step fails."""
    return StepFailed(f"step {plan.step} fails on purpose")
