"""A request and its samples, as the host half follows them; holds leases, decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from millpond.engine.guide import Guide
from millpond.engine.stream import RequestStream
from millpond.engine.types import EngineRequest, PrefixOutcome
from millpond.plan.step import TokenLogprob
from millpond.state.lease import Seat
from millpond.state.pages import PageHandle
from millpond.state.running import RunningState

NO_SEAT = Seat(-1)


class Request:
    """One submitted prompt: what was asked, and what its samples have in common."""

    __slots__ = (
        "aborting",
        "came",
        "length_limit",
        "outcome",
        "prompt_logprobs",
        "samples",
        "spec",
        "stop_from",
        "stop_ids",
        "stream",
        "told",
        "unfinished",
    )

    def __init__(
        self,
        spec: EngineRequest,
        arrival: int,
        stream: RequestStream,
        *,
        stop_ids: frozenset[int],
        token_limit: int,
    ) -> None:
        self.spec = spec
        self.stream = stream
        self.stop_ids = stop_ids
        # In tokens, prompt included: where a sample ends, and from where a stop token ends it.
        self.length_limit = min(len(spec.tokens) + spec.params.max_tokens, token_limit)
        self.stop_from = len(spec.tokens) + spec.params.min_tokens
        self.aborting = False
        self.came = monotonic()
        self.outcome: PrefixOutcome | None = None  # set by the first admission
        self.prompt_logprobs: list[TokenLogprob] | None = None  # until they were delivered
        if spec.params.prompt_logprobs is not None:
            self.prompt_logprobs = []
        self.told = False  # whether the first delta, which carries the outcome, went out
        self.unfinished = spec.params.n
        self.samples = [Sequence(self, index, arrival) for index in range(spec.params.n)]
        self.samples[0].siblings = self.samples[1:]

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.tokens)


class Sequence:
    """One sample of a request: its tokens, and what it holds while it runs.

    Until the prompt is folded, sample 0 runs for all: the others, its `siblings`, hold a seat each
    and nothing else. At the prompt's end they fan out and are sequences of their own.
    """

    __slots__ = (
        "branch_seen",
        "calm_until",
        "due",
        "epoch",
        "failed_end",
        "failures",
        "finish_reason",
        "folded",
        "guide",
        "index",
        "is_first",
        "is_leaving",
        "is_live",
        "order",
        "own_seat",
        "pages",
        "pages_sent",
        "patience",
        "planned",
        "prompt_len",
        "request",
        "resumed_end",
        "salt",
        "seat",
        "siblings",
        "state",
        "tokens",
    )

    def __init__(self, request: Request, index: int, arrival: int) -> None:
        spec = request.spec
        self.request = request
        self.index = index
        # First if it was overtaken too often; the last in this order is preempted first.
        self.order = (1, -spec.priority, arrival, index)
        self.is_first = False
        self.patience: int | None = None  # admissions of others it has still to bear
        self.due: int | None = None  # the admission after which it has none left
        self.tokens = list(spec.tokens)  # known: the prompt, then what was generated
        self.prompt_len = len(spec.tokens)
        self.folded = 0  # tokens in the current state
        self.planned = 0  # until it is live: tokens in the state of the last row that was planned
        self.state = RunningState(self.name)
        self.pages: list[PageHandle] = []
        self.pages_sent = 0  # of them, in the seat's page table on the device
        self.seat = NO_SEAT
        self.own_seat: tuple[Seat, ...] = ()
        self.is_live = False  # drew a token in this seat: the device knows its newest tokens
        self.calm_until = 0  # tokens up to which live rows need no page and pass no anchor
        self.is_leaving = False  # runs no longer, and a step in flight has a row of it
        self.siblings: list[Sequence] = []
        self.epoch = 0  # at its admission, with the salt of its keys
        self.salt = b""
        self.branch_seen = 0  # how far the index knows its tokens beyond any state, at admission
        self.resumed_end = 0  # of the checkpoint it started from, 0: none
        self.failures = 0  # failed steps in a row, without getting past `failed_end` in between
        self.failed_end = 0
        self.finish_reason: str | None = None
        self.guide: Guide | None = None  # what may be drawn, where not everything may

    @property
    def name(self) -> str:
        """For ledger messages: the request, and which sample of several."""
        spec = self.request.spec
        return spec.request_id if spec.params.n == 1 else f"{spec.request_id}/{self.index}"

    @property
    def group(self) -> Iterable[Sequence]:
        """What is admitted, and preempted, together: this sequence and its siblings."""
        return (self, *self.siblings)

    def go_first(self) -> None:
        """Come before all that were not overtaken too often, whatever their priority."""
        self.is_first = True
        self.order = (0, 0, *self.order[2:])

    def outranked_by(self, other: Sequence) -> bool:
        """Whether a lower priority makes this one give way to `other`."""
        return not self.is_first and self.request.spec.priority < other.request.spec.priority

    def sit(self, seat: Seat) -> None:
        """Take a seat whose page table is empty."""
        self.seat = seat
        self.own_seat = (seat,)
        self.is_live = False
        self.calm_until = 0
        self.pages_sent = 0
