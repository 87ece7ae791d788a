"""What a request says about the form of its answer, as a constraint; knows all the usual spellings.

Reads only: whether a schema, an expression or a grammar can be used is judged where it is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from millpond.engine.constraint import Constraint, Kind
from millpond.errors import Rejected

FIELDS: dict[str, Kind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json_schema",
}
"""Fields of a request's own: vLLM's earlier names, then SGLang's."""

PARTS: dict[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
"""What `structured_outputs` may hold, one of them."""

HINTS = frozenset(
    "disable_fallback disable_any_whitespace disable_additional_properties whitespace_pattern"
    " backend".split()
)
"""Wishes about how another engine does it: nothing here depends on them."""


def from_response_format(
    given: Mapping[str, Any] | None, param: str = "response_format"
) -> Constraint | None:
    """The constraint of a `response_format`, None for text. Raises `Rejected` naming `param`.

    Types: text, json_object, json_schema (`json_schema: {name, schema, strict}`, or its members
    beside the type as in the Responses API), and LMDeploy's regex_schema.
    """
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(kind="json_object", param=param)
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        if not isinstance(inner, Mapping):
            raise Rejected(f"{param}.json_schema must be an object with a schema", param=param)
        schema = inner.get("schema", inner.get("json_schema"))
        if schema is None:
            raise Rejected(f"{param}.json_schema.schema is missing", param=param)
        strict = inner.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise Rejected(f"{param}.json_schema.strict must be true or false", param=param)
        return _constraint("json_schema", schema, param, strict=bool(strict))
    if kind == "regex_schema":
        return _constraint("regex", given.get("regex_schema"), param)
    raise Rejected(
        f"{param}.type {kind!r} is not supported: use text, json_object, json_schema or"
        " regex_schema",
        param=param,
        code="unsupported",
    )


def from_fields(fields: Mapping[str, Any]) -> Constraint | None:
    """The constraint of a request's fields other than `response_format`; None without any.

    Of `fields`, those named in `FIELDS` and `structured_outputs` count; null is absent. Raises
    `Rejected` for two of them, naming the second.
    """
    found: Constraint | None = None
    for name, kind in FIELDS.items():
        if fields.get(name) is not None:
            found = only_one(found, _constraint(kind, fields[name], name))
    parts = fields.get("structured_outputs")
    if parts is None:
        return found
    if not isinstance(parts, Mapping):
        raise Rejected("structured_outputs must be an object", param="structured_outputs")
    for name, value in parts.items():
        if value is None or value is False or name in HINTS:
            continue
        param = f"structured_outputs.{name}"
        if name not in PARTS:
            raise Rejected(f"{param} is not supported", param=param, code="unsupported")
        found = only_one(found, _constraint(PARTS[name], value, param))
    return found


def only_one(first: Constraint | None, second: Constraint | None) -> Constraint | None:
    """Whichever there is. Raises `Rejected` for two."""
    if first is None or second is None:
        return first or second
    raise Rejected(
        f"{second.param} and {first.param} both say what the answer must be: use one",
        param=second.param,
    )


def _constraint(kind: Kind, value: Any, param: str, *, strict: bool = False) -> Constraint:
    if kind == "json_object":
        return Constraint(kind=kind, param=param)
    if kind == "json_schema":
        text = value if isinstance(value, str) else _json(value, param)
    elif kind == "choice":
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise Rejected(f"{param} must be a list of strings", param=param)
        text = _json(value, param)
    elif isinstance(value, str):
        text = value
    else:
        raise Rejected(f"{param} must be a string", param=param)
    return Constraint(kind=kind, text=text, strict=strict, param=param)


def _json(value: Any, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Rejected(f"{param} is not JSON: {error}", param=param) from error
