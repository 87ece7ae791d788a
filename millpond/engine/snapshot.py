"""One look at everything an engine counts. Decides nothing."""

from __future__ import annotations

from millpond.engine.ledger import Ledger
from millpond.engine.scheduler import Scheduler
from millpond.engine.tiers import Tiers
from millpond.engine.types import EngineStats
from millpond.plan.counts import DeviceCounts


def snapshot(
    ledger: Ledger,
    scheduler: Scheduler,
    tiers: Tiers | None,
    live: int,
    device: DeviceCounts | None,
) -> EngineStats:
    """Counters and gauges of this moment; `live` requests are not over."""
    counters = ledger.counters
    running = len({id(sequence.request) for sequence in tuple(scheduler.running)})
    free, checkpoints = ledger.pool.num_free, ledger.index.num_checkpoints
    moving = 0 if tiers is None else tiers.transfers.num_slots_alone
    return EngineStats(
        requests_running=running,
        requests_waiting=max(0, live - running),
        slots_free=free,
        slots_running=max(0, ledger.pool.size - free - checkpoints - moving),
        slots_checkpoint=checkpoints,
        slots_total=ledger.pool.size,
        pages_free=ledger.pages.num_free,
        pages_used=ledger.pages.size - ledger.pages.num_free,
        pages_indexed=ledger.index.num_pages,
        pages_total=ledger.pages.size,
        steps=counters.steps,
        steps_failed=counters.steps_failed,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        prefix_tokens=dict(counters.prefix_tokens),
        checkpoints_published=dict(counters.checkpoints_published),
        checkpoints_skipped=dict(counters.checkpoints_skipped),
        checkpoints_evicted=counters.checkpoints_evicted,
        preemptions=counters.preemptions,
        nonfinite=counters.nonfinite,
        finished=dict(counters.finished),
        prefix_hits=dict(counters.prefix_hits),
        prefix_hit_tokens=dict(counters.prefix_hit_tokens),
        checkpoint_budget=ledger.settings.checkpoint_budget,
        requests_held=len(scheduler.holds),
        holds=dict(counters.holds),
        held_seconds=counters.held_seconds,
        drafts=counters.drafts,
        steps_ahead=counters.steps_ahead,
        steps_waited=dict(counters.steps_waited),
        rows_wasted=counters.rows_wasted,
        draft_tokens=counters.draft_tokens,
        accepted_tokens=counters.accepted_tokens,
        accepted_per_position=tuple(counters.accepted_per_position),
        store=None if tiers is None else tiers.stats(),
        device=device,
    )
