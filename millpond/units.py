"""Amounts of memory in words and in bytes; knows nothing of what they are for."""

from __future__ import annotations

import re

from millpond.errors import Refused

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": GIB << 10}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": KIB, "m": MIB, "g": GIB}


def parse_memory(value: str | int | float, available: int) -> int:
    """Bytes meant by "8GiB", by a number of bytes, or by a share (0 < x <= 1) of `available`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(%|[a-z]*)", str(value).strip().lower())
    number, unit = (float(found[1]), found[2]) if found else (0.0, "none")
    bare = unit == "" and ("." in str(value) or isinstance(value, float))
    if unit == "%" or bare:
        share = number if bare else number / 100
        if 0 < share <= 1:
            return int(available * share)
    elif unit in _UNITS and 1 <= number * _UNITS[unit] < 2**63:
        return int(number * _UNITS[unit])
    raise Refused(f"cache_memory {value!r} is neither a size such as 8GiB nor a share such as 0.5")


def human(count: float) -> str:
    """Bytes in words: 140.8 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
