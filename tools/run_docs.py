"""Runs the Python blocks of the README and the English pages, each page in a process of its own.

A block that opens with ```python no-run is shown but not run. Blocks of a page run in order, in one
namespace, as a reader would type them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python *(no-run)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page that are to be run."""
    return [code for no_run, code in BLOCK.findall(page.read_text("utf-8")) if not no_run]


def pages() -> list[Path]:
    """Pages with something to run."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs" / "en").rglob("*.md"))]
    return [page for page in every if blocks(page)]


def run(page: Path) -> bool:
    """Run one page; show its output when it fails."""
    code = "\n".join(blocks(page))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(f"{page.relative_to(ROOT)}: {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr)
    return done.returncode == 0


def main() -> int:
    """Run every page, even after a failure."""
    verdicts = [run(page) for page in pages()]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
