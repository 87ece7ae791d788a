"""The load bar: silent while a load is short, then complete."""

from __future__ import annotations

import io

from rich.console import Console

from millpond.models.progress import PATIENCE, CountBar, LoadBar


def test_a_short_load_stays_silent_and_a_long_one_shows_how_far_it_is() -> None:
    now, screen = [0.0], io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with LoadBar("tiny", 1000, clock=lambda: now[0], console=console) as bar:
        bar(400)
        now[0] = PATIENCE
        bar(100)
        assert not bar.shown
        assert screen.getvalue() == ""
        now[0] = PATIENCE + 0.1
        bar(500)
        assert bar.shown
    assert "tiny" in screen.getvalue()
    assert "1,000/1,000 bytes" in screen.getvalue()


def test_a_bar_of_counts_follows_a_total_that_changes() -> None:
    """Kernels are compiled, then steps are run: one phase, two things that are counted."""
    now, screen = [0.0], io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    with CountBar("warm-up", clock=lambda: now[0], console=console) as bar:
        bar(1, 44)
        assert not bar.shown
        now[0] = PATIENCE + 0.1
        bar(44, 44)
        bar(45, 45)
    assert "warm-up" in screen.getvalue()
    assert "45/45" in screen.getvalue()
