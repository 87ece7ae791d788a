"""Admission: a sequence gets all it needs until its next yield point, or nothing changes.

Knows the ledger and one sequence; the order in which sequences come is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from time import monotonic
from typing import NamedTuple

from millpond.engine.counters import Counters
from millpond.engine.ledger import Ledger, pages_for
from millpond.engine.request import Sequence
from millpond.engine.types import PrefixOutcome
from millpond.errors import Exhausted
from millpond.plan.step import PAGE_SIZE
from millpond.state.lease import SlotId
from millpond.state.prefix import PrefixMatch
from millpond.telemetry import REQUESTS

NO_MATCH = PrefixMatch(0, None, (), 0, "disabled")


def meet(ledger: Ledger, sequence: Sequence) -> PrefixMatch:
    """Look a waiting sequence up under the keys of this moment, and note what the index shows.

    Where it knows more of the prompt than any state covers, prompts were alike and then parted.
    """
    sequence.epoch = ledger.epoch
    sequence.salt = ledger.salt(sequence.request.spec.cache_salt)
    match = find_start(ledger, sequence)
    sequence.branch_seen = match.indexed_end if match.indexed_end > match.end else 0
    return match


def find_start(ledger: Ledger, sequence: Sequence) -> PrefixMatch:
    """The deepest checkpoint a sequence may start from; changes nothing.

    A token of the prompt must remain to give logits, unless generated tokens follow it; those are
    folded one by one, so no checkpoint beyond the prompt is used.
    """
    if not ledger.settings.prefix_caching:
        return NO_MATCH
    prompt = sequence.request.spec.tokens
    if sequence.request.prompt_logprobs is not None:
        return PrefixMatch(0, None, (), 0, "needs_prompt_logits")
    limit = min(len(prompt), len(sequence.tokens) - 1)
    return ledger.index.match(prompt, sequence.salt, limit)


def missing_pages(sequence: Sequence, end: int) -> tuple[int, int]:
    """Pages to take for a row up to `end`: its own, and the siblings' copies of a partial page.

    Siblings get their pages with the row that ends the prompt; on the page grid they copy none.
    """
    own = max(0, pages_for(end) - len(sequence.pages))
    fans_out = end == sequence.prompt_len and end % PAGE_SIZE
    copies = sum(not one.pages for one in sequence.siblings) if fans_out else 0
    return own, copies


def take_pages(ledger: Ledger, sequence: Sequence, end: int) -> None:
    """The pages of a row up to `end`, and its siblings' when it ends the prompt.

    `Exhausted` with nothing taken. Taking again what a planned row did not use takes nothing.
    """
    own, copies = missing_pages(sequence, end)
    taken = ledger.pages.take(own + copies)
    sequence.pages += taken[copies:]
    if end == sequence.prompt_len:
        whole = sequence.pages[: end // PAGE_SIZE]
        for index, one in enumerate(sequence.siblings):
            if not one.pages:
                ledger.pages.retain(whole)
                one.pages = whole + (taken[index : index + 1] if copies else [])


class Admitted(NamedTuple):
    """The first row of a sequence that was let in; its pages and its output slot are taken."""

    end: int
    state_in: SlotId | None
    state_out: SlotId


def admit(
    ledger: Ledger,
    sequence: Sequence,
    match: PrefixMatch,
    running: Collection[Sequence],
    first_end: Callable[[Sequence, int], int],
) -> Admitted | None:
    """Give `sequence` its start, an output slot, the pages of its first row, and its seats.

    `match` is what `meet` has just found; `first_end` tells where a first row that starts at a
    given position ends. With others running, a sequence also waits until its whole prompt finds
    room beside theirs: what would be pushed out at once is not let in. None, with nothing changed,
    when it has to wait.
    """
    if not has_seats(ledger, sequence):
        return None
    end = first_end(sequence, match.end)
    if not _has_room(ledger, sequence, match, end, running):
        return None
    try:
        admitted = _take(ledger, sequence, match, end)
    except Exhausted:  # room that was evictable by count was not by place
        return None
    return admitted


def has_seats(ledger: Ledger, sequence: Sequence) -> bool:
    """Whether a sequence and its siblings could sit."""
    return len(ledger.seats) > len(sequence.siblings)


def _take(ledger: Ledger, sequence: Sequence, match: PrefixMatch, end: int) -> Admitted:
    """Lease everything, or raise with nothing leased."""
    with ExitStack() as undo:
        undo.callback(ledger.vacate, sequence)
        undo.callback(sequence.state.cancel, ledger.pool)
        if match.checkpoint is not None:
            sequence.state.start(ledger.index.use(match, sequence.name))
            sequence.pages = list(match.pages)
        sequence.resumed_end = sequence.folded = sequence.planned = match.end
        # With no slot to spare, the checkpoint itself is taken over.
        if not ledger.pool.num_free and not ledger.evict_slot():
            ledger.drop_checkpoint_of(sequence)
        state_in, state_out = sequence.state.plan_output(ledger.pool)
        ledger.evict_pages(sum(missing_pages(sequence, end)))
        take_pages(ledger, sequence, end)
        for one in sequence.group:
            one.sit(ledger.seats.pop())
        undo.pop_all()
    return Admitted(end, state_in, state_out)


def fits(ledger: Ledger, sequence: Sequence, running: Collection[Sequence]) -> bool:
    """Whether a sequence would be let in now, beside those running; takes nothing."""
    if not has_seats(ledger, sequence):
        return False
    return _has_room(ledger, sequence, meet(ledger, sequence), len(sequence.tokens), running)


def could_fit(ledger: Ledger, sequence: Sequence, staying: Collection[Sequence]) -> bool:
    """Whether a sequence could be let in if of those running only the `staying` were left."""
    held = sum(len(one.pages) for other in staying for one in other.group)
    wanted = sum(missing_pages(sequence, len(sequence.tokens)))
    wanted += sum(sum(missing_pages(other, len(other.tokens))) for other in staying)
    seats = ledger.settings.max_batch_size - sum(len(other.siblings) + 1 for other in staying)
    return held + wanted <= ledger.pages.size and seats > len(sequence.siblings)


def _has_room(
    ledger: Ledger,
    sequence: Sequence,
    match: PrefixMatch,
    end: int,
    running: Collection[Sequence],
) -> bool:
    """Whether slots and pages are free or evictable, without touching any."""
    pool, pages, index = ledger.pool, ledger.pages, ledger.index
    # The matched checkpoint counts: as its only reader the sequence may take it over.
    if not (pool.num_free or index.evictable_slots):
        return False
    wanted = sum(missing_pages(sequence, len(sequence.tokens) if running else end))
    wanted += sum(sum(missing_pages(other, len(other.tokens))) for other in running)
    if wanted - len(match.pages) <= pages.num_free:
        return True
    evicted = wanted - pages.num_free  # were the matched pages evicted too, which they will not be
    if evicted > index.num_pages:
        return False
    # The exact number visits every indexed page; a bound that counts shared pages once for each who
    # holds them will often do.
    held = sum(len(one.pages) for other in running for one in other.group)
    return evicted <= pages.size - pages.num_free - held or evicted <= index.evictable_pages


def tell_outcome(
    counters: Counters,
    sequence: Sequence,
    match: PrefixMatch,
    held_seconds: float,
    loaded_tokens: int = 0,
) -> None:
    """Count and log how a prompt met the index, at the request's first admission only.

    The one place where that is decided: usage, metrics and log all show this outcome.
    """
    request = sequence.request
    if request.outcome is not None:
        return
    kind = None if match.checkpoint is None else match.checkpoint.kind.value
    request.outcome = PrefixOutcome(
        reason=match.reason,
        prompt_tokens=request.prompt_len,
        cached_tokens=match.end,
        kind=kind,
        held_seconds=held_seconds,
        loaded_tokens=loaded_tokens,
        queued_seconds=monotonic() - request.came,
    )
    counters.prompt_tokens += request.prompt_len
    counters.prefix_tokens[match.reason] += request.outcome.tokens
    if kind is not None:
        counters.prefix_hits[kind] += 1
        counters.prefix_hit_tokens[kind] += match.end
    REQUESTS.debug(
        "%s: prefix %s, %d of %d prompt tokens cached, anchor %s, held %.3f s, %d loaded",
        request.spec.request_id,
        match.reason,
        match.end,
        request.prompt_len,
        kind or "none",
        held_seconds,
        loaded_tokens,
    )
