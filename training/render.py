"""Dialogues to token ids through the bundled chat template, with the positions to learn marked.

Knows the template, the tokenizer file and the turn tokens; knows no model.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import jinja2
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from millpond.tasks import Dialogue

BUNDLE = Path(__file__).parents[1] / "millpond" / "bundled" / "millpond-tiny-glm"


def load_template(path: Path = BUNDLE / "chat_template.jinja") -> jinja2.Template:
    """The chat template, compiled the way chat clients compile it."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value, ensure_ascii=False: json.dumps(
        value, ensure_ascii=ensure_ascii
    )
    return env.from_string(path.read_text(encoding="utf-8"))


def render(template: jinja2.Template, dialogue: Dialogue, *, prompt_only: bool = False) -> str:
    """The dialogue as text; `prompt_only` stops where the last reply would begin."""
    return template.render(
        messages=dialogue.prompt if prompt_only else dialogue.messages,
        tools=dialogue.tools or None,
        add_generation_prompt=prompt_only,
        **({"reasoning_effort": dialogue.effort} if dialogue.effort else {}),
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """One dialogue as tokens.

    `learn[i]` is true when token i is produced by the model (the end-of-turn token included);
    `cut` is the index of the token before which a trainer may clear the state, or -1.
    """

    task: str
    ids: np.ndarray
    learn: np.ndarray
    recurrent: bool
    cut: int


class Encoder:
    """Turns dialogues into samples."""

    def __init__(self, bundle: Path = BUNDLE) -> None:
        self.template = load_template(bundle / "chat_template.jinja")
        self.tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
        token = self.tokenizer.token_to_id
        self.assistant, self.think = token("<|assistant|>"), token("<think>")
        self.end = {"user": token("<|user|>"), "tool": token("<|observation|>")}
        self.roles = {*self.end.values(), token("<|system|>"), self.assistant}

    def __call__(self, dialogue: Dialogue) -> Sample:
        """The sample of one dialogue, closed by the role token that ends its last turn."""
        text = render(self.template, dialogue)
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
        cut = -1
        if dialogue.cut is not None:
            place = text.rfind(dialogue.cut)
            cut = next(i for i, (_, stop) in enumerate(encoding.offsets) if stop > place)
        return Sample(dialogue.task, ids, learn, dialogue.recurrent, cut)
