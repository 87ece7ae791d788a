"""Held-out dialogues of the generator as token ids and the reply that is right; runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from millpond.errors import Refused
from millpond.front.chat import ChatTemplate, Prompt
from millpond.front.parsing.dialect import PLAIN, Reading
from millpond.front.parsing.values import Tool
from millpond.front.text import Tokenizer, read_json
from millpond.tasks import Dialogue, make

Kind = Literal["text", "json", "calls", "free"]
"""How a reply is graded: letter by letter, as a JSON object, as tool calls, or not at all."""

UNGRADED = frozenset({"random"})
"""Tasks without a right reply: what drafts do on them is reported, nothing else."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question: the prompt as token ids, and the text of the reply after it.

    The reply is what the template makes of the right answer, from the end of the prompt up to the
    token that ends the turn, which is left out. `reading` is how the family's parser reads replies.
    """

    task: str
    seed: int
    kind: Kind
    prompt: tuple[int, ...]
    reply: str
    reading: Reading = PLAIN


class Dialect:
    """A model's own template and tokenizer, which turn dialogues into cases.

    `ends` are the tokens that end a turn.
    """

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer(directory)
        template = ChatTemplate.of_model(directory, self.tokenizer)
        if template is None:
            raise Refused(f"{directory} has no chat template, so nothing can be asked of it")
        self.template = template
        self.ends = _end_tokens(directory, self.tokenizer)
        self._end_texts = tuple(self.tokenizer.token_text(token) for token in self.ends)

    def case(self, task: str, seed: int, *, scale: int = 1) -> Case:
        """The held-out dialogue of `seed`, asked for its last reply."""
        return self.of(make(task, seed, split="heldout", scale=scale), seed)

    def of(self, dialogue: Dialogue, seed: int = 0) -> Case:
        """The case of one dialogue."""
        asked = self._render(dialogue, whole=False)
        prompt, whole = asked.text, self._render(dialogue, whole=True).text
        if not whole.startswith(prompt):
            raise Refused(
                f"the chat template renders a reply of {dialogue.task} otherwise than it asks for"
                " one: there is nothing to compare with"
            )
        reply = whole[len(prompt) :]
        for end in self._end_texts:
            bare = reply.rstrip("\n")
            if bare.endswith(end):
                reply = bare.removesuffix(end)
        return Case(
            task=dialogue.task,
            seed=seed,
            kind=_kind(dialogue),
            prompt=tuple(self.tokenizer.encode(prompt, add_special_tokens=False)),
            reply=reply,
            reading=self._reading(dialogue, asked.in_reasoning),
        )

    def prompt(self, dialogue: Dialogue) -> str:
        """The text up to where the last reply begins."""
        return self._render(dialogue, whole=False).text

    def spoken(self, tokens: tuple[int, ...]) -> str:
        """The text of generated tokens without the one that ended the turn."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        for end in self._end_texts:
            text = text.removesuffix(end)
        return text

    def _reading(self, dialogue: Dialogue, in_reasoning: bool) -> Reading:
        """Of text: there are no tokens, so all markers are found in it."""
        known = self.template.dialect
        if known is None:
            return PLAIN
        tools = tuple(Tool.of(tool["function"]) for tool in dialogue.tools)
        return Reading(replace(known, tokens={}, written=known.family.markers), in_reasoning, tools)

    def _render(self, dialogue: Dialogue, *, whole: bool) -> Prompt:
        extra: dict[str, Any] = {"enable_thinking": dialogue.effort != "low"}
        if dialogue.effort is not None:
            extra["reasoning_effort"] = dialogue.effort
        return self.template.render(
            dialogue.messages if whole else dialogue.prompt,
            tools=dialogue.tools or None,
            add_generation_prompt=not whole,
            extra=extra,
        )


def _kind(dialogue: Dialogue) -> Kind:
    if dialogue.task in UNGRADED:
        return "free"
    if dialogue.messages[-1].get("tool_calls"):
        return "calls"
    return "json" if dialogue.task == "json" else "text"


def _end_tokens(directory: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end a turn: of generation_config.json, else the tokenizer's own."""
    path = directory / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = tokenizer.token_id(tokenizer.named("eos_token") or "")
    return (found,) if isinstance(found, int) else tuple(found or ())
