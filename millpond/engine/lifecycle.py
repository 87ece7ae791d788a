"""Changes that make everything older unfindable. Knows the ledger; called at yield points only."""

from __future__ import annotations

from millpond.engine.ledger import Ledger
from millpond.engine.scheduler import Scheduler


def new_epoch(ledger: Ledger, scheduler: Scheduler) -> None:
    """Forget every prefix. What runs goes on, and publishes nothing: its keys are of before."""
    ledger.epoch += 1
    ledger.index.clear()
    scheduler.holds.clear()
    scheduler.along.forget(scheduler.running)
    scheduler.tiers.new_epoch()
    scheduler.unblock()
