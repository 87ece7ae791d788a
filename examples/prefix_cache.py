"""Shows what prefix caching saves: one long prompt cold, then prompts that share its beginning.

    python examples/prefix_cache.py [MODEL]

Prints, for each prompt, how many of its tokens were not computed again and the time to the first
token. MODEL is a directory in the Hugging Face layout; the default is the bundled model.
"""

from __future__ import annotations

import sys
import time

from millpond import GenerationConfig, PytorchEngineConfig, pipeline

FACTS = 120
"""Lines of the shared beginning; enough for several thousand tokens of the bundled model."""


def long_document() -> str:
    """The shared beginning: a list of facts."""
    shelves = (f"Shelf {n} holds {7 * n % 83} books and {5 * n % 31} maps." for n in range(FACTS))
    return "Read this list.\n" + "\n".join(shelves)


def ask(pipe, question: str) -> tuple[int, int, float, str]:
    """Prompt tokens, cached tokens, seconds to the first piece, and the text."""
    begin = time.perf_counter()
    first, pieces, last = None, [], None
    greedy = GenerationConfig(max_new_tokens=16, do_sample=False)
    for piece in pipe.stream_infer(question, gen_config=greedy):
        first = first or time.perf_counter() - begin
        pieces.append(piece.text)
        last = piece
    assert last is not None
    assert first is not None
    return last.prompt_tokens, last.cached_tokens, first, "".join(pieces)


def main(arguments: list[str]) -> None:
    """Ask three questions about one document; the first one pays for it."""
    document = long_document()
    questions = (
        ("cold", f"{document}\nHow many books does shelf 3 hold?"),
        ("same prompt", f"{document}\nHow many books does shelf 3 hold?"),
        ("other question", f"{document}\nHow many maps does shelf 9 hold?"),
    )
    # A checkpoint every 512 tokens, so that a question about the same document starts near its end.
    config = PytorchEngineConfig(session_len=8192, max_batch_size=4, checkpoint_interval=512)
    with pipeline(*arguments[:1], backend_config=config) as pipe:
        pipe("Hello.", gen_config=GenerationConfig(max_new_tokens=1, do_sample=False))  # warm up
        print(f"{'prompt':<16}{'tokens':>8}{'cached':>8}{'first token':>14}")
        for name, question in questions:
            tokens, cached, seconds, _ = ask(pipe, question)
            print(f"{name:<16}{tokens:>8}{cached:>8}{1000 * seconds:>11.0f} ms")


if __name__ == "__main__":
    main(sys.argv[1:])
