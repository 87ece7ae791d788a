"""Dialogues to token ids through a bundled chat template, with the positions to learn marked.

Knows templates, tokenizer files and turn tokens; knows no model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import jinja2
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from millpond.tasks import Dialogue

_BUNDLED = Path(__file__).parents[1] / "millpond" / "bundled"
GLM_BUNDLE = _BUNDLED / "millpond-tiny-glm"
QWEN_BUNDLE = _BUNDLED / "millpond-tiny-qwen"


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def load_template(path: Path) -> jinja2.Template:
    """The chat template, compiled the way chat clients compile it."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value, ensure_ascii=False: json.dumps(
        value, ensure_ascii=ensure_ascii
    )
    env.globals["raise_exception"] = _refuse
    return env.from_string(path.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Sample:
    """One dialogue as tokens.

    `learn[i]` is true when token i is produced by the model (the end-of-turn token included);
    `cut` is the index of the token before which a trainer may clear the state, or -1. The
    tokens `given` are of a wrong thought: nothing of them is learned, not even as text.
    """

    task: str
    ids: np.ndarray
    learn: np.ndarray
    recurrent: bool
    cut: int
    given: tuple[int, int] = (0, 0)


class Encoder(Protocol):
    """Turns dialogues into samples; `pad` fills what is left of a row."""

    tokenizer: Tokenizer
    pad: int

    def text(self, dialogue: Dialogue, *, prompt_only: bool = False) -> str:
        """The dialogue as text; `prompt_only` stops where the last reply would begin."""
        ...

    def __call__(self, dialogue: Dialogue) -> Sample:
        """The sample of one dialogue."""
        ...


def glm_text(template: jinja2.Template, dialogue: Dialogue, *, prompt_only: bool = False) -> str:
    """glm5_next: the effort is the template's own."""
    return template.render(
        messages=dialogue.prompt if prompt_only else dialogue.messages,
        tools=dialogue.tools or None,
        add_generation_prompt=prompt_only,
        **({"reasoning_effort": dialogue.effort} if dialogue.effort else {}),
    )


def qwen_text(template: jinja2.Template, dialogue: Dialogue, *, prompt_only: bool = False) -> str:
    """qwen3_5: effort `low` is thinking switched off."""
    return template.render(
        messages=dialogue.prompt if prompt_only else dialogue.messages,
        tools=dialogue.tools or None,
        add_generation_prompt=prompt_only,
        enable_thinking=dialogue.effort != "low",
    )


class GlmEncoder:
    """glm5_next: a reply begins after the opened think block and ends with the next role token."""

    def __init__(self, bundle: Path = GLM_BUNDLE) -> None:
        self.template = load_template(bundle / "chat_template.jinja")
        self.tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
        token = self.tokenizer.token_to_id
        self.assistant, self.think = token("<|assistant|>"), token("<think>")
        self.thought = token("</think>")
        self.end = {"user": token("<|user|>"), "tool": token("<|observation|>")}
        self.pad = self.end["user"]
        self.roles = {*self.end.values(), token("<|system|>"), self.assistant}

    def text(self, dialogue: Dialogue, *, prompt_only: bool = False) -> str:
        """The dialogue as text; `prompt_only` stops where the last reply would begin."""
        return glm_text(self.template, dialogue, prompt_only=prompt_only)

    def __call__(self, dialogue: Dialogue) -> Sample:
        """The sample of one dialogue, closed by the role token that ends its last turn."""
        text = self.text(dialogue)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        closing = self.end["tool" if dialogue.messages[-1].get("tool_calls") else "user"]
        ids = np.array([*encoding.ids, closing], dtype=np.int32)
        learn = np.zeros(len(ids), dtype=bool)
        replying = False
        for index, token in enumerate(ids):
            if replying:
                learn[index] = True
            if token in self.roles:
                replying = False
            if token == self.think and index and ids[index - 1] == self.assistant:
                replying = True
        given = (0, 0)
        if dialogue.given_thought:
            given = _last_thought(ids, self.think, self.thought)
            learn[: given[1]] = False
        cut = -1
        if dialogue.cut is not None:
            place = text.rfind(dialogue.cut)
            cut = next(i for i, (_, stop) in enumerate(encoding.offsets) if stop > place)
        return Sample(dialogue.task, ids, learn, dialogue.recurrent, cut, given)


class QwenEncoder:
    """qwen3_5: ChatML; prompt and reply are encoded apart, as they are when the model is served.

    With thinking switched off the empty think block belongs to the prompt.
    """

    _OPENING, _CLOSING = "<|im_start|>assistant\n", "<|im_end|>"
    _THINK, _NO_THINK = "<think>\n", "<think>\n\n</think>\n\n"

    def __init__(self, bundle: Path = QWEN_BUNDLE) -> None:
        self.template = load_template(bundle / "chat_template.jinja")
        self.tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
        self.pad = self.tokenizer.token_to_id("<|endoftext|>")
        self.think = self.tokenizer.token_to_id("<think>")
        self.thought = self.tokenizer.token_to_id("</think>")

    def text(self, dialogue: Dialogue, *, prompt_only: bool = False) -> str:
        """The dialogue as text; `prompt_only` stops where the last reply would begin."""
        return qwen_text(self.template, dialogue, prompt_only=prompt_only)

    def _pieces(self, text: str, thinking: bool) -> list[tuple[str, bool]]:
        """The text in turns of (what is given, what the model says, what is given, ...)."""
        pieces: list[tuple[str, bool]] = []
        at = 0
        while (found := text.find(self._OPENING, at)) >= 0:
            start = found + len(self._OPENING)
            prefix = self._THINK if thinking else self._NO_THINK
            if text.startswith(prefix, start):
                start += len(prefix)
            stop = text.index(self._CLOSING, start) + len(self._CLOSING)
            pieces += [(text[at:start], False), (text[start:stop], True)]
            at = stop
        return [*pieces, (text[at:], False)]

    def __call__(self, dialogue: Dialogue) -> Sample:
        """The sample of one dialogue, closed by the token that ends its last turn."""
        text = self.text(dialogue).rstrip("\n")
        place = -1 if dialogue.cut is None else text.rfind(dialogue.cut)
        ids: list[int] = []
        learn: list[bool] = []
        cut, at = -1, 0
        for piece, said in self._pieces(text, dialogue.effort != "low"):
            encoding = self.tokenizer.encode(piece, add_special_tokens=False)
            if at <= place < at + len(piece):
                inside = enumerate(encoding.offsets)
                cut = len(ids) + next(i for i, (_, stop) in inside if stop > place - at)
            ids += encoding.ids
            learn += [said] * len(encoding.ids)
            at += len(piece)
        tokens, learned, given = np.array(ids, dtype=np.int32), np.array(learn), (0, 0)
        if dialogue.given_thought:
            given = _last_thought(tokens, self.think, self.thought)
            learned[: given[1]] = False
        return Sample(dialogue.task, tokens, learned, dialogue.recurrent, cut, given)


def _last_thought(ids: np.ndarray, opening: int, closing: int) -> tuple[int, int]:
    """What lies between the tokens of the last think block, the closing one included."""
    starts, stops = np.flatnonzero(ids == opening), np.flatnonzero(ids == closing)
    return int(starts[-1]) + 1, int(stops[-1]) + 1
