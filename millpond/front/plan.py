"""The memory plan in words: what a model takes, what was derived, and what fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from millpond.config import PAGE, ModelFacts, Resolved
from millpond.units import human


def lengths(resolved: Resolved) -> list[int]:
    """Request lengths (tokens) worth telling: the longest, and powers of eight below it."""
    found = [n for n in (1 << 10, 1 << 13, 1 << 16, 1 << 19) if n < resolved.session_len]
    return [*found, resolved.session_len]


def fitting(resolved: Resolved, lengths: Sequence[int]) -> dict[int, int]:
    """How many requests of each length (tokens) run at once."""
    return {
        n: min(resolved.max_batch_size, resolved.num_pages // max(1, -(-n // PAGE)))
        for n in lengths
    }


def table(resolved: Resolved, facts: ModelFacts) -> Table:
    """One table for people."""
    r = resolved
    made = Table(title=f"{facts.name} on {r.device}, {r.dtype}", title_justify="left")
    made.add_column("memory")
    made.add_column("each", justify="right")
    made.add_column("count", justify="right")
    made.add_column("all", justify="right")
    made.add_row("weights", "", "", human(facts.weight_bytes))
    running = r.num_slots - r.checkpoint_budget
    slot, page, seat = facts.slot_bytes, facts.page_bytes, facts.seat_bytes
    made.add_row("slots for running requests", human(slot), f"{running:,}", human(running * slot))
    kept = r.checkpoint_budget
    made.add_row("slots for checkpoints", human(slot), f"{kept:,}", human(kept * slot))
    made.add_row("pages (64 tokens)", human(page), f"{r.num_pages:,}", human(r.num_pages * page))
    made.add_row("seats", human(seat), f"{r.num_seats:,}", human(r.num_seats * seat))
    made.add_section()
    made.add_row("budget for slots, pages, seats", "", "", human(r.cache_budget))
    made.add_section()
    for length, count in fitting(r, lengths(r)).items():
        made.add_row(f"requests of {length:,} tokens at once", "", f"{count:,}", "")
    reuse = f"{r.prefill_save_alignment:,} tokens" if r.checkpoint_mode != "off" else "none"
    made.add_row("smallest reusable prefix", "", reuse, "")
    made.add_row("checkpoints", "", r.checkpoint_mode, "")
    made.add_row("drafts a step", "", str(r.num_draft_tokens), "")
    for note in r.notes:
        made.add_row(f"[yellow]note[/yellow] {note}", "", "", "")
    return made


def drafts(seats: Mapping[int, int], slot_bytes: int) -> Table:
    """What a sequence takes beside its pages, by drafts a step; `seats` gives a seat's bytes."""
    made = Table(title="memory of one sequence beside its pages", title_justify="left")
    made.add_column("drafts a step")
    for name in ("state", "seat", "all", "(drafts + 1) states"):
        made.add_column(name, justify="right")
    for count, seat in seats.items():
        several = (count + 1) * slot_bytes
        sizes = (slot_bytes, seat, slot_bytes + seat, several)
        made.add_row(str(count), *map(human, sizes))
    return made


def line(resolved: Resolved, facts: ModelFacts) -> str:
    """The same in one line, for logs."""
    r = resolved
    fits = ", ".join(f"{c} x {n} tokens" for n, c in fitting(r, lengths(r)).items())
    reuse = f"{r.prefill_save_alignment} tokens" if r.checkpoint_mode != "off" else "none"
    return (
        f"plan: {facts.name} on {r.device} in {r.dtype}, weights {human(facts.weight_bytes)}, "
        f"{r.num_slots} slots of {human(facts.slot_bytes)} ({r.checkpoint_budget} for checkpoints, "
        f"{r.checkpoint_mode}), {r.num_pages} pages of {human(facts.page_bytes)}, "
        f"{human(r.cache_bytes)} of {human(r.cache_budget)}; fits {fits}; "
        f"smallest reusable prefix {reuse}"
    )
