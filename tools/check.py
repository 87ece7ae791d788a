"""Runs every static check of the project and says which failed; `make check` calls it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

CHECKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("formatting", (str(BIN / "ruff"), "format", "--check", "--quiet", ".")),
    ("linting", (str(BIN / "ruff"), "check", "--quiet", ".")),
    ("types", (str(BIN / "mypy"), "--no-error-summary")),
    ("import contracts", (str(BIN / "lint-imports"), "--no-logo")),
    ("whitespace and sizes", (sys.executable, "tools/check_files.py")),
    ("banned patterns", (sys.executable, "tools/check_patterns.py")),
    ("documentation links", (sys.executable, "tools/check_links.py")),
    ("faults index", (sys.executable, "tools/check_faults.py")),
    ("change fragments", (sys.executable, "tools/changelog.py", "--check")),
    ("module sizes", (sys.executable, "tools/module_sizes.py")),
)


def main() -> int:
    """Run all checks, even after a failure; output is shown for failed checks and for sizes."""
    failed = []
    for name, command in CHECKS:
        begin = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        verdict = "ok" if done.returncode == 0 else "FAILED"
        print(f"{name:<20} {verdict:<6} {time.perf_counter() - begin:5.1f} s", flush=True)
        if done.returncode != 0:
            failed.append(name)
        if done.returncode != 0 or name == "module sizes":
            print(done.stdout + done.stderr, end="", flush=True)
    if failed:
        print(f"make check: failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
