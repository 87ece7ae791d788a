"""`millpond bench serve`: load on any server that speaks OpenAI's protocol, and what came of it."""

from __future__ import annotations

import asyncio
import json
import math
import platform
import random
import string
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import millpond
from millpond.errors import Refused
from millpond.front.flags import BenchFlags
from millpond.front.load import report
from millpond.front.load.drive import Outcome, Pace, drive
from millpond.front.load.wire import Connection, Failure, Target

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
USERS = 8
"""At once, when neither a number of users nor a rate is given."""


def bench_serve(flags: BenchFlags) -> int:
    """Run the load and show the result. Returns 1 when a request failed."""
    users = flags.concurrency
    if users is None and flags.request_rate is None:
        users = USERS
    pace = Pace(users, math.inf if flags.request_rate is None else flags.request_rate, flags.seed)
    target = Target(flags.url, flags.api_key)
    try:
        outcomes, seconds, model = asyncio.run(_run(flags, target, pace))
    except Failure as failure:
        raise Refused(f"{target.url}: {failure}") from failure
    made = report.summary(outcomes, seconds)
    how = f"{users} at once" if math.isinf(pace.rate) else f"{pace.rate:g} requests a second"
    title = f"{model} at {target.url}, {flags.endpoint}, {how}"
    console = Console(highlight=False)
    console.print(title, markup=False)
    console.print(report.table(made))
    for error, count in made["errors"].items():
        Console(stderr=True, highlight=False).print(f"{count} times: {error}", markup=False)
    if flags.json_path is not None:
        _write(Path(flags.json_path), _record(flags, made, outcomes, model))
    if flags.plot is not None:
        report.plot(outcomes, Path(flags.plot), title)
    return 1 if made["failed"] else 0


async def _run(flags: BenchFlags, target: Target, pace: Pace) -> tuple[list[Outcome], float, str]:
    model = flags.model or await _first_model(target)
    path = PATHS[flags.endpoint]
    # The last ones are for warming up: they are as long as the others, and equal to none of them.
    asked = prompts(flags, flags.num_prompts + flags.warmup)
    made = [body(flags, model, prompt) for prompt in asked]
    bodies, warm = made[: flags.num_prompts], made[flags.num_prompts :]
    for outcome in await drive(target, path, warm, Pace(1)):
        if outcome.error is not None:
            raise Failure(outcome.error)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as bar:
        task = bar.add_task("requests", total=len(bodies))
        begin = time.perf_counter()
        outcomes = await drive(target, path, bodies, pace, lambda _: bar.advance(task))
        return outcomes, time.perf_counter() - begin, model


async def _first_model(target: Target) -> str:
    connection = Connection(target)
    try:
        found = await connection.ask("GET", "/v1/models")
        return str(found["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise Failure("it names no model: say which with --model") from error
    finally:
        connection.close()


Prompt = str | list[int] | list[dict[str, Any]]


def prompts(flags: BenchFlags, count: int) -> list[Prompt]:
    """Prompts from a file, or random ones with a beginning in common. Raises `Refused`."""
    if flags.dataset is not None:
        return _from_file(Path(flags.dataset), count)
    draw = random.Random(flags.seed)
    shared, own = flags.shared_prefix_len, flags.input_len - flags.shared_prefix_len
    if own < 1:
        raise Refused(
            f"shared_prefix_len={shared} leaves nothing of input_len={flags.input_len} to differ in"
        )
    if flags.token_ids is not None:
        if flags.endpoint != "completions":
            raise Refused("token_ids needs --endpoint completions: a chat is text")
        ids = [draw.randrange(flags.token_ids) for _ in range(shared)]
        return [
            [*ids, *(draw.randrange(flags.token_ids) for _ in range(own))] for _ in range(count)
        ]
    words = [_word(draw) for _ in range(shared)]
    return [" ".join([*words, *(_word(draw) for _ in range(own))]) for _ in range(count)]


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 5)))


def _from_file(path: Path, count: int) -> list[Prompt]:
    """Lines of JSON with `prompt` or `messages`, from the beginning again when they run out."""
    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        found: list[Prompt] = [row.get("messages") or row["prompt"] for row in rows]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Refused(f"cannot read prompts from {path}: {error!r}") from error
    if not found:
        raise Refused(f"{path} holds no prompt")
    return [found[i % len(found)] for i in range(count)]


def body(flags: BenchFlags, model: str, prompt: Prompt) -> dict[str, Any]:
    """One request: greedy, streamed, with usage at its end."""
    made: dict[str, Any] = {
        "model": model,
        "max_tokens": flags.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if flags.ignore_eos:
        made["ignore_eos"] = True
    if flags.endpoint == "completions":
        return {**made, "prompt": prompt}
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
        prompt = [{"role": "user", "content": str(prompt)}]
    return {**made, "messages": prompt}


def _record(
    flags: BenchFlags, made: dict[str, Any], outcomes: Sequence[Outcome], model: str
) -> dict[str, Any]:
    begin = min((o.due for o in outcomes), default=0.0)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "millpond": millpond.__version__,
        "python": platform.python_version(),
        "model": model,
        "flags": flags.model_dump(exclude={"api_key", "config", "log_level"}),
        "summary": made,
        "outcomes": [
            {
                "due": round(o.due - begin, 6),
                "ttft": round(o.first, 6) if o.arrivals else None,
                "latency": round(o.latency, 6),
                "prompt_tokens": o.prompt_tokens,
                "completion_tokens": o.completion_tokens,
                "cached_tokens": o.cached_tokens,
                "error": o.error,
            }
            for o in outcomes
        ],
    }


def _write(path: Path, made: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise Refused(f"cannot write {path}: {error}") from error
