"""`millpond chat`: one question, or a conversation with history, in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Protocol

from rich.console import Console
from rich.text import Text

from millpond.config import GenerationConfig
from millpond.errors import MillpondError
from millpond.front.pipeline import Response

HELP = """\
/help          this text
/reset         forget the conversation
/system TEXT   set the system message and forget the conversation
/reasoning     show or hide the think block
/quit          leave, as does the end of input"""


class Partner(Protocol):
    """A model to talk to, here or behind a server."""

    @property
    def name(self) -> str:
        """What it is called."""

    def stream_infer(
        self, messages: list[dict[str, str]], wish: GenerationConfig, /
    ) -> Iterator[Response]:
        """What its answer gains, as it comes. Raises `MillpondError`."""


def ask(
    pipe: Partner, question: str, wish: GenerationConfig, *, system: str | None, reasoning: bool
) -> int:
    """Print the answer to one question as it comes. Returns an exit status."""
    chat = Chat(pipe, wish, system=system, reasoning=reasoning)
    return 0 if chat.turn(question) else 1


class Chat:
    """A conversation. What is typed goes in by `turn` and `command`; answers go to `console`."""

    def __init__(
        self,
        pipe: Partner,
        wish: GenerationConfig,
        *,
        system: str | None = None,
        reasoning: bool = False,
        console: Console | None = None,
    ) -> None:
        self._pipe, self._wish = pipe, wish
        self._system, self._reasoning = system, reasoning
        self._console = console or Console(highlight=False, soft_wrap=True)
        self.messages: list[dict[str, str]] = []

    def run(self, read: Callable[[str], str] = input) -> int:
        """Read lines until /quit or the end of input."""
        with suppress(ImportError):
            import_module("readline")  # gives `input` editing and history where there is one
        self._note(f"{self._pipe.name}. /help lists the commands, /quit leaves.")
        while True:
            try:
                line = read("> ").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                self._note("")
                continue
            if line in ("/quit", "/exit"):
                return 0
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.turn(line)

    def command(self, line: str) -> None:
        """Carry out a line that begins with a slash."""
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self.messages.clear()
            self._note("forgotten")
        elif name == "/system":
            self._system = rest or None
            self.messages.clear()
            self._note("system message set" if rest else "no system message")
        elif name == "/reasoning":
            self._reasoning = not self._reasoning
            self._note(f"reasoning {'shown' if self._reasoning else 'hidden'}")
        else:
            self._note(HELP)

    def turn(self, text: str) -> bool:
        """Answer `text` with the conversation so far; False, and nothing kept, on an error."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*system, *self.messages, {"role": "user", "content": text}]
        begin = time.perf_counter()
        pieces: list[Response] = []
        try:
            with suppress(KeyboardInterrupt):  # an answer that was cut short is kept as it is
                for piece in self._pipe.stream_infer(messages, self._wish):
                    pieces.append(piece)
                    self._show(piece)
        except MillpondError as error:
            self._console.print()
            self._note(f"error: {error}")
            return False
        self._console.print()
        answer = {"role": "assistant", "content": "".join(p.text for p in pieces)}
        if reasoning := "".join(p.reasoning_text for p in pieces):
            answer["reasoning_content"] = reasoning
        self.messages += [{"role": "user", "content": text}, answer]
        self._tell(pieces, time.perf_counter() - begin)
        return True

    def _show(self, piece: Response) -> None:
        if self._reasoning and piece.reasoning_text:
            self._console.print(Text(piece.reasoning_text, style="dim"), end="")
        if piece.text:
            self._console.print(Text(piece.text), end="")

    def _tell(self, pieces: Sequence[Response], seconds: float) -> None:
        if pieces and sys.stderr.isatty():
            self._note(told(pieces[-1], seconds))

    def _note(self, text: str) -> None:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text(text, style="dim"))


def told(last: Response, seconds: float) -> str:
    """What an answer that took `seconds` cost and was spared, by its last piece."""
    rate = last.completion_tokens / seconds if seconds else 0.0
    parts = [
        f"{last.completion_tokens} tokens, {rate:.0f} a second",
        f"{last.cached_tokens} of {last.prompt_tokens} prompt tokens cached",
    ]
    if last.drafted_tokens:
        parts.append(f"{last.accepted_tokens} of {last.drafted_tokens} drafts accepted")
    if last.finish_reason == "length":
        parts.append("cut at the length limit")
    return "; ".join(parts)
