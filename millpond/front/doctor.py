"""`millpond doctor`: what this machine can do, with verdicts, and what a model would take on it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from millpond.config import PytorchEngineConfig, SpeculativeConfig
from millpond.errors import Refused
from millpond.front import plan
from millpond.front.compose import Planned, plan_model
from millpond.front.machine import cores, free_memory, versions
from millpond.front.stores import tiers
from millpond.models.base import describe
from millpond.ops.bind import backends
from millpond.runtime.compiled import kernel_cache
from millpond.runtime.worker import model_facts
from millpond.units import human


def environment() -> Table:
    """Facts about the machine, each with a verdict."""
    made = Table(title="environment", title_justify="left")
    for name in ("what", "found", "verdict"):
        made.add_column(name)
    found = versions()
    for name, have in found.items():
        needless = name == "triton" and not torch.cuda.is_available()
        made.add_row(
            name,
            have,
            "not needed without a GPU" if needless else "missing" if have == "absent" else "ok",
        )
    made.add_row("cores", str(cores()), "ok" if cores() > 1 else "slow: one core")
    free = free_memory()
    made.add_row("free memory", human(free), "ok" if free > 1 << 30 else "little: under 1 GiB")
    for i in range(torch.cuda.device_count()):
        free, whole = torch.cuda.mem_get_info(i)
        made.add_row(
            f"GPU {i}", torch.cuda.get_device_name(i), f"{human(free)} of {human(whole)} free"
        )
    if not torch.cuda.is_available():
        made.add_row("GPU", "none", "the CPU serves; meant for small models")
    elif (cache := kernel_cache()) is not None:
        filled = cache.is_dir() and any(cache.iterdir())
        made.add_row("compiled kernels", str(cache), "ok" if filled else "none yet: a slow start")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for backend in backends():
        made.add_row(f"kernels: {backend.name}", "", backend.unusable(device) or "ok")
    return made


def run(
    model: str | None,
    config: PytorchEngineConfig,
    speculative: SpeculativeConfig | None = None,
) -> int:
    """Print both tables. Returns an exit status: 1 when the model cannot be served here."""
    console = Console(highlight=False)
    console.print(environment())
    try:
        with _AsDirectory(model) as directory:
            planned = plan_model(directory, config, speculative)
            seats = _seats_by_drafts(planned)
    except Refused as error:
        console.print(f"cannot serve {model or 'the bundled model'}: {error}", markup=False)
        return 1
    console.print(plan.table(planned.resolved, planned.facts))
    if seats:
        console.print(plan.drafts(seats, planned.facts.slot_bytes))
    if planned.store is None:
        return 0
    made, reachable = tiers(planned.store, planned.facts.slot_bytes, planned.facts.page_bytes)
    console.print(made)
    return 0 if reachable or planned.store.optional else 1


def _seats_by_drafts(planned: Planned) -> dict[int, int]:
    """Bytes of a seat by the number of drafts; nothing for a model without a draft layer."""
    description = describe(planned.directory)
    if not description.config.num_draft_layers:
        return {}
    counts = sorted({0, 3, 5, planned.resolved.num_draft_tokens})
    how = {"dtype": planned.resolved.dtype, "device": planned.resolved.device}
    return {
        count: model_facts(description, num_draft_tokens=count, **how).seat_bytes
        for count in counts
    }


class _AsDirectory:
    """A bare configuration file as a model's directory, for as long as it is looked at."""

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._made: str | None = None

    def __enter__(self) -> str | None:
        if self._model is None or not Path(self._model).is_file():
            return self._model
        self._made = tempfile.mkdtemp(prefix="millpond-")
        place = Path(self._made, Path(self._model).parent.name or "model")
        place.mkdir()
        shutil.copy(self._model, place / "config.json")
        return str(place)

    def __exit__(self, *_: object) -> None:
        if self._made is not None:
            shutil.rmtree(self._made)
