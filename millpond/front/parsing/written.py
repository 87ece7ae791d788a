"""Finds markers in text, for models whose tokenizer has no tokens for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.front.text import overlap


@dataclass(slots=True)
class WrittenMarkers:
    """Finds markers in a stream of text, whatever the pieces are."""

    markers: tuple[str, ...]
    _held: str = field(default="", init=False)

    def push(self, text: str) -> list[tuple[str, bool]]:
        """(text, whether it is a marker) that became certain."""
        if not self.markers:
            return [(text, False)]
        text, made = self._held + text, []
        while hits := [(at, -len(m), m) for m in self.markers if (at := text.find(m)) >= 0]:
            at, _, marker = min(hits)
            made += [(text[:at], False), (marker, True)]
            text = text[at + len(marker) :]
        keep = max(overlap(text, m) for m in self.markers)
        self._held = text[len(text) - keep :]
        return [*made, (text[: len(text) - keep], False)]

    def finish(self) -> str:
        """What was held back for a marker that did not come."""
        held, self._held = self._held, ""
        return held
