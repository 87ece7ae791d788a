"""Reads published configurations field by field; knows types and limits, and no architecture.

Whatever is missing, of the wrong type or not supported is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millpond.errors import Refused


class Fields:
    """One JSON object of a configuration. `where` says which, for messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def section(self, name: str) -> Fields:
        """The object under `name`."""
        found = self._present(name)
        if not isinstance(found, Mapping):
            raise self._wrong(name, "an object", found)
        return Fields(found, f"{self.where}.{name}")

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`; required where no default is given."""
        found = self._present(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            raise self._wrong(name, f"a whole number >= {least}", found)
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """Any finite number; required where no default is given."""
        found = self._present(name, default)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise self._wrong(name, "a number", found)
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        found = self._present(name, default)
        if not isinstance(found, bool):
            raise self._wrong(name, "true or false", found)
        return found

    def choices(self, name: str, count: int, allowed: Mapping[str, str]) -> tuple[str, ...]:
        """A list of `count` words, one a layer: keys of `allowed`, whose values are returned."""
        found = self._present(name)
        if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != count:
            raise self._wrong(name, f"a list of {count}, one a layer", found)
        for word in found:
            if word not in allowed:
                raise self._wrong(name, f"made of {', '.join(sorted(allowed))}", word)
        return tuple(allowed[word] for word in found)

    def expect(self, name: str, wanted: object) -> None:
        """Refuse any other value; an absent field is taken to be as wanted."""
        found = self.values.get(name)
        if found is not None and found != wanted:
            raise self._wrong(name, repr(wanted), found)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of them; none if absent."""
        found = self.values.get(name)
        if found is None:
            return ()
        listed = [found] if isinstance(found, int) else found
        if not isinstance(listed, list) or not all(isinstance(i, int) for i in listed):
            raise self._wrong(name, "a token id or a list of them", found)
        return tuple(listed)

    def _present(self, name: str, default: Any = None) -> Any:
        found = self.values.get(name)
        found = default if found is None else found
        if found is None:
            raise Refused(f"{self.where} has no field {name!r}")
        return found

    def _wrong(self, name: str, wanted: str, found: object) -> Refused:
        shown = repr(found)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return Refused(f"{self.where}: {name} is {shown}; supported: {wanted}")
