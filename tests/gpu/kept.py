"""States and pages of a run as numbers, to be compared with those of a run on another device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from millpond.memory.layout import EntrySpec
from tests.support.recording import Key, Truth

Check = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass
class Kept(Truth):
    """As `Truth`, with the bytes of the first run that left a key."""

    entries: dict[Key, torch.Tensor] = field(default_factory=dict)

    def note(self, key: Key, entry: torch.Tensor, where: str) -> None:
        """One run left `entry` under `key`."""
        super().note(key, entry, where)
        self.entries.setdefault(key, entry.clone())


def compare(
    found: Kept, expected: Kept, specs: dict[str, EntrySpec], check: Check
) -> dict[str, int]:
    """Hand every tensor that both runs left to `check`: (found, expected). -> entries by kind.

    `specs` says what an entry of each kind holds; kinds that are not named are left out.
    """
    counts = dict.fromkeys(specs, 0)
    for key in found.entries.keys() & expected.entries.keys():
        what = key[0]
        if what not in specs:
            continue
        counts[what] += 1
        spec = specs[what]
        for tensor, offset in zip(spec.tensors, spec.offsets(), strict=True):
            at = slice(offset, offset + tensor.num_bytes)
            mine, theirs = (
                side.entries[key][at].view(tensor.dtype).view(tensor.shape)
                for side in (found, expected)
            )
            check(mine, theirs)
    return counts
