"""Runs every static check of the project and says which failed; `make check` calls it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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


def run(command: tuple[str, ...]) -> tuple[subprocess.CompletedProcess[str], float]:
    """What a check said, and the seconds it took."""
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done, time.perf_counter() - begin


def main() -> int:
    """Run all checks, even after a failure; output is shown for failed checks and for sizes."""
    failed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        asked = [(name, pool.submit(run, command)) for name, command in CHECKS]
        for name, told in asked:
            done, seconds = told.result()
            verdict = "ok" if done.returncode == 0 else "FAILED"
            print(f"{name:<20} {verdict:<6} {seconds:5.1f} s", flush=True)
            if done.returncode != 0:
                failed.append(name)
            if done.returncode != 0 or name == "module sizes":
                print(done.stdout + done.stderr, end="", flush=True)
    if failed:
        print(f"make check: failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
