"""The dialogue record every task returns and the small builders tasks share.

Knows the shape of chat messages; does not know how a template renders them.
"""

from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One chat with a single right reply in every assistant turn.

    `recurrent` asks a trainer to hide far attention, so that the answer must come from the
    recurrent state; `cut` names the last question of a chat whose answer must come from
    attention, so that a trainer can clear the state right before it. `given_thought` says that the
    last think block is not the model's to learn: it is wrong, and the answer follows it.
    """

    task: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    effort: str | None = None
    recurrent: bool = False
    cut: str | None = None
    given_thought: bool = False

    @property
    def answer(self) -> str:
        """Content of the last assistant turn."""
        return str(self.messages[-1].get("content", ""))

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Everything before the last assistant turn: what a client would send."""
        return self.messages[:-1]


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "") -> Message:
    """An assistant message; `reasoning` fills its think block."""
    return {"role": "assistant", "reasoning_content": reasoning, "content": text}
