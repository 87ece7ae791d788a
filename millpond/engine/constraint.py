"""What the text of an answer must be, and where its reasoning ends. Plain data only."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The language an answer is written in.

    `text` is, by `kind`: nothing; a JSON schema; a regular expression for the whole answer; a
    grammar in Lark, or in GBNF (`root ::= ...`); a JSON list of strings to choose from. `strict`
    refuses keywords of a schema that cannot be enforced, otherwise they are ignored. `param` is the
    field a refusal names.
    """

    kind: Kind
    text: str = ""
    strict: bool = False
    param: str = "response_format"


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a sample's thinking is told from its answer, by token.

    `is_open`: the prompt opened the block, which `end_token` closes; a constraint starts after
    that. After `budget` tokens of thinking `end_token` is forced (None: never). `start_token` lets
    a block that the model opens itself count; a constrained answer has no such block.
    """

    end_token: int
    is_open: bool
    start_token: int | None = None
    budget: int | None = None
