"""Steps of every kind are run before any request, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond
from millpond.engine.loop import Engine
from millpond.engine.settings import EngineSettings
from millpond.engine.types import EngineRequest
from millpond.errors import Refused
from millpond.executor.uni import UniExecutor
from millpond.ops.bind import OP_NAMES, Bound
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import Capabilities, Executor, StepPlan
from millpond.runtime import worker as runtime
from millpond.runtime.warmup import PAGES, SEATS, SLOTS, every_kind, few_kinds, largest
from millpond.runtime.worker import Worker, load

BUNDLED = Path(millpond.__file__).parent / "bundled"
KINDS = [("glm", 0), ("glm", 3), ("qwen", 0), ("qwen", 3)]


def bundled(kind: str, drafts: int, **given: Any) -> Worker:
    sizes = {"num_slots": 12, "num_pages": 160, "num_seats": 4, **given}
    return load(BUNDLED / f"millpond-tiny-{kind}", device="cpu", num_draft_tokens=drafts, **sizes)


def capabilities(**given: int) -> Capabilities:
    return Capabilities(
        **{
            "num_slots": SLOTS, "num_pages": PAGES, "num_seats": SEATS, "export_granularity": 64,
            "vocab_size": 70, "max_position": 1000, **given,
        }
    )  # fmt: skip


@pytest.mark.parametrize("drafts", [0, 3])
def test_warming_up_leaves_slots_pages_seats_and_counters_as_they_were(drafts: int) -> None:
    worker = bundled("glm", drafts, debug_poison=True)
    runner = worker.runner

    def state() -> list[torch.Tensor]:
        arenas = (runner.arenas.slots, runner.arenas.pages, runner.arenas.seats)
        return [
            *(arena.storage.clone() for arena in arenas),
            runner.staging.page_table.clone(),
            runner.staging.counters.table[:4].clone(),
        ]

    before = state()
    told: list[tuple[int, int]] = []
    worker.warm_up(lambda done, of: told.append((done, of)))
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] > 5
    with pytest.raises(LookupError):
        runner.verifier.seats.params(0)


@pytest.mark.parametrize(("kind", "drafts"), KINDS)
def test_a_model_that_does_not_run_is_refused_before_it_serves(kind: str, drafts: int) -> None:
    worker = bundled(kind, drafts)
    embedding = worker.runner.model.embedding  # type: ignore[attr-defined]
    embedding.head = torch.full_like(embedding.head, float("nan"))
    with pytest.raises(Refused, match=r"does not run.*not finite"):
        worker.warm_up()
    worker.runner.model.forward = lambda *_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(Refused, match=r"does not run.*ZeroDivisionError"):
        worker.warm_up()


@pytest.mark.parametrize(
    ("kind", "drafts", "ahead"),
    [("glm", 0, False), ("glm", 3, True), ("qwen", 0, True), ("qwen", 3, False)],
)
def test_no_request_calls_an_op_in_a_way_in_which_warming_up_did_not(
    kind: str, drafts: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What chooses a kernel is the type and the rank of its arguments, and what is absent."""
    seen: set[tuple[object, ...]] = set()
    bind = runtime.bind
    monkeypatch.setattr(runtime, "bind", lambda *a, **k: watched(bind(*a, **k), seen))
    like_this = partial(bundled(kind, drafts)._like_this, runs_ahead=ahead)
    other = like_this(num_slots=SLOTS, num_pages=PAGES, num_seats=SEATS)
    other.run_through(kinds=partial(every_kind, most_tokens=600))
    warm = set(seen)
    seen.clear()
    serve(UniExecutor(like_this(num_slots=12, num_pages=160, num_seats=4)))
    assert len({name for name, *_ in seen}) >= 15
    assert seen <= warm, f"first seen while serving: {sorted(map(str, seen - warm))}"
    seen.clear()
    other.run_through(kinds=few_kinds)
    assert seen < warm, "the comparison sees no difference"


@pytest.mark.parametrize("drafts", [0, 1, 7])
@pytest.mark.parametrize("max_position", [64, 130, 1000, 8192])
def test_every_plan_keeps_within_the_pages_slots_and_positions_there_are(
    drafts: int, max_position: int
) -> None:
    c = capabilities(num_draft_tokens=drafts, max_position=max_position)
    plans = tuple(every_kind(c))
    most = 16 * (max_position - drafts - 1)
    assert {1, 2, 3, 4, 16, 24, 512, 8192} - {p.num_tokens for p in plans} == {
        n for n in (512, 8192) if n > most
    }
    for plan in (*plans, *largest(c, 200)):
        for row in (*plan.prefill, *plan.decode):
            assert row.tokens
            assert max(row.tokens) < c.vocab_size
            assert row.end <= max_position
        for live in plan.verify:
            assert live.end + live.num_drafts <= max_position
        assert all(p < c.num_pages for update in plan.page_updates for p in update.pages)
        assert all(row.start % 64 == 0 for row in plan.prefill)
        assert len({r.seat for r in (*plan.prefill, *plan.decode, *plan.verify)}) == len(
            plan.prefill + plan.decode + plan.verify
        )


