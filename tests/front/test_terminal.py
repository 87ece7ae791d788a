"""The conversation in the terminal, and the doctor's tables."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from rich.console import Console

from millpond import GenerationConfig, Pipeline, PytorchEngineConfig, SpeculativeConfig
from millpond.errors import Rejected
from millpond.front import doctor, terminal
from millpond.front.cli import main
from millpond.front.compose import plan_model
from millpond.front.distant import Distant
from millpond.front.guard import Limits
from millpond.front.load.wire import Target
from millpond.front.pipeline import Response
from millpond.front.plan import line, table
from millpond.front.server import Options
from millpond.front.terminal import Chat, Partner, told
from millpond.front.text import Tokenizer
from tests.front.conftest import BUNDLED, Running, make_service, wait_for
from tests.support.published import glm_flash

WISH = GenerationConfig(max_new_tokens=64)
ASKED = {"role": "user", "content": "one"}


@pytest.fixture
def pipe(tokenizer: Tokenizer) -> Iterator[Pipeline]:
    with Pipeline(make_service(tokenizer, "Add.</think>4 [b]é[/b].")) as made:
        yield made


def talk(pipe: Partner, *lines: str, **options: object) -> tuple[str, Chat]:
    out = io.StringIO()
    chat = Chat(pipe, WISH, console=Console(file=out, soft_wrap=True), **options)  # type: ignore[arg-type]
    typed = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    assert chat.run(read) == 0
    return out.getvalue(), chat


def test_a_conversation_keeps_its_history(pipe):
    out, chat = talk(pipe, "one", "", "two", "/quit", "never read")
    assert out == "4 [b]é[/b].\n" * 2  # not read as markup
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    assert chat.messages[1]["reasoning_content"] == "Add."
    first, second = pipe.service.engine.requests
    assert second.tokens[: len(first.tokens)] == first.tokens


def test_commands_are_not_sent_to_the_model(pipe, capsys):
    out, chat = talk(pipe, "/help", "/reasoning", "one", "/reset", "/system Be brief.", "/nonsense")
    assert out == "Add.4 [b]é[/b].\n"
    assert chat.messages == []
    assert len(pipe.service.engine.requests) == 1
    assert "/quit" in capsys.readouterr().err


def test_a_system_message_leads(pipe):
    talk(pipe, "/system Be brief.", "one")
    prompt = pipe.tokenizer.decode(
        pipe.service.engine.requests[0].tokens, skip_special_tokens=False
    )
    assert "<|system|>Be brief.<|user|>one" in prompt


def test_an_error_is_told_and_forgotten(pipe, capsys):
    pipe.service.engine.fault = "not finite"
    _, chat = talk(pipe, "one")
    assert chat.messages == []
    assert "not finite" in capsys.readouterr().err


def test_what_an_answer_cost_and_was_spared_is_told():
    last = Response(
        text="", token_ids=(), finish_reason="stop", prompt_tokens=90, completion_tokens=30,
        cached_tokens=64,
    )  # fmt: skip
    assert told(last, 2.0) == "30 tokens, 15 a second; 64 of 90 prompt tokens cached"
    drafts = replace(last, drafted_tokens=20, accepted_tokens=13, finish_reason="length")
    assert told(drafts, 0.0).endswith("; 13 of 20 drafts accepted; cut at the length limit")


def test_one_question_prints_one_answer(pipe, capsys):
    assert terminal.ask(pipe, "one", WISH, system=None, reasoning=False) == 0
    assert capsys.readouterr().out == "4 [b]é[/b].\n"
    pipe.service.engine.fault = "no"
    assert terminal.ask(pipe, "one", WISH, system=None, reasoning=False) == 1


# The same, with a server.


@pytest.fixture
def distant(serve) -> Iterator[tuple[Distant, Running]]:
    server = serve("Add.</think>4 [b]é[/b].")
    with closing(Distant(Target(server.url))) as made:
        yield made, server


def test_a_conversation_with_a_server_is_the_same(distant, capsys):
    there, server = distant
    out, chat = talk(there, "/reasoning", "one", "/reasoning", "two")
    assert out == "Add.4 [b]é[/b].\n4 [b]é[/b].\n"
    assert chat.messages[1]["reasoning_content"] == "Add."
    first, second = server.service.engine.requests
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert first.params.temperature == 0
    assert "tiny. /help" in capsys.readouterr().err


def test_what_an_answer_of_a_server_cost_is_told_alike(distant):
    there, server = distant
    here = list(Pipeline(server.service).stream_infer([ASKED], WISH))[-1]
    last = list(there.stream_infer([ASKED], WISH))[-1]
    assert told(last, 2.0) == told(here, 2.0)
    cut = WISH.model_copy(update={"max_new_tokens": 3})
    assert told(list(there.stream_infer([ASKED], cut))[-1], 0.0).endswith("cut at the length limit")


def test_an_answer_that_is_left_is_ended_at_the_server(distant):
    there, server = distant
    server.service.engine.pause = 0.05
    endless = WISH.model_copy(update={"max_new_tokens": 400, "ignore_eos": True})
    for _ in there.stream_infer([ASKED], endless):
        break
    wait_for(lambda: len(server.service.engine.aborted) == 1)
    server.service.engine.pause = 0.0
    assert "".join(p.text for p in there.stream_infer([ASKED], WISH)) == "4 [b]é[/b]."


def test_what_a_server_refuses_or_fails_at_is_told_and_forgotten(distant, capsys):
    there, server = distant
    server.service.engine.fault = "not finite"
    _, chat = talk(there, "one")
    server.service.engine.refuse = Rejected("too hot")
    _, other = talk(there, "one")
    assert chat.messages == other.messages == []
    err = capsys.readouterr().err
    assert "not finite" in err
    assert "too hot" in err


def test_chat_finds_its_server_by_an_address_and_a_key(serve, capsys):
    server = serve("no</think>yes", options=Options(limits=Limits(keys=("k",))))
    words = ["chat", "one", "--url", server.url]
    assert main([*words, "--api-key", "k"]) == 0
    assert capsys.readouterr().out == "yes\n"
    assert main(words) == 1
    assert "API key" in capsys.readouterr().err
    assert main(["chat", "one", "--url", "http://127.0.0.1:9"]) == 1
    assert "no model answers at http://127.0.0.1:9" in capsys.readouterr().err


# The doctor.


def test_the_plan_says_what_fits_and_what_can_be_reused():
    planned = plan_model(None, PytorchEngineConfig(max_batch_size=4, prefill_save_alignment=512))
    out = io.StringIO()
    Console(file=out, width=120).print(table(planned.resolved, planned.facts))
    for text in (out.getvalue(), line(planned.resolved, planned.facts)):
        assert "512 tokens" in text
        assert "millpond-tiny-glm" in text
        assert "8192" in text.replace(",", "")
    assert "weights" in out.getvalue()


def test_the_doctor_needs_no_more_than_a_configuration(tmp_path, capsys):
    path = tmp_path / "big" / "other-name.json"
    path.parent.mkdir()
    path.write_text((BUNDLED / "config.json").read_text())
    assert doctor.run(str(path), PytorchEngineConfig()) == 0
    out = capsys.readouterr().out
    assert "big on cpu" in out
    assert "verdict" in out


def test_the_doctor_tells_what_a_sequence_takes_with_drafts(tmp_path, capsys):
    """One state however many drafts: 140.8 MiB, and rings of raw inputs in the seat."""
    path = tmp_path / "flash" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(glm_flash()))
    config = PytorchEngineConfig(dtype="bfloat16", cache_memory="400GiB")
    assert doctor.run(str(path), config, SpeculativeConfig(num_speculative_tokens=1)) == 0
    said = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines()]
    told = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in said if len(row) == 5}
    assert told == {
        "0": ["140.8 MiB", "24.0 KiB", "140.8 MiB", "140.8 MiB"],
        "1": ["140.8 MiB", "4.3 MiB", "145.1 MiB", "281.6 MiB"],
        "3": ["140.8 MiB", "12.9 MiB", "153.7 MiB", "563.2 MiB"],
        "5": ["140.8 MiB", "21.4 MiB", "162.2 MiB", "844.7 MiB"],
    }


def test_the_doctor_of_a_gpu_says_where_compiled_kernels_are(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(doctor, "kernel_cache", lambda: tmp_path / "kernels")

    def told() -> str:
        out = io.StringIO()
        Console(file=out, width=200).print(doctor.environment())
        return next(line for line in out.getvalue().splitlines() if "compiled kernels" in line)

    assert str(tmp_path / "kernels") in told()
    assert "a slow start" in told()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "one").touch()
    assert "ok" in told()


def test_the_doctor_says_why_a_model_cannot_be_served(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "unheard_of"}))
    assert doctor.run(str(path), PytorchEngineConfig()) == 1
    assert "unheard_of" in capsys.readouterr().out
    assert doctor.run(None, PytorchEngineConfig(tp=2)) == 1
    assert "tp=2" in capsys.readouterr().out


def test_the_doctor_judges_every_flag_it_is_given(monkeypatch):
    """What `serve` would refuse or count, the doctor is told too."""
    seen: list[object] = []
    monkeypatch.setattr(doctor, "run", lambda *given: seen.extend(given) or 0)
    drafts = ["--speculative-algorithm", "deepseek_mtp", "--speculative-num-draft-tokens", "3"]
    assert main(["doctor", "--model", "here", "--max-batch-size", "3", *drafts]) == 0
    assert seen == [
        "here",
        PytorchEngineConfig(max_batch_size=3),
        SpeculativeConfig(method="deepseek_mtp", num_speculative_tokens=3),
    ]
