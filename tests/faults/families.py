"""Both model families with random weights, small enough to run in a test, as bare workers."""

from __future__ import annotations

from pathlib import Path

import millpond
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import Export, PageUpdate, Row, SeatLoad, StepPlan
from millpond.runtime.worker import Worker, load
from tests.support.tiny_models import QWEN_DENSE, QWEN_TEXT

GLM = Path(millpond.__file__).parent / "bundled" / "millpond-tiny-glm"
FAMILIES = ("glm5_next", "qwen3_5")


def worker(family: str, folder: Path, *, slots: int = 6) -> Worker:
    """A worker whose slots, pages and tails all start as NaN; weights are drawn, not read."""
    if family == "qwen3_5":
        from transformers.models.qwen3_5 import Qwen3_5TextConfig

        Qwen3_5TextConfig(**QWEN_TEXT, **QWEN_DENSE).save_pretrained(folder)
    return load(
        GLM if family == "glm5_next" else folder,
        dtype="float32",
        device="cpu",
        num_slots=slots,
        num_pages=8,
        num_seats=2,
        session_len=512,
        load_format="dummy",
        debug_poison=True,
    )


def seat_load(tokens: tuple[int, ...], seat: int = 0) -> SeatLoad:
    """A greedy request takes a seat."""
    return SeatLoad(
        seat=seat,
        request="r",
        sample_index=0,
        params=SamplingParams(max_tokens=8, temperature=0.0),
        tokens=tokens,
        prompt_len=len(tokens),
    )


def prefill(
    step: int,
    tokens: tuple[int, ...],
    span: tuple[int, int],
    state_in: int | None,
    state_out: int,
    exports: tuple[tuple[int, int], ...] = (),
) -> StepPlan:
    """One row: the tokens `span` of a prompt, on pages 0, 1, ..; exports are (end, slot)."""
    start, end = span
    row = Row(
        request="r",
        seat=0,
        start=start,
        tokens=tokens[start:end],
        state_in=state_in,
        state_out=state_out,
        exports=tuple(Export(*e) for e in exports),
        emit_seats=(0,) if end == len(tokens) else (),
    )
    first = step == 0
    return StepPlan(
        step=step,
        prefill=(row,),
        seat_loads=(seat_load(tokens),) if first else (),
        page_updates=(PageUpdate(0, 0, tuple(range(-(-len(tokens) // 64)))),) if first else (),
    )
