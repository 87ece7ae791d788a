"""Lists the benchmarks in bench/ and runs one by name.

python tools/bench.py [NAME] [ARGUMENTS ...]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def benchmarks() -> dict[str, Path]:
    """Scripts that can be run, by file name without suffix, and packages by their own name."""
    scripts = sorted((ROOT / "bench").rglob("*.py"))
    found = [s for s in scripts if "def main(" in s.read_text("utf-8")]
    return {s.parent.name if s.stem == "__main__" else s.stem: s for s in found}


def main(arguments: list[str]) -> int:
    """Run the named script with the rest of the arguments; without a name list them and fail."""
    found = benchmarks()
    if not found:
        print("bench: not run, because bench/ holds no benchmark yet")
        return 1
    if not arguments or arguments[0] not in found:
        print("choose one with OP=NAME:", *sorted(found), sep="\n  ")
        return 1
    name, *rest = arguments
    script = found[name].relative_to(ROOT).with_suffix("")
    module = ".".join(script.parts).removesuffix(".__main__")
    return subprocess.run([sys.executable, "-m", module, *rest], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
