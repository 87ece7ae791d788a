"""Says why a lane of tests cannot run here, before pytest skips them one by one.

python tools/lane.py MARKER [MARKER ...]
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys


def obstacle(marker: str) -> str | None:
    """What this machine lacks for tests with `marker`, or None."""
    if marker == "interpreter" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install -e '.[gpu]')"
    if marker in ("gpu", "multigpu"):
        probe = "import torch, sys; sys.exit(torch.cuda.device_count() < 1)"
        if subprocess.run([sys.executable, "-c", probe], check=False).returncode != 0:
            return "torch sees no CUDA device on this machine"
    return None


def main(markers: list[str]) -> int:
    """Exit 1 with the reason when the lane would run nothing."""
    reason = next((r for m in markers if (r := obstacle(m))), None)
    if reason is not None:
        print(f"{' and '.join(markers)}: not run, because {reason}")
    return 1 if reason else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
