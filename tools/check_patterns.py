"""Finds text that must not be in the repository; knows only lines and regular expressions.

Brackets around one letter keep a pattern from matching its own line.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Ban:
    """A pattern, where it is looked for, and what to do instead."""

    pattern: re.Pattern[str]
    suffixes: tuple[str, ...]  # empty: every text file
    reason: str


BANS = (
    Ban(
        re.compile(r"\bTO[D]O\b(?!\(?[#v\d])"),
        (".py",),
        "name the version or the public issue it waits for, or do not write it",
    ),
    Ban(
        re.compile(r"^\s*#\s*([-=*#~─═])\1{5,}"),
        (".py", ".toml", ".yaml"),
        "no banner comments: split the file, or name the function",
    ),
    Ban(
        re.compile(r"\btl\.make_block_p[t]r\b"),
        (".py",),
        "deprecated by Triton; use tl.make_tensor_descriptor or plain pointers",
    ),
    Ban(
        re.compile(r"(?<![\w.~])/(home|root|Users|work|farm)/\w"),
        (),
        "a path of somebody's own machine",
    ),
    Ban(
        re.compile(r"(?i)\b(this [s]ession|previous [s]ession|sub-?[a]gent|work[p]lace)s?\b"),
        (),
        "say what the thing is, not how it came to be written",
    ),
    Ban(
        re.compile(r"\b(py[p]i\.org|files\.python[h]osted|registry\.npm[j]s)\b"),
        (),
        "no address of a package registry: users choose their own",
    ),
)

SKIP = {"LICENSE"}
BINARY = {".safetensors", ".png", ".ico", ".gz"}


def tracked_files() -> list[Path]:
    """Files git knows or would add; ignored ones are nobody's business."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def violations(path: Path) -> list[str]:
    """One line per banned piece of text in `path`."""
    if path.name in SKIP or path.suffix in BINARY or "bundled" in path.parts:
        return []
    bans = [b for b in BANS if not b.suffixes or path.suffix in b.suffixes]
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        for ban in bans:
            if hit := ban.pattern.search(line):
                where = f"{path.relative_to(ROOT)}:{number}"
                found.append(f"{where}: {hit.group(0).strip()!r}: {ban.reason}")
    return found


def main() -> int:
    """Print every violation."""
    found = [line for path in tracked_files() for line in violations(path)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
