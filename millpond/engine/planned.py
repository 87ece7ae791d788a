"""Parts of a plan that remember whose they are, until the plan is committed. Decides nothing."""

from __future__ import annotations

from millpond.engine.request import Sequence
from millpond.plan.checkpoints import Anchor
from millpond.plan.step import PAGE_SIZE, Export, FanOut, Row, SeatLoad, StepPlan
from millpond.state.lease import SlotId


class PrefillRow:
    """A row of a prompt on its way into the plan: exports come last, when all rows have slots."""

    __slots__ = (
        "anchors",
        "end",
        "exports",
        "left_out",
        "sequence",
        "start",
        "state_in",
        "state_out",
    )

    def __init__(
        self,
        sequence: Sequence,
        start: int,
        end: int,
        anchors: tuple[Anchor, ...],
        slots: tuple[SlotId | None, SlotId],
    ) -> None:
        self.sequence = sequence
        self.start = start
        self.end = end
        self.anchors = anchors  # in start < anchor <= end
        self.state_in, self.state_out = slots
        self.exports: dict[int, SlotId] = {}
        self.left_out: dict[int, str] = {}  # anchors that got no slot, and why

    @property
    def saves_end(self) -> bool:
        """Whether the state the row ends with is to be published."""
        return bool(self.anchors) and self.anchors[-1].end == self.end

    @property
    def saved(self) -> tuple[Anchor, ...]:
        """The anchors that the row will leave a state at."""
        return tuple(a for a in self.anchors if a.end not in self.left_out)

    @property
    def fans_out(self) -> bool:
        """Whether the row ends a prompt of several samples."""
        return bool(self.sequence.siblings) and self.end == self.sequence.prompt_len

    @property
    def interior(self) -> tuple[Anchor, ...]:
        """The anchors that need an export; one at the row's end is the row's own output."""
        return tuple(a for a in self.anchors if a.end < self.end)

    def freeze(self) -> Row:
        """The row as the device gets it."""
        sequence, end = self.sequence, self.end
        spec = sequence.request.spec
        asks = sequence.request.prompt_logprobs is not None
        emits = end == len(sequence.tokens)
        return Row(
            request=spec.request_id,
            seat=sequence.seat,
            start=self.start,
            tokens=tuple(sequence.tokens[self.start : end]),
            state_in=self.state_in,
            state_out=self.state_out,
            exports=tuple(Export(at, self.exports[at]) for at in sorted(self.exports)),
            emit_seats=tuple(one.seat for one in sequence.group) if emits else (),
            prompt_logprobs=spec.params.prompt_logprobs if asks else None,
            next_token=sequence.tokens[end] if asks and end < sequence.prompt_len else None,
        )


class Scheduled:
    """A plan, and whose rows it holds: `prefill[i]` belongs to the plan's row i, and so on."""

    __slots__ = ("decode", "plan", "prefill", "verify")

    def __init__(
        self,
        plan: StepPlan,
        prefill: list[PrefillRow],
        decode: list[Sequence],
        verify: list[Sequence],
    ) -> None:
        self.plan = plan
        self.prefill = prefill
        self.decode = decode
        self.verify = verify


def seat_load(sequence: Sequence) -> SeatLoad:
    """What the device is told when a sequence takes its seat."""
    spec = sequence.request.spec
    return SeatLoad(
        seat=sequence.seat,
        request=spec.request_id,
        sample_index=sequence.index,
        params=spec.params,
        tokens=tuple(sequence.tokens),
        prompt_len=sequence.prompt_len,
    )


def fan_out(source: Sequence, target: Sequence) -> FanOut:
    """The partial page and the tail of `source` go to `target`; whole pages are shared."""
    page, offset = divmod(source.prompt_len, PAGE_SIZE)
    if not offset:
        return FanOut(source.seat, target.seat, None, None)
    return FanOut(source.seat, target.seat, source.pages[page].id, target.pages[page].id)
