"""`millpond eval`: two modes of one model, a table, gates, and an exit status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millpond.config import PytorchEngineConfig, SpeculativeConfig
from millpond.errors import Refused
from millpond.evaluate.cases import Case, Dialect
from millpond.evaluate.gates import Gate, default_gates, judge, parse_gates
from millpond.evaluate.report import as_json, gate_table, table
from millpond.evaluate.running import Mode, Ran, run
from millpond.evaluate.score import Report, score
from millpond.front.directory import BUNDLED, locate
from millpond.front.flags import EvalFlags, ModeFlags, parse
from millpond.tasks import task_names
from millpond.telemetry import log_to_stderr

PLAINEST = "no-enable-prefix-caching,max-batch-size=1,speculative-num-draft-tokens=0"
"""What a mode is compared with when nothing else is asked for."""


def evaluate(flags: EvalFlags) -> int:
    """Grade a model. Returns 1 when a gate fails, else 0."""
    log_to_stderr(flags.log_level)
    directory = locate(flags.model)
    dialect = Dialect(directory)
    tasks = _tasks(flags.tasks)
    cases = [
        dialect.case(task, flags.seed + i, scale=flags.scale)
        for task in tasks
        for i in range(flags.cases)
    ]
    mode = Mode(flags.engine(), flags.speculative(), flags.warm)
    other = _other(flags)
    gates = _gates(flags, directory)
    ran, compared = _run(flags, mode, other, cases)
    report = Report(
        model=directory.name,
        mode=mode.describe(),
        other=other.describe() if other is not None else None,
        scores=score(ran, dialect, compared),
    )
    judged = judge(report, gates)
    out = Console(highlight=False)
    out.print(table(report))
    out.print(gate_table(judged))
    if flags.json_path is not None:
        try:
            Path(flags.json_path).write_text(as_json(report, judged), "utf-8")
        except OSError as error:
            raise Refused(f"cannot write {flags.json_path}: {error}") from error
    failed = sum(s.failed for s in report.scores)
    return 0 if not failed and all(j.ok for j in judged) else 1


def _tasks(text: str | None) -> list[str]:
    known = task_names()
    asked = [t.strip() for t in text.split(",")] if text else list(known)
    for task in asked:
        if task not in known:
            raise Refused(f"no task {task!r}, there are {', '.join(known)}")
    return asked


def _other(flags: EvalFlags) -> Mode | None:
    """The mode to compare with: the first one, changed as `--compare` says.

    It says so in flags without their dashes, for an argument that begins with dashes is a flag.
    """
    if flags.compare == "none":
        return None
    asked = PLAINEST if flags.compare is None else flags.compare
    words = asked.replace(",", " ").split()
    change, _ = parse(ModeFlags, "eval --compare", ["--" + word.lstrip("-") for word in words])
    said: dict[str, Any] = flags.engine().model_dump(exclude_unset=True)
    changed: dict[str, Any] = change.engine().model_dump(exclude_unset=True)
    if changed.get("enable_prefix_caching") is False:
        said.pop("checkpoint_mode", None)
    drafts: SpeculativeConfig | None = flags.speculative()
    if "speculative_num_draft_tokens" in change.model_fields_set:
        drafts = change.speculative()
    return Mode(PytorchEngineConfig(**{**said, **changed}), drafts, flags.warm)


def _gates(flags: EvalFlags, directory: Path) -> tuple[Gate, ...]:
    """Those of a bundled model, then those asked for."""
    drafts = flags.speculative()
    bundled = directory.parent == BUNDLED.resolve() and flags.gates
    count = drafts.num_speculative_tokens if drafts is not None else 0
    own = default_gates(drafts=count) if bundled else ()
    return (*own, *parse_gates(flags.gate or ""))


def _run(
    flags: EvalFlags, mode: Mode, other: Mode | None, cases: list[Case]
) -> tuple[Ran, Ran | None]:
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        modes = [m for m in (mode, other) if m is not None]
        done = bar.add_task("", total=len(cases) * len(modes))
        found: list[Ran] = []
        for one in modes:

            def tell(task: str, count: int) -> None:
                bar.update(done, advance=count, description=task)

            found.append(run(flags.model, one, cases, tell))
    return found[0], found[1] if len(found) > 1 else None
