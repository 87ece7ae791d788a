"""Digests of the pages of prompts, each computed once. Knows no tree and no slot."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from millpond.state.checkpoint import page_digest, root_digest

REMEMBERED_CHAINS = 8
"""Prompts, by their first page, whose digests are kept so as not to compute them again."""


class Chains:
    """Pages of `page_size` tokens under the chain that names them."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._hashed: OrderedDict[tuple[bytes, bytes], list[tuple[bytes, bytes]]] = OrderedDict()

    def of(
        self, tokens: Sequence[int], end: int, salt: bytes
    ) -> Iterator[tuple[int, bytes, bytes]]:
        """(end, digest, tokens as bytes) of each whole page of `tokens[:end]`, shallowest first."""
        size = self._page_size
        ids = array("i", tokens if end == len(tokens) else tokens[:end])
        packed, width = ids.tobytes(), ids.itemsize * size
        digest = root_digest(salt)
        # A prompt comes several times: to be matched, and for each of its anchors.
        known = self._hashed.setdefault((salt, packed[:width]), [])
        if len(self._hashed) > REMEMBERED_CHAINS:
            self._hashed.popitem(last=False)
        for depth, at in enumerate(range(0, len(packed) - width + 1, width)):
            page = packed[at : at + width]
            if depth < len(known) and known[depth][0] == page:
                digest = known[depth][1]
            else:
                digest = page_digest(digest, page)
                known[depth:] = [(page, digest)]
            yield (depth + 1) * size, digest, page
