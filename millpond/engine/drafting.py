"""How many drafts a live sequence verifies, and the pages they need. Pushes nobody out."""

from __future__ import annotations

from millpond.engine.ledger import Ledger, pages_for
from millpond.engine.request import Sequence
from millpond.plan.step import PAGE_SIZE


def take_pages(ledger: Ledger, sequence: Sequence, known: int, most: int) -> None:
    """Room for `most` drafts after `known` tokens, as many of the next step, and the token between.

    Nobody is pushed out for drafts: without room there are fewer of them.
    """
    end = min(known + 2 * most + 1, sequence.request.length_limit)
    wanted = pages_for(end) - len(sequence.pages)
    if wanted > 0:
        ledger.evict_pages(wanted)
        sequence.pages += ledger.pages.take(min(wanted, ledger.pages.num_free))


def num_drafts(sequence: Sequence, known: int, most: int) -> int:
    """At most `most` after `known` tokens: as its pages hold, and as its answer may still need.

    A step draws one token more than it accepts drafts, and no token is wanted beyond the last.
    """
    last = min(sequence.request.length_limit - 1, len(sequence.pages) * PAGE_SIZE)
    return max(0, min(most, last - known))


def calm_until(sequence: Sequence, most: int, anchor: int | None) -> int:
    """The most tokens that may be known while live rows take no page and verify `most` drafts.

    Nor do they pass the next `anchor` on the way, if there is one.
    """
    room = min(sequence.request.length_limit, len(sequence.pages) * PAGE_SIZE) - 2 * most - 1
    return room if anchor is None else min(room, anchor)
