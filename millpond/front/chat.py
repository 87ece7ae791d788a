"""Messages to a prompt by the model's own template, and how its answer is to be read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millpond.engine.constraint import Constraint
from millpond.engine.constraint import Reasoning as ThinkBlock
from millpond.errors import Refused, Rejected
from millpond.front.parsing.dialect import Dialect, Reading
from millpond.front.parsing.reader import END_THINK, THINK
from millpond.front.parsing.syntax import call_grammar
from millpond.front.parsing.wish import ToolWish
from millpond.front.text import Tokenizer
from millpond.front.verbatim import Controls, Quotation, Spans

SWITCH = {"none": False, "low": True, "medium": True, "high": True}
"""Efforts of a template that can only switch thinking on and off."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
ROLES = ("system", "developer", "user", "assistant", "tool", "observation", "function")


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as templates want it: not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation; `in_reasoning` when the answer begins inside a think block.

    `verbatim` are places where a message spells a control token, which is text there.
    """

    text: str
    in_reasoning: bool
    verbatim: Spans = ()

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Its tokens; the template has written all special ones."""
        return tokenizer.encode(self.text, add_special_tokens=False, verbatim=self.verbatim)


@dataclass(frozen=True, slots=True)
class Plan:
    """How an answer is made and read; the fields of `Ask` of these names."""

    reading: Reading
    constraint: Constraint | None
    reasoning: ThinkBlock | None


