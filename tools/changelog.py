"""Assembles the change fragments of changes/ into the section of the next release.

python tools/changelog.py            print the section
python tools/changelog.py --check    only check the names of the fragments
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("added", "changed", "fixed", "removed")
NAME = re.compile(rf"^[a-z0-9-]+\.({'|'.join(KINDS)})\.md$")


def fragments() -> list[Path]:
    """All fragments, oldest name first; the folder's own README is none."""
    return sorted(p for p in (ROOT / "changes").glob("*") if p.name != "README.md")


def problems() -> list[str]:
    """Fragments that would not be assembled, or would say nothing."""
    found = []
    for path in fragments():
        if not NAME.match(path.name):
            found.append(f"changes/{path.name}: name it <slug>.<{'|'.join(KINDS)}>.md")
        elif not path.read_text("utf-8").strip():
            found.append(f"changes/{path.name}: is empty")
    return found


def section() -> str:
    """The unreleased section, as it would stand in CHANGELOG.md."""
    lines = ["## Unreleased"]
    for kind in KINDS:
        entries = [p for p in fragments() if p.name.endswith(f".{kind}.md")]
        if entries:
            lines += ["", f"### {kind.capitalize()}", ""]
            lines += [f"- {' '.join(p.read_text('utf-8').split())}" for p in entries]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the section, or the problems."""
    if found := problems():
        print("\n".join(found))
        return 1
    if "--check" not in arguments:
        print(section())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
