"""Checks files as files: no trailing whitespace, one newline at the end, nothing large.

python tools/check_files.py [FILE ...]    without a name: every file git tracks
"""

from __future__ import annotations

import sys
from pathlib import Path

from check_patterns import BINARY, ROOT, tracked_files

LARGEST = 250_000
"""Bytes; the bundled models alone may be larger."""


def problems(path: Path) -> list[str]:
    """What is wrong with one file."""
    if "bundled" in path.parts:
        return []
    content = path.read_bytes()
    found = []
    if len(content) > LARGEST:
        found.append(f"is {len(content)} bytes; {LARGEST} are allowed")
    if path.suffix not in BINARY and content:
        if not content.endswith(b"\n") or content.endswith(b"\n\n"):
            found.append("does not end with exactly one newline")
        lines = content.split(b"\n")
        found += [
            f"line {number} ends with whitespace"
            for number, line in enumerate(lines, start=1)
            if line != line.rstrip()
        ]
    return found


def main(names: list[str]) -> int:
    """Print every problem."""
    paths = [ROOT / name for name in names] if names else tracked_files()
    found = [f"{p.relative_to(ROOT)}: {what}" for p in paths for what in problems(p)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
