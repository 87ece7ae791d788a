"""The `millpond` command. Reads flags first; what needs torch is imported when they are right."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import millpond
from millpond.errors import MillpondError, Refused
from millpond.front.flags import BenchFlags, ChatFlags, DoctorFlags, EvalFlags, ServeFlags, parse

USAGE = """\
usage: millpond COMMAND [FLAGS]

  serve [MODEL]        serve a model over HTTP, OpenAI-compatible
  chat [PROMPT]        answer one question, or talk
  doctor               what this machine can do, and what a model would take
  bench serve [URL]    put a server under load and measure it
  eval [MODEL]         grade a model on tasks with known answers, in any mode

MODEL is a directory in the Hugging Face layout, or the name of a bundled model.
`millpond COMMAND --help` lists the flags, `millpond --version` prints the version."""

COMMANDS: dict[str, tuple[type[Any], str, str]] = {
    "serve": (ServeFlags, "millpond.front.serving", "serve"),
    "chat": (ChatFlags, "millpond.front.commands", "chat"),
    "doctor": (DoctorFlags, "millpond.front.commands", "doctor"),
    "bench serve": (BenchFlags, "millpond.front.load.command", "bench_serve"),
    "eval": (EvalFlags, "millpond.evaluate.command", "evaluate"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 2 for bad flags, 1 for what cannot be served."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["--version"]:
        print(f"millpond {millpond.__version__}")
        return 0
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if argv else 2
    words = 2 if " ".join(argv[:2]) in COMMANDS else 1
    name, argv = " ".join(argv[:words]), argv[words:]
    if name not in COMMANDS:
        print(f"millpond: unknown command {name!r}, use {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    flags_type, module, function = COMMANDS[name]
    try:
        flags, notes = parse(flags_type, name, argv)
    except Refused as error:
        print(f"millpond {name}: {error}", file=sys.stderr)
        return 2
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    try:
        # Imported late, and interruptible: most of them bring torch.
        run: Callable[[Any], int] = getattr(import_module(module), function)
        return run(flags)
    except MillpondError as error:
        print(f"millpond {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
