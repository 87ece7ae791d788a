"""The words of JSON Schema, and the first one in a schema that is not among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAPS = frozenset("properties patternProperties $defs definitions dependentSchemas".split())
"""Their members' names are the user's own; their values are schemas."""

SCHEMAS = frozenset(
    "additionalProperties unevaluatedProperties propertyNames additionalItems unevaluatedItems"
    " items contains not if then else".split()
)

LISTS = frozenset("allOf anyOf oneOf prefixItems items".split())

OTHERS = frozenset(
    "type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength"
    " minLength pattern format maxItems minItems uniqueItems maxContains minContains maxProperties"
    " minProperties required dependentRequired dependencies contentEncoding contentMediaType"
    " contentSchema $id id $schema $ref $anchor $dynamicRef $dynamicAnchor $recursiveRef"
    " $recursiveAnchor $vocabulary $comment title description default deprecated readOnly writeOnly"
    " examples example nullable discriminator x-guidance".split()
)
"""What is left, notes to the reader included: OpenAPI's own are in common use."""

KNOWN = MAPS | SCHEMAS | LISTS | OTHERS


def first_unknown(schema: Any) -> str | None:
    """The first keyword that no draft of JSON Schema knows; `RecursionError` when too deep."""
    if not isinstance(schema, Mapping):
        return None
    for name, value in schema.items():
        if name not in KNOWN:
            return str(name)
        inner: list[Any] = []
        if name in MAPS and isinstance(value, Mapping):
            inner = list(value.values())
        elif name in LISTS and isinstance(value, list):
            inner = value
        elif name in SCHEMAS:
            inner = [value]
        for part in inner:
            found = first_unknown(part)
            if found is not None:
                return found
    return None
