"""All that a rank asks of its device is asked while that device is current, by whatever thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import millpond
from millpond import GenerationConfig, PytorchEngineConfig, pipeline
from millpond.runtime import place, worker
from millpond.runtime.graphs import CallAgain
from millpond.runtime.warmup import few_kinds
from millpond.runtime.worker import Worker, load

BUNDLED = Path(millpond.__file__).parent / "bundled"


class There:
    """A stand-in for a device that can be made current, by each thread for itself."""

    def __init__(self) -> None:
        self._here = threading.local()
        self.of: list[torch.device] = []

    @property
    def current(self) -> bool:
        return getattr(self._here, "depth", 0) > 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._here.depth = getattr(self._here, "depth", 0) + 1
        try:
            yield
        finally:
            self._here.depth -= 1

    def place_of(self, device: torch.device) -> place.Place:
        self.of.append(device)
        return self


class Elsewhere(TorchDispatchMode):
    """Notes every call of torch that is made while the device is not current."""

    def __init__(self, there: There) -> None:
        super().__init__()
        self.there = there
        self.calls = 0
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.calls += 1
        result = func(*args, **(kwargs or {}))
        # What is only counted, on no device at all, is counted anywhere.
        made = result[0] if isinstance(result, list | tuple) else result
        if not self.there.current and getattr(made, "device", None) != torch.device("meta"):
            self.found.append(str(func))
        return result


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> There:
    made = There()
    monkeypatch.setattr(worker, "place_of", made.place_of)
    return made


def small(**given: Any) -> Worker:
    return load(
        BUNDLED / "millpond-tiny-qwen",
        device="cpu",
        num_slots=10,
        num_pages=12,
        num_draft_tokens=1,
        **{"num_seats": 4, "session_len": 320, **given},
    )


def looked_at(there: There, work: Callable[[], object]) -> list[str]:
    """What `work`, which calls torch, does elsewhere."""
    with Elsewhere(there) as elsewhere:
        work()
    assert elsewhere.calls
    return elsewhere.found


def test_loading_warming_up_and_recording_are_at_the_named_device(
    there: There, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "capturer_of", lambda device: CallAgain())
    made: list[Worker] = []
    assert looked_at(there, lambda: made.append(small(num_seats=2, debug_poison=True))) == []
    assert set(there.of) == {torch.device("cpu")}
    (rank,) = made
    assert looked_at(there, rank.warm_up) == []
    assert rank.runner.num_captures


def test_a_step_is_launched_and_ended_there_by_threads_that_were_never_there(there: There) -> None:
    rank = small()
    plans = list(few_kinds(rank.capabilities))
    with ThreadPoolExecutor(1) as launching, ThreadPoolExecutor(1) as ending:
        for plan in plans:
            flown: list[Any] = []
            start = launching.submit(
                looked_at, there, lambda p=plan, f=flown: f.append(rank.launch(p))
            )
            assert start.result() == []
            ask: list[bool] = []
            finish = flown[0]._launched._finish
            flown[0]._launched._finish = lambda f=finish, a=ask: (a.append(there.current), f())[1]
            ending.submit(flown[0].result).result()
            assert ask == [True]


def test_memory_for_a_store_and_measuring_are_there(
    there: There, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = small()
    seen: list[bool] = []
    monkeypatch.setattr(worker, "memory_of", lambda *_: seen.append(there.current))
    monkeypatch.setattr(worker, "activation_bytes", lambda *_: seen.append(there.current) or 0)
    rank.memory()
    rank.measure(2, 64, None)  # type: ignore[arg-type]
    assert seen == [True, True]
    assert not there.current


def test_the_engine_runs_where_its_configuration_says(there: There) -> None:
    config = PytorchEngineConfig(device="cpu", max_batch_size=2, session_len=64)
    with pipeline("millpond-tiny-qwen", backend_config=config) as pipe:
        executor = pipe.service.engine._executor
        launch, seen = executor._worker.runner.launch, []
        executor._worker.runner.launch = lambda plan: (seen.append(there.current), launch(plan))[1]
        pipe([5, 6, 7], GenerationConfig(max_new_tokens=3))
    assert seen
    assert all(seen)


@pytest.mark.parametrize(
    ("name", "found"), [("auto", "cuda:2"), ("cuda", "cuda:2"), ("cuda:1", "cuda:1")]
)
def test_a_gpu_always_has_its_number(
    monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert place.choose_device(name) == torch.device(found)


def test_the_place_of_a_gpu_makes_that_one_current(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or There()())
    with place.place_of(torch.device("cuda", 1))():
        assert asked == [torch.device("cuda", 1)]
    with place.place_of(torch.device("cpu"))():
        assert len(asked) == 1


@pytest.mark.multigpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_second_gpu_answers_as_the_first_and_nothing_is_done_on_the_first(drafts: int) -> None:
    first, second = (_answers(f"cuda:{index}", drafts) for index in (0, 1))
    assert first == second


def _answers(device: str, drafts: int) -> list[tuple[int, ...]]:
    other = torch.device("cuda", 1 - int(device[-1]))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(other)
    torch.cuda.reset_peak_memory_stats(other)
    config = PytorchEngineConfig(
        device=device, dtype="float32", max_batch_size=4, session_len=512, num_kv_pages=64,
        num_state_slots=16, store="host",
    )  # fmt: skip
    speculative = None if not drafts else millpond.SpeculativeConfig(num_speculative_tokens=drafts)
    with pipeline(
        "millpond-tiny-glm", backend_config=config, speculative_config=speculative
    ) as pipe:
        wish = GenerationConfig(max_new_tokens=12, ignore_eos=True)
        prompts = [list(range(5, 5 + n)) for n in (3, 100, 200)]
        found = [r.token_ids for _ in range(2) for r in pipe(prompts, wish)]
    assert torch.cuda.max_memory_allocated(other) == before
    return found
