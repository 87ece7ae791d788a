"""The rule that keeps held-out sums, names and pairs out of training.

Membership is a checksum of the thing itself, so it needs no stored list and no shared state.
"""

import zlib

from millpond.tasks.dialogue import Split

_ONE_IN = {"sum": 16, "name": 8, "pair": 16}


def is_held_out(kind: str, *parts: object) -> bool:
    """Whether the thing `parts` of `kind` (sum, name or pair) belongs to the held-out set."""
    key = "|".join([kind, *(str(part) for part in parts)])
    return zlib.crc32(key.encode()) % _ONE_IN[kind] == 0


def fits(split: Split, kind: str, *parts: object) -> bool:
    """Whether the thing may be the subject of a dialogue of `split`."""
    return is_held_out(kind, *parts) == (split == "heldout")
