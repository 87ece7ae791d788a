"""Dialogues as the models' own prompts, with the reply the template would have made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millpond.errors import Refused
from millpond.evaluate import Dialect
from millpond.evaluate.grading import is_right, parses
from millpond.front.directory import BUNDLED
from millpond.tasks import make, task_names

MODELS = sorted(p.name for p in BUNDLED.iterdir() if (p / "tokenizer.json").is_file())


@pytest.fixture(scope="module", params=MODELS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return Dialect(BUNDLED / request.param)


@pytest.mark.parametrize("task", task_names())
def test_the_right_reply_is_right_in_every_task(dialect: Dialect, task: str) -> None:
    for seed in range(6):
        case = dialect.case(task, seed)
        assert case.reply
        assert is_right(case, case.reply) is (None if task == "random" else True)
        assert parses(case, case.reply) in (None, True)
        assert not any(dialect.tokenizer.token_text(end) in case.reply for end in dialect.ends)


def test_prompt_and_reply_are_the_whole_dialogue(dialect: Dialect) -> None:
    dialogue = make("recall", 3)
    case = dialect.of(dialogue, 3)
    text = dialect.tokenizer.decode(case.prompt, skip_special_tokens=False)
    assert text == dialect.prompt(dialogue)
    assert case.reply.endswith(dialogue.answer)
    assert all(str(m["content"]) in text for m in dialogue.messages[:-1] if m["role"] == "user")


def test_the_token_that_ends_a_turn_is_not_said(dialect: Dialect) -> None:
    case = dialect.case("arithmetic", 1)
    tokens = dialect.tokenizer.encode(case.reply, add_special_tokens=False)
    for end in dialect.ends:
        assert dialect.spoken((*tokens, end)) == case.reply


def test_a_model_without_a_template_cannot_be_asked(tmp_path: Path) -> None:
    source = BUNDLED / MODELS[0]
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    with pytest.raises(Refused, match="no chat template"):
        Dialect(tmp_path)
