"""The grammar of an answer that has to call tools: what may follow the think block, in Lark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.front.parsing import glm, qwen
from millpond.front.parsing.dialect import GLM, Dialect
from millpond.front.parsing.reader import CALL, END_CALL
from millpond.front.parsing.values import kind_of, kinds_of, resolve

_ANY = r"/(.|\n)*/"
_END = f"\n{qwen.END_PARAMETER}\n"
_JSON = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


def call_grammar(
    dialect: Dialect, functions: Sequence[Mapping[str, Any]], *, parallel: bool = True
) -> str:
    """Lark for one call of any of these functions, or more where `parallel`.

    Markers are tokens, written bare. Parameters come in the order of the schema, those that are not
    required may be left out; a value is text where the schema allows a string, else JSON of it.
    """
    made = _Glm() if dialect.family is GLM else _Qwen()
    calls = " | ".join(made.function(f) for f in functions)
    rules = [made.start(parallel), f"call: {CALL} ( {calls} ) {END_CALL}", *made.rules]
    return "\n".join(rules).replace("::=", "\\u003a:=") + "\n"  # which would mean another notation


@dataclass(slots=True)
class _Rules:
    """Rules of the values so far."""

    rules: list[str] = field(default_factory=list)

    def start(self, parallel: bool) -> str:
        """The rule of the whole answer."""
        raise NotImplementedError

    def function(self, function: Mapping[str, Any]) -> str:
        """What stands between the markers of a call of this function."""
        raise NotImplementedError

    def pair(self, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """A parameter with its value."""
        raise NotImplementedError

    def any_pairs(self) -> str:
        """Parameters of which nothing is known."""
        raise NotImplementedError

    def arguments(self, function: Mapping[str, Any]) -> Iterator[str]:
        """The parameters, in order."""
        root = function.get("parameters")
        if not isinstance(root, Mapping):
            return
        properties = root.get("properties")
        if not isinstance(properties, Mapping):
            if root.get("additionalProperties") is not False:
                yield self.any_pairs()
            return
        required = root.get("required")
        for key, schema in properties.items():
            pair = self.pair(key, schema, root)
            needed = isinstance(required, list) and key in required
            yield pair if needed else f"( {pair} )?"

    def rule(self, body: str) -> str:
        """The name of a new rule."""
        name = f"v{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def value(self, schema: Any, root: Mapping[str, Any], text: str) -> str:
        """A value; `text` is how any string is written."""
        found = resolve(schema, root)
        choices = found.get("enum", [found["const"]] if "const" in found else None)
        if isinstance(choices, list) and choices:
            return f"( {' | '.join(_word(c) for c in choices)} )"
        kinds = kinds_of(found, root)
        if not kinds or "string" in kinds:
            return text
        definitions = {k: root[k] for k in ("$defs", "definitions") if k in root}
        whole = {**definitions, **found, "x-guidance": {**_JSON, "lenient": True}}
        return self.rule(f"%json {json.dumps(whole)}")


class _Glm(_Rules):
    __slots__ = ()

    def start(self, parallel: bool) -> str:
        return "start: call+" if parallel else "start: call"

    def function(self, function: Mapping[str, Any]) -> str:
        return " ".join([_quoted(function["name"]), *self.arguments(function)])

    def pair(self, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        return self._pair(_quoted(key), self.value(schema, root, _ANY))

    def any_pairs(self) -> str:
        return f"( {self._pair('/[^<]+/', _ANY)} )*"

    def _pair(self, key: str, value: str) -> str:
        return f"{glm.KEY} {key} {glm.END_KEY} {glm.VALUE} {value} {glm.END_VALUE}"


class _Qwen(_Rules):
    __slots__ = ()

    def start(self, parallel: bool) -> str:
        more = ' ( "\\n" call )*' if parallel else ""
        text = f"text[suffix={_quoted(_END)}]: {_ANY}"  # up to the first place where its end stands
        return f"start: /\\n{{0,2}}/ call{more}\n{text}"

    def function(self, function: Mapping[str, Any]) -> str:
        head = _quoted(f"\n{qwen.FUNCTION}{function['name']}>\n")
        return " ".join([head, *self.arguments(function), _quoted(f"{qwen.END_FUNCTION}\n")])

    def pair(self, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        value = self.value(schema, root, "text")
        parts = [_quoted(f"{qwen.PARAMETER}{key}>\n"), value]
        return " ".join(parts if value == "text" else [*parts, _quoted(_END)])

    def any_pairs(self) -> str:
        return rf'( {_quoted(qwen.PARAMETER)} /[^<>\n]+/ ">\n" text )*'


def _word(value: Any) -> str:
    """One value that is given as it stands."""
    return _quoted(value if kind_of(value) == "string" else json.dumps(value, ensure_ascii=False))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
