"""A model's directory as the doors need it: where it is, its tokenizer, template and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import millpond
from millpond.errors import Refused, Rejected
from millpond.front.chat import ChatTemplate
from millpond.front.sampling import Defaults
from millpond.front.text import Tokenizer

BUNDLED = Path(millpond.__file__).parent / "bundled"
DEFAULT_MODEL = "millpond-tiny-glm"


def locate(model: str | Path | None) -> Path:
    """The directory of a model, named or bundled. Raises `Refused` naming what there is."""
    path = Path(model or DEFAULT_MODEL).expanduser()
    bundled = BUNDLED / path
    for directory in (path, bundled):
        if (directory / "config.json").is_file():
            return directory.resolve()
    names = ", ".join(sorted(p.name for p in BUNDLED.iterdir() if (p / "config.json").is_file()))
    if path.is_dir():
        raise Refused(f"{path} holds no config.json: it is not a model in the Hugging Face layout")
    raise Refused(f"no model at {path}: neither a directory nor one of the bundled {names}")


@dataclass(frozen=True, slots=True)
class Texts:
    """What turns a model's tokens into text and back."""

    directory: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: Defaults

    @classmethod
    def read(cls, directory: Path, chat_template: str | Path | None = None) -> Texts:
        """From a directory; a template handed in replaces the model's own. Raises `Refused`."""
        tokenizer = Tokenizer(directory)
        template = _template(chat_template, directory, tokenizer)
        return cls(directory, tokenizer, template, Defaults.of_model(directory))

    def fit(self, vocab_size: int) -> None:
        """Raise `Refused` when the model of this directory has fewer tokens than its tokenizer."""
        if self.tokenizer.vocab_size > vocab_size:
            raise Refused(
                f"{self.directory}: the tokenizer has {self.tokenizer.vocab_size} tokens, the "
                f"model only {vocab_size}: they do not belong together"
            )

    def shortest_chat(self) -> int | None:
        """Tokens of the shortest prompt that is a chat; None where no chat can be rendered."""
        if self.template is None:
            return None
        try:
            prompt = self.template.render([{"role": "user", "content": "?"}])
        except Rejected:
            return None
        return len(prompt.encode(self.tokenizer))


def _template(
    given: str | Path | None, directory: Path, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """The template handed in, as a file or as text, or the model's own."""
    if given is None:
        return ChatTemplate.of_model(directory, tokenizer)
    text = str(given)
    if "{" in text:
        return ChatTemplate(text, tokenizer)
    try:
        return ChatTemplate(Path(text).read_text("utf-8"), tokenizer)
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read the chat template {text}: {error}") from error
