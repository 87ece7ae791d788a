"""What a request says about tools: the tools, whether one must be called, and how many at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millpond.errors import Rejected
from millpond.front.parsing.values import NAME, Tool


@dataclass(frozen=True, slots=True)
class ToolWish:
    """The tools of a request as it gave them, and its choice among them.

    `choice` "none": they are not shown and no calls are looked for. "required": one of them is
    called, that of `name` where it is set. Not `parallel`: at most one call in an answer.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: Literal["auto", "none", "required"] = "none"
    name: str | None = None
    parallel: bool = True

    @classmethod
    def none(cls) -> ToolWish:
        """No tools."""
        return cls()

    @classmethod
    def of(
        cls,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
    ) -> ToolWish:
        """From fields in the shape of the OpenAI API. Raises `Rejected` naming the wrong one."""
        given = tuple(tools or ())
        names = [_checked(tool, f"tools[{i}]") for i, tool in enumerate(given)]
        choice, name = _choice(tool_choice, given)
        if choice == "required" and not given:
            raise Rejected("tool_choice wants a call, and there are no tools", param="tool_choice")
        if name is not None and name not in names:
            raise Rejected(f"tool_choice names {name!r}, which is no tool", param="tool_choice")
        return cls(given, choice, name, parallel_tool_calls is not False)

    @property
    def active(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.tools) and self.choice != "none"

    @property
    def for_template(self) -> tuple[Mapping[str, Any], ...] | None:
        """The tools that the prompt shows."""
        return self.tools if self.active else None

    @property
    def functions(self) -> tuple[Mapping[str, Any], ...]:
        """What may be called: that of `name`, or all of them."""
        found = [tool["function"] for tool in self.tools] if self.active else []
        return tuple(f for f in found if self.name in (None, f["name"]))

    @property
    def kinds(self) -> tuple[Tool, ...]:
        """All tools as parsers know them; none where no calls are looked for."""
        return tuple(Tool.of(t["function"]) for t in self.tools) if self.active else ()


def _checked(tool: Any, where: str) -> str:
    """The name of a tool that can be offered."""
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise Rejected(
            f"{where}: tools of type {kind!r} are not supported, only function",
            param="tools",
            code="unsupported",
        )
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or not re.fullmatch(NAME, name):
        raise Rejected(
            f"{where}.function.name must be letters, digits, _, -, ., / and :, at most 128 of "
            f"them, not {name!r}",
            param="tools",
        )
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    if parameters is not None and not isinstance(parameters, Mapping):
        raise Rejected(f"{where}.function.parameters must be a JSON schema", param="tools")
    return name


def _choice(
    given: str | Mapping[str, Any] | None, tools: Sequence[Any]
) -> tuple[Literal["auto", "none", "required"], str | None]:
    match given:
        case None:
            return ("auto" if tools else "none"), None
        case "auto" | "none" | "required":
            return given, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", name
        case {"type": "function", "name": str(name)}:
            return "required", name
    raise Rejected(
        'tool_choice must be auto, none, required, or {"type": "function", "function": {"name": '
        f"...}}}}, not {given!r}",
        param="tool_choice",
    )
