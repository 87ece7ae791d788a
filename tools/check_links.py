"""Checks that every relative link in the Markdown files leads to a file, and to a heading in it."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("*.md", "docs/**/*.md", "changes/*.md", "examples/**/*.md", "bench/**/*.md")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def prose(text: str) -> str:
    """The text without code, in which a bracket is not a link nor a hash a heading."""
    return FENCE.sub("", text)


def anchor(heading: str) -> str:
    """The fragment a heading is reached by: lower case, no punctuation, dashes for spaces."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """All fragments of a page."""
    return {anchor(h) for h in HEADING.findall(prose(path.read_text("utf-8")))}


def broken(path: Path) -> list[str]:
    """Links of one page that lead nowhere."""
    found = []
    for target in LINK.findall(CODE.sub("", prose(path.read_text("utf-8")))):
        if re.match(r"[a-z]+:", target):
            continue  # another site: not reachable from a test
        name, _, fragment = unquote(target).partition("#")
        goal = (path.parent / name).resolve() if name else path
        if not goal.exists():
            found.append(f"{path.relative_to(ROOT)}: no such file: {target}")
        elif fragment and goal.suffix == ".md" and fragment not in anchors(goal):
            found.append(f"{path.relative_to(ROOT)}: no such heading: {target}")
    return found


def main() -> int:
    """Print every broken link."""
    pages = sorted({p for place in PLACES for p in ROOT.glob(place)})
    found = [line for page in pages for line in broken(page)]
    print("\n".join(found) if found else f"{len(pages)} pages, all links lead somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
