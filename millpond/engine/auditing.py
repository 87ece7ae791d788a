"""Checks the invariants of the state layer on what an engine holds. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.engine.ledger import Ledger
from millpond.engine.planned import Scheduled
from millpond.engine.queues import Queues
from millpond.engine.transfers import Transfers
from millpond.state import audit


def check(
    ledger: Ledger, queues: Queues, transfers: Transfers | None, flights: Iterable[Scheduled]
) -> None:
    """Raise `Broken` with the first invariant that does not hold, while `flights` are under way."""
    leaving = [one for lead in queues.leaving for one in lead.group]
    running = [one for lead in queues.running for one in lead.group] + leaving
    plans = [one.plan for one in flights]
    audit.run(
        audit.House(
            pool=ledger.pool,
            pages=ledger.pages,
            index=ledger.index,
            running=[one.state for one in running],
            leases=[] if transfers is None else transfers.leases,
            page_runs=[one.pages for one in running]
            + ([] if transfers is None else transfers.page_runs),
            flights=[plan.prefill + plan.decode + plan.verify for plan in plans],
            leaving=[one.seat for one in leaving],
        )
    )