@pytest.mark.parametrize("drafts", [0, 7])
@pytest.mark.parametrize("session_len", [2, 33])
def test_a_worker_for_the_shortest_sequences_warms_up(drafts: int, session_len: int) -> None:
    c = capabilities(num_draft_tokens=drafts, max_position=session_len, runs_ahead=True)
    rows = [row for plan in every_kind(c) for row in (*plan.prefill, *plan.decode)]
    assert all(row.tokens for row in rows)
    bundled("qwen", drafts, session_len=session_len).warm_up()


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_largest_step_holds_the_whole_budget_and_every_seat_at_the_longest_length(
    drafts: int,
) -> None:
    c = capabilities(num_seats=9, num_draft_tokens=drafts, max_position=640)
    _, plan, short = largest(c, 1500)
    assert sum(len(row.tokens) for row in plan.prefill) == 1500
    others = plan.verify if drafts else plan.decode
    assert len(plan.prefill) + len(others) == 9
    assert max(row.end for row in others) == 640 - drafts
    assert plan.prefill[0].prompt_logprobs is not None
    assert len(plan.masks) == 9
    assert [len(row.tokens) for row in short.prefill] == [1500 // 9] * 9
    assert not short.verify


@pytest.mark.parametrize(("kind", "drafts"), KINDS)
def test_the_largest_steps_can_be_run(kind: str, drafts: int) -> None:
    worker = bundled(kind, drafts, num_seats=6, num_pages=PAGES, session_len=512)
    for plan in largest(worker.capabilities, 256):
        result = worker.execute(plan)
        assert result.emitted
        assert all(e.finite for e in result.emitted)


def serve(executor: Executor) -> None:
    """Requests of many kinds together, on an engine of their own."""
    settings = EngineSettings(
        max_batch_size=4, max_prefill_tokens=128, session_len=1000, checkpoint_budget=4,
        debug_audit=True, debug_poison=True, decode_checkpoint_interval=64,
    )  # fmt: skip
    engine = Engine(settings, executor)
    params: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"seed": 3},
        {"top_k": 3, "top_p": 0.5},
        {"repetition_penalty": 1.2, "logit_bias": ((3, 2.0),)},
        {"min_tokens": 2, "logprobs": 3},
        {"prompt_logprobs": 2, "temperature": 0.0},
        {"n": 3, "seed": 5},
        {"n": 2, "presence_penalty": 0.3, "logprobs": 0},
    )
    for index, wish in enumerate((*params, *params[:2])):
        length = (1, 130, 64, 65, 127, 200, 33, 300, 140, 131)[index]
        request = EngineRequest(
            request_id=str(index),
            tokens=tuple(7 * i % 200 for i in range(length)),
            params=SamplingParams(max_tokens=4 if index else 14, ignore_eos=True, **wish),
        )
        engine.submit(request)
    while engine.step():
        pass
    engine.close(drain=False)


def watched(ops: Bound, seen: set[tuple[object, ...]]) -> Bound:
    """The same ops; `seen` hears the form of every argument that each is called with."""

    def of(name: str) -> Any:
        op = getattr(ops, name)

        def called(*args: Any, **named: Any) -> Any:
            for key, value in (*enumerate(args), *named.items()):
                seen.update((name, *form) for form in forms(str(key), value))
            return op(*args, **named)

        return called

    return replace(ops, **{name: of(name) for name in OP_NAMES})


def forms(path: str, value: object) -> Iterator[tuple[object, ...]]:
    """What of an argument may choose another kernel: what it is, not how many or how much."""
    if isinstance(value, torch.Tensor):
        packed = value.dim() == 0 or value.shape[-1] < 2 or value.stride(-1) == 1
        yield path, value.dtype, value.dim(), packed
    elif isinstance(value, bool | str) or value is None:
        yield path, value
    elif hasattr(value, "__dataclass_fields__"):
        for f in fields(value):  # type: ignore[arg-type]
            yield from forms(f"{path}.{f.name}", getattr(value, f.name))
    else:
        yield path, type(value)


def test_plans_of_a_warm_up_are_numbered_in_order() -> None:
    plans: list[StepPlan] = list(every_kind(capabilities(num_draft_tokens=2)))
    assert [plan.step for plan in plans] == list(range(1, len(plans) + 1))