class ChatTemplate:
    """One model's chat template, run in a sandbox that can change nothing."""

    def __init__(self, source: str, tokenizer: Tokenizer | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise Refused(f"chat template, line {error.lineno}: {error.message}") from error
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._tokens = {n: tokenizer.named(n) or "" for n in names} if tokenizer else {}
        self.dialect = Dialect.of(source, tokenizer)
        self._controls = Controls(
            (t.content for t in tokenizer.added.values()) if tokenizer else (),
            self.dialect.family.markers if self.dialect else (),
        )
        read = meta.find_undeclared_variables(environment.parse(source))
        self.variables = frozenset(read) - environment.globals.keys()
        self.efforts = frozenset[str]()
        if "reasoning_effort" in self.variables:
            self.efforts = self._known_efforts()
        elif "enable_thinking" in self.variables:
            self.efforts = frozenset(SWITCH)

    def effort(self, value: str | None) -> dict[str, Any]:
        """The template's variables for a `reasoning_effort`.

        Raises `Rejected` for one that the template does not tell from another.
        """
        if value is None:
            return {}
        if not isinstance(value, str) or value not in self.efforts:
            known = ", ".join(sorted(self.efforts)) or "none at all"
            raise Rejected(
                f"reasoning_effort {value!r} is unknown to this model, it knows {known}",
                param="reasoning_effort",
            )
        if "reasoning_effort" in self.variables:
            return {"reasoning_effort": value}
        return {"enable_thinking": SWITCH[value]}

    def unknown(self, extra: Mapping[str, Any]) -> list[str]:
        """Which of these variables the template never reads."""
        return sorted(k for k in extra if k not in self.variables)

    def plan(
        self,
        prompt: Prompt,
        tools: ToolWish,
        *,
        constraint: Constraint | None = None,
        thinking_budget: int | None = None,
    ) -> Plan:
        """How the answer to `prompt` is made and read. Raises `Rejected` naming what it cannot be.

        `thinking_budget` is the number of tokens after which the think block is closed.
        """
        dialect = self.dialect
        if tools.active and (dialect is None or dialect.family.call is None):
            raise Rejected(
                "this model's chat template has no tool calls that can be read",
                param="tools",
                code="unsupported",
            )
        if dialect is not None and tools.choice == "required":
            if constraint is not None:
                raise Rejected(
                    f"tool_choice wants a call, which {constraint.param} leaves no room for",
                    param="tool_choice",
                )
            text = call_grammar(dialect, tools.functions, parallel=tools.parallel)
            constraint = Constraint(kind="grammar", text=text, param="tool_choice")
        return Plan(
            reading=Reading(dialect, prompt.in_reasoning, tools.kinds, tools.parallel),
            constraint=constraint,
            reasoning=self._think_block(prompt, constraint, thinking_budget),
        )

    def _think_block(
        self, prompt: Prompt, constraint: Constraint | None, budget: int | None
    ) -> ThinkBlock | None:
        """What the engine has to know of the think block; None where it need not know of it."""
        if budget is None and (constraint is None or not prompt.in_reasoning):
            return None
        if budget is not None and budget < 0:
            raise Rejected("the thinking budget cannot be negative", param="thinking_token_budget")
        end = self.dialect.token(END_THINK) if self.dialect else None
        if self.dialect is None or end is None:
            raise Rejected(
                "this model has no token that ends its reasoning",
                param="thinking_token_budget" if constraint is None else constraint.param,
                code="unsupported",
            )
        return ThinkBlock(
            end_token=end,
            is_open=prompt.in_reasoning,
            start_token=self.dialect.token(THINK),
            budget=budget,
        )

    def _known_efforts(self) -> frozenset[str]:
        """The values of `reasoning_effort` this template tells apart, found by trying them."""
        probe = [{"role": "user", "content": "?"}]
        plain = self.render(probe).text
        tried = {e: self.render(probe, extra={"reasoning_effort": e}).text for e in EFFORTS}
        known = {e for e, text in tried.items() if text != plain or e.lower() in plain.lower()}
        return frozenset(known)

    @classmethod
    def of_model(cls, directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """From `chat_template.jinja` or the tokenizer's configuration; None without one."""
        path = directory / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text("utf-8"), tokenizer)
        source = tokenizer.config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        return cls(source, tokenizer) if isinstance(source, str) else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt's text; `extra` are the template's own variables.

        Raises `Rejected` for messages that it, or the template, cannot take.
        """
        given = (extra or {}).get("reasoning_effort")
        if self.efforts and "reasoning_effort" in self.variables:
            self.effort(given)
        known = [normalise(m, i) for i, m in enumerate(messages)]
        if not known:
            raise Rejected("messages is empty", param="messages")
        if continue_final_message:
            add_generation_prompt = False
        # Nobody who writes a message can end it, or begin another, by spelling a token.
        quotation = Quotation(self._controls)
        known = [quotation.message(m) for m in known]
        try:
            text = self._template.render(
                **self._tokens,
                **(extra or {}),
                messages=known,
                tools=quotation.value(list(tools)) if tools else None,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise Rejected(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error
        except (RecursionError, OverflowError, MemoryError, ZeroDivisionError) as error:
            raise Rejected("the chat template failed on the messages", param="messages") from error
        if continue_final_message:
            text = _cut_after_final(text, known[-1])
        opened = text.rfind(THINK) > text.rfind(END_THINK)
        in_reasoning = opened and text.rstrip().endswith(THINK)
        text, verbatim = quotation.reveal(text)
        return Prompt(text, in_reasoning, verbatim)


def _cut_after_final(text: str, message: Mapping[str, Any]) -> str:
    """`text` up to the end of the final message's content, so that it is continued."""
    content = str(message.get("content") or "").strip()
    at = text.rfind(content)
    if not content or at < 0:
        raise Rejected("the final message has no content to continue", param="messages")
    return text[: at + len(content)]


def normalise(message: Mapping[str, Any], index: int = 0) -> dict[str, Any]:
    """One message as templates expect it: text content, object arguments, reasoning under one name.

    Raises `Rejected` that names the place for what cannot be served (an image, an unknown role).
    """
    where = f"messages[{index}]"
    role = message.get("role")
    if role not in ROLES:
        raise Rejected(
            f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}", param="messages"
        )
    made: dict[str, Any] = {k: v for k, v in message.items() if v is not None}
    made["role"] = {"developer": "system", "function": "tool"}.get(role, role)
    if "function_call" in made:
        raise Rejected(
            f"{where}.function_call is not supported: use tool_calls",
            param="messages",
            code="unsupported",
        )
    made["content"] = _text_of(message.get("content"), where)
    thought = made.pop("reasoning", None)
    if role == "assistant" and isinstance(thought, str):
        made.setdefault("reasoning_content", thought)
    calls = made.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list | tuple):
            raise Rejected(f"{where}.tool_calls must be a list", param="messages")
        made["tool_calls"] = [_call(c, where) for c in calls]
    return made


def _text_of(content: Any, where: str) -> str:
    """The text of a message: a string, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise Rejected(f"{where}.content must be a string or a list of parts", param="messages")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise Rejected(
                f"{where}.content: parts of type {kind!r} are not supported, only text",
                param="messages",
                code="unsupported",
            )
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A past tool call with its arguments as an object, which is what templates iterate over."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Rejected(f"{where}.tool_calls: a call needs function.name", param="messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise Rejected(
                f"{where}.tool_calls: the arguments of {function['name']} are not JSON",
                param="messages",
            ) from error
    if not isinstance(arguments, Mapping):
        raise Rejected(
            f"{where}.tool_calls: the arguments of {function['name']} are not an object",
            param="messages",
        )
    return {**call, "function": {**function, "arguments": dict(arguments)}}
