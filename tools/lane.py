"""Says why a lane of tests cannot run here, so that no lane passes by running nothing.

python tools/lane.py MARKER [MARKER ...]
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def obstacle(marker: str) -> str | None:
    """What this machine lacks for tests with `marker`, or None."""
    if marker == "interpreter" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install -e '.[gpu]')"
    if marker in ("gpu", "multigpu"):
        probe = "import torch, sys; sys.exit(torch.cuda.device_count() < 1)"
        if subprocess.run([sys.executable, "-c", probe], check=False).returncode != 0:
            return "torch sees no CUDA device on this machine"
    return None


def has_tests(markers: list[str]) -> bool:
    """Whether any test carries one of `markers`."""
    command = ["-m", "pytest", "--collect-only", "-q", "-m", " or ".join(markers)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, check=False)
    if done.returncode not in (0, 5):  # 5: nothing collected
        sys.exit(done.stdout.decode() + done.stderr.decode())
    return done.returncode == 0


def main(markers: list[str]) -> int:
    """Exit 1 with the reason when the lane would run nothing."""
    name = " and ".join(markers)
    reason = next((r for m in markers if (r := obstacle(m))), None)
    if reason is None and not has_tests(markers):
        reason = f"no test is marked {name} yet"
    if reason is not None:
        print(f"{name}: not run, because {reason}")
    return 1 if reason else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
