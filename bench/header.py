"""What a number needs beside it: commit, machine and versions. Runs nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def header() -> dict[str, Any]:
    """Plain data, the same fields in every benchmark's results."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def commit() -> str:
    """The short id of the checkout, with `+` where files differ from it."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=7", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def machine() -> str:
    """The GPU with its driver and memory, or the processor and how busy it is."""
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, driver {_driver()}"
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [s for s in info.read_text().splitlines() if s.startswith("model name")]
        cpu = f"{len(names)} x {names[0].split(':')[1].strip()}" if names else cpu
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return f"{cpu}, {torch.get_num_threads()} threads, load {load:.1f}"


def versions() -> str:
    """Python and what computes."""
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if find_spec("triton") is not None:
        import triton

        found.append(f"Triton {triton.__version__}")
    return ", ".join(found)


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
