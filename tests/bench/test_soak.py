"""Mixed traffic with aborts finds nothing wrong in a sound engine, and what is planted in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.engine import soak
from bench.engine.timed import Timed
from bench.engine.tower import Need, Tower, build
from bench.engine.traffic import Draw
from millpond.engine.ledger import Ledger
from millpond.engine.request import Sequence
from millpond.plan.step import Launched, StepPlan
from millpond.runtime.graphs import CallAgain

LONGEST = 256


@pytest.fixture
def tower() -> Tower:
    session = LONGEST + LONGEST // 8 + 64
    need = Need(
        seats=soak.SEATS,
        session=session,
        tokens=2 * session,
        checkpoints=soak.CHECKPOINTS,
        drafts=1,
    )
    return build("tiny-q4", need, device="cpu", debug_poison=True)


def wrong(tower: Tower, mode: str = "interior", requests: int = 24) -> dict[str, int]:
    found = soak.soak(tower, mode, requests, longest=LONGEST, limit=60.0)
    assert found["requests"] == requests
    assert found["finished"]["length"] > requests // 2
    assert found["finished"]["abort"] > 0
    assert (found["published"] > 0) == (mode != "off")
    return found["wrong"]


@pytest.mark.parametrize("mode", soak.MODES)
def test_a_sound_engine_has_nothing_wrong(tower: Tower, mode: str) -> None:
    assert wrong(tower, mode) == {}


def test_a_sound_engine_has_nothing_wrong_when_steps_are_replayed_two_in_flight(
    tower: Tower,
) -> None:
    """As on a GPU, whose recordings a CPU calls again."""
    known, capabilities = tower.worker, tower.worker.capabilities
    tower.worker = known._like_this(
        num_slots=capabilities.num_slots,
        num_pages=capabilities.num_pages,
        num_seats=capabilities.num_seats,
        debug_poison=True,
        runs_ahead=True,
    )
    tower.worker.runner.capture(capturer=CallAgain())
    assert wrong(tower) == {}
    assert tower.worker.runner.num_replays > 0


def test_what_a_file_tells_of_is_not_asked_again(tmp_path: Path) -> None:
    kinds = ((0, "off"), (0, "interior"), (3, "off"))
    file = tmp_path / "soak.jsonl"
    assert soak.to_ask(file, "q4", kinds, 30) == dict.fromkeys(kinds, (10, 0))
    told = [
        ("q4", 0, "off", 4),
        ("q4", 0, "off", 3),
        ("q4", 0, "interior", 10),
        ("g8", 3, "off", 9),
    ]
    file.write_text(
        "".join(
            json.dumps(dict(kind="soak", model=model, drafts=drafts, mode=mode, requests=count))
            + "\n"
            for model, drafts, mode, count in told
        )
    )
    assert soak.to_ask(file, "q4", kinds, 30) == {(0, "off"): (3, 2), (3, "off"): (10, 0)}


def test_a_saved_state_that_is_not_finite_is_seen(
    tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Timed.launch

    def damaging(timed: Timed, plan: StepPlan) -> Launched:
        launched = launch(timed, plan)
        state = tower.worker.runner.arenas.slots.view(1, "recurrent")
        for export in [e for row in plan.prefill for e in row.exports][:1]:
            state[export.slot, 0, 0, 0] = float("nan")
        return launched

    monkeypatch.setattr(Timed, "launch", damaging)
    assert "a state that is not finite when published" in wrong(tower)


def test_pages_that_are_not_given_back_are_missed(
    tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    vacate = Ledger.vacate

    def forgetful(ledger: Ledger, sequence: Sequence) -> None:
        if sequence.pages:
            sequence.pages = sequence.pages[:-1]
        vacate(ledger, sequence)

    monkeypatch.setattr(Ledger, "vacate", forgetful)
    assert wrong(tower, "off", 12)["pages lost"] > 0


def test_an_answer_of_another_length_is_seen(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = soak.EngineRequest

    def shorter(**fields: object) -> object:
        asked = fields["params"]
        return submit(**fields | {"params": soak.SamplingParams(max_tokens=1, n=asked.n)})

    monkeypatch.setattr(soak, "EngineRequest", shorter)
    assert wrong(tower)["an answer of another length"] > 0


def test_prompts_are_of_all_lengths_and_share_beginnings() -> None:
    mixed = soak.Mixed(Draw(0, 100), soak.random.Random(0), 1000)
    prompts = [mixed.tokens() for _ in range(200)]
    lengths = sorted(len(p) for p in prompts)
    assert lengths[0] < 5
    assert 500 < lengths[-1] <= 1000
    assert sum(p[:8] == q[:8] for p in prompts[:50] for q in prompts[50:] if len(p) > 8) > 20


def test_the_command_records_every_mode(tmp_path: Path) -> None:
    file = tmp_path / "soak.jsonl"
    arguments = "--model tiny-q4 --requests 6 --drafts 0 --longest 64 --device cpu"
    assert soak.main([*arguments.split(), "--out", str(file)]) == 0
    kinds = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(k["kind"], k.get("mode")) for k in kinds] == [
        ("tower", None),
        *(("soak", mode) for mode in soak.MODES),
    ]
    assert soak.main([*arguments.split(), "--out", str(file)]) == 0
    assert len(file.read_text().splitlines()) == len(kinds)  # there is nothing left to ask
