"""What this machine offers: free memory and versions; reads no environment variable."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "triton", "tokenizers", "safetensors", "fastapi", "uvicorn", "pydantic")


def free_memory() -> int:
    """Bytes of main memory that may be taken, within the limits of a container."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):
        pass
    limit, used = (_cgroup(name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        found.append(max(0, limit - used))
    return min(found)


def _cgroup(name: str) -> int | None:
    """A number of this process's control group, or None."""
    try:
        return int(Path("/sys/fs/cgroup", name).read_text("ascii"))
    except (OSError, ValueError):
        return None


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Python and the packages that matter, "absent" for those not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found
