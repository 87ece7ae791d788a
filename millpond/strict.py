"""Configurations whose mistakes are told in a sentence; knows no field of any of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from millpond.errors import MillpondError, Refused

SHOWN = 60
"""Characters of a wrong value that are repeated."""


def _as_tuple(value: Any) -> Any:
    """A list is as good as a tuple; anything else is left for the type check to judge."""
    return tuple(value) if isinstance(value, list) else value


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Ints = Annotated[tuple[int, ...], BeforeValidator(_as_tuple)]


class Strict(BaseModel):
    """Frozen, no unknown names, no silent conversion, no NaN and no infinity.

    What is wrong raises `Refused`, unless a kind says otherwise in `refusal`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise self.refusal(error) from None

    @classmethod
    def refusal(cls, error: ValidationError) -> MillpondError:
        """The error that tells of all that is wrong."""
        return Refused(f"{cls.__name__}: {explain(error, cls.model_fields)}")


def explain(error: ValidationError, names: Iterable[str] = ()) -> str:
    """Every wrong field in one line; `names` are those there are, for the ones that are not."""
    parts, names = [], list(names)
    for problem in error.errors(include_url=False, include_context=False):
        where = ".".join(str(p) for p in problem["loc"] if not str(p).startswith("function-"))
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(where, names, 1, 0.5)
            parts.append(f"unknown {where}" + (f", did you mean {near[0]}?" if near else ""))
            continue
        value = repr(problem["input"])
        value = value if len(value) <= SHOWN else value[:SHOWN] + "..."
        text = problem["msg"].replace("Input should be", "should be")
        parts.append(f"{where}={value}: {text}" if where else text)
    return "; ".join(parts)
