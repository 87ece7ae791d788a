"""Arguments of a tool call from text to JSON, typed by the tool's schema; knows no markup."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

Kinds = frozenset[str]
"""Types of JSON schema that a value may have; empty when nothing is known of it."""

NONE: Kinds = frozenset()
TEXT: Kinds = frozenset({"string"})
NAME = r"[\w.:/-]{0,128}"
"""The beginning of a function's name."""

_DEPTH = 16  # of references and alternatives in a schema
_WORDS = {"null": ("null", "none"), "boolean": ("true", "false")}  # as JSON and as Python spell it


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called: the kinds of its parameters, and of those it does not name."""

    name: str
    kinds: Mapping[str, Kinds] = field(default_factory=dict)
    others: Kinds = NONE

    @classmethod
    def of(cls, function: Mapping[str, Any]) -> Tool:
        """From the `function` of a request's tool."""
        root = _mapping(function.get("parameters"))
        properties = _mapping(root.get("properties"))
        return cls(
            name=str(function.get("name", "")),
            kinds={str(k): kinds_of(s, root) for k, s in properties.items()},
            others=kinds_of(root.get("additionalProperties"), root),
        )

    def of_parameter(self, key: str) -> Kinds:
        """The kinds of one parameter."""
        return self.kinds.get(key, self.others)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema` with a reference into `root` followed; empty when it leads nowhere."""
    found = _mapping(schema)
    for _ in range(_DEPTH):
        target = found.get("$ref")
        if not isinstance(target, str):
            return found
        place: Any = root
        for step in target.removeprefix("#").split("/")[1:]:
            place = _mapping(place).get(step.replace("~1", "/").replace("~0", "~"))
        found = _mapping(place)
    return {}


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Kinds:
    """The types that a schema allows, as far as it says so plainly."""
    if depth > _DEPTH:
        return NONE
    found = resolve(schema, root)
    given = found.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(k for k in given if isinstance(k, str))
    if isinstance(found.get("enum"), list):
        return frozenset(kind_of(v) for v in found["enum"])
    if "const" in found:
        return frozenset({kind_of(found["const"])})
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(found.get(name), list):
            parts = [kinds_of(part, root, depth + 1) for part in found[name]]
            if name != "allOf" and not all(parts):
                return NONE  # one of them allows anything
            return frozenset().union(*parts)
    return frozenset({"object"}) if "properties" in found else NONE


def kind_of(value: Any) -> str:
    """The type of a JSON value, in the words of JSON schema."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case _:
            return "array"


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def to_json(text: str, kinds: Kinds) -> str:
    """JSON for a value that was written as plain text; text that is of no such kind is a string."""
    bare = text.strip()
    for kind, words in _WORDS.items():
        if kind in kinds and bare.lower() in words:
            return "null" if kind == "null" else bare.lower()
    try:
        value = json.loads(bare, parse_constant=_constant)
    except (ValueError, RecursionError):
        return quoted(text)
    kind = kind_of(value)
    fits = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return bare if fits or "string" not in kinds else quoted(text)


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


class ArgumentWriter:
    """Writes one JSON object, piece by piece; strings as they come, other values when whole.

    `write` takes fragments of JSON text. `untyped` are the kinds of a parameter without a schema:
    none of them, when such a value is JSON if it can be, or text.
    """

    def __init__(self, tool: Tool | None, untyped: Kinds, write: Callable[[str], None]) -> None:
        self._tool, self._untyped, self._write = tool, untyped, write
        self._kinds = NONE
        self._held: str | None = None  # of a value whose kind is decided at its end
        self._separator = "{"

    def key(self, key: str) -> None:
        """A parameter begins."""
        self._write(f"{self._separator}{quoted(key)}: ")
        self._separator = ", "
        self._kinds = (self._tool.of_parameter(key) if self._tool else NONE) or self._untyped
        self._held = ""
        if self._kinds == TEXT:
            self._begin_text()

    def value(self, text: str) -> None:
        """Some more of its value."""
        if self._held is None:
            self._write(quoted(text)[1:-1])
            return
        self._held += text
        if self._kinds <= {"string", "null"} and "string" in self._kinds:
            bare = self._held.strip().lower()
            if not any(word.startswith(bare) for word in _WORDS["null"]):
                self._begin_text()

    def end_value(self) -> None:
        """The value is whole."""
        self._write('"' if self._held is None else to_json(self._held, self._kinds))

    def close(self) -> None:
        """The object is whole."""
        self._write("{}" if self._separator == "{" else "}")

    def _begin_text(self) -> None:
        text, self._held = self._held or "", None
        self._write('"' + quoted(text)[1:-1])
