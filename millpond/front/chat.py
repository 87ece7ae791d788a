"""Messages to a prompt by the model's own template, and an answer split from its reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millpond.errors import Refused, Rejected
from millpond.front.text import Tokenizer, overlap

THINK, END_THINK = "<think>", "</think>"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
ROLES = ("system", "developer", "user", "assistant", "tool", "observation", "function")


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as templates want it: not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation; `in_reasoning` when the answer begins inside a think block."""

    text: str
    in_reasoning: bool


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
        self.reasons = END_THINK in source
        self.efforts = self._known_efforts() if "reasoning_effort" in source else frozenset()

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
        known = [normalise(m, i) for i, m in enumerate(messages)]
        if not known:
            raise Rejected("messages is empty", param="messages")
        if continue_final_message:
            add_generation_prompt = False
        try:
            text = self._template.render(
                **self._tokens,
                **(extra or {}),
                messages=known,
                tools=list(tools) if tools else None,
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
        return Prompt(text, opened and text.rstrip().endswith(THINK))


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
    made["role"] = "system" if role == "developer" else role
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


class ReasoningSplit:
    """Cuts a stream of text into reasoning and answer at `</think>`, whatever the pieces are.

    Line breaks next to the markers belong to neither. What may be part of a marker is held back.
    """

    def __init__(self, *, active: bool, in_reasoning: bool) -> None:
        self._phase = "reasoning" if in_reasoning else "start" if active else "answer"
        self._held = ""
        self._at_start = True  # line breaks are dropped until something else comes
        if not active:
            self._at_start = False

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that became certain."""
        text = self._held + text
        self._held = ""
        if self._phase == "start":
            seen = text.lstrip()
            if not seen or (len(seen) < len(THINK) and THINK.startswith(seen)):
                self._held = text
                return "", ""
            self._phase = "reasoning" if seen.startswith(THINK) else "answer"
            self._at_start = self._phase == "reasoning"
            text = seen[len(THINK) :] if self._phase == "reasoning" else text
        if self._phase == "answer":
            return "", self._trim(text)
        thought, marker, answer = text.partition(END_THINK)
        if marker:
            thought = self._trim(thought).rstrip("\n")
            self._phase, self._at_start = "answer", True
            return thought, self._trim(answer)
        keep = overlap(text, END_THINK)
        body = text[: len(text) - keep].rstrip("\n")
        self._held = text[len(body) :]
        return self._trim(body), ""

    def finish(self) -> tuple[str, str]:
        """What was held back for a marker that did not come."""
        held, self._held = self._held, ""
        held = self._trim(held)
        return (held, "") if self._phase == "reasoning" else ("", held)

    def _trim(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text
