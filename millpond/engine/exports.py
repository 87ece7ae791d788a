"""Which anchors of a forward get a slot, and why the others do not. Knows rows and the ledger."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.engine.ledger import Ledger
from millpond.engine.planned import PrefillRow
from millpond.engine.request import Sequence
from millpond.engine.sharing import SharedPrefixes
from millpond.plan.checkpoints import VALUE_ORDER, Evidence

RANK = {kind: rank for rank, kind in enumerate(VALUE_ORDER)}


def evidence_of(sequence: Sequence, shared: SharedPrefixes, budget: int) -> Evidence:
    """Where a prompt is known to part from others.

    Of places that prompts in the engine give, those that spare them most, and one slot of `budget`
    is left for the prompt's own end.
    """
    branches = shared.branches(sequence)
    if len(branches) >= budget:
        branches.sort(key=lambda branch: branch.end * branch.others, reverse=True)
        del branches[max(0, budget - 1) :]
    return Evidence(sequence.branch_seen, tuple(branch.end for branch in branches))


def plan_exports(ledger: Ledger, rows: Iterable[PrefillRow], shared: SharedPrefixes) -> None:
    """Slots for checkpoints inside rows, most valuable first, from what no row needs.

    Best effort: what gets none is left out, with the reason in the row and counted by it:
    `duplicate`, when another row of the forward writes the same state; `budget`, when checkpoints
    may not hold that many slots; `no_slot`, when none is free or evictable.
    """
    wanted = [(anchor, row) for row in rows for anchor in row.interior]
    wanted.sort(key=lambda item: RANK[item[0].kind])
    room = ledger.settings.checkpoint_budget
    planned = set()
    for anchor, row in wanted:
        place = (shared.place(row.sequence, anchor.end), anchor.end)
        if place in planned:
            why = "duplicate"
        elif room < 1:
            why = "budget"
        elif not (ledger.pool.num_free or ledger.evict_slot()):
            why = "no_slot"
        else:
            planned.add(place)
            room -= 1
            row.exports[anchor.end] = row.sequence.state.plan_export(ledger.pool, anchor.end)
            continue
        row.left_out[anchor.end] = why
        ledger.counters.checkpoints_skipped[why] += 1
