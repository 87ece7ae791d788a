"""The workloads through real engines at tiny scale: what is asked, measured and recorded."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import peers
from bench.engine import __main__ as command
from bench.engine import kernels
from bench.engine.drive import percentile
from bench.engine.kernels import OTHER, Busy, covered, part_of, summary
from bench.engine.models import Sizes, write
from bench.engine.timed import Step, StepLog, Timed
from bench.engine.tower import Need, build, give_back, room
from bench.engine.traffic import Conversations, Draw, at_once
from bench.engine.trials import Lines, Trials, measure
from bench.engine.workloads import WORKLOADS, Scale, Variant, groups, settings
from millpond.errors import Refused
from millpond.models.base import describe
from millpond.plan.step import StepPlan
from millpond.runtime.graphs import CallAgain

TINY = Scale(0.05, 0.05)


def variant(letter: str, name: str, scale: Scale = TINY) -> Variant:
    return next(v for v in WORKLOADS[letter](scale) if v.name == name)


def measured(letter: str, name: str, model: str = "tiny-q4", scale: Scale = TINY) -> dict[str, Any]:
    one = variant(letter, name, scale)
    tower = build(model, one.need, device="cpu", forced=one.chance is not None)
    return measure(tower, one, seed=3, limit=60.0).measures()


@pytest.mark.parametrize("name", ["off", "on", "on, no hits", "on, warm"])
def test_a_shared_prefix_is_cached_where_it_can_be(name: str) -> None:
    found = measured("C", name)
    asked = variant("C", name).asked
    sharing = {"on": asked["requests"] - 1, "on, warm": asked["requests"]}.get(name, 0)
    assert found["cached_tokens"] == sharing * (asked["shared"] // 64 * 64)
    assert found["finished"] == {"length": asked["requests"]}
    assert found["short"] == 0
    assert found["output_tokens"] == asked["requests"] * asked["out"]
    assert found["wasted_tokens"] == 0
    assert found["prompt_tokens"] == asked["requests"] * asked["prompt"]
    assert found["computed_prompt_tokens"] == found["prompt_tokens"] - found["cached_tokens"]


def test_conversations_go_on_from_their_answers() -> None:
    longer = Scale(0.05, 0.1)
    found = measured("D", "on", scale=longer)
    asked = variant("D", "on", longer).asked
    assert found["requests"] == asked["conversations"] * asked["turns"]
    assert set(found["ttft_by_label_s"]) == {f"turn {t + 1}" for t in range(asked["turns"])}
    # The answer before is cached with its prompt, in whole pages, and only its last token is not.
    before = asked["more"] + asked["out"] - 1
    assert found["cached_tokens"] == asked["conversations"] * (before // 64 * 64)


def test_a_turn_begins_when_all_of_the_one_before_have_ended() -> None:
    traffic = Conversations(Draw(0, 10), count=2, turns=2, more=3, out=1)
    one, other = traffic.first()
    assert traffic.after(other, (7,)) == []
    again = traffic.after(one, (8,))
    assert [a.label for a in again] == ["turn 2"] * 2
    assert again[0].tokens[:4] == (*one.tokens, 8)
    assert again[1].tokens[:4] == (*other.tokens, 7)
    assert traffic.after(again[0], (1,)) == traffic.after(again[1], (1,)) == []


@pytest.mark.parametrize(
    "model, recorded", [("tiny-q4", True), ("tiny-q4", False), ("tiny-g8", False)]
)
def test_drafts_are_accepted_as_often_as_said(model: str, recorded: bool) -> None:
    always, never = (variant("F", f"B, 3 drafts, {chance}") for chance in (1, 0))
    tower = build(model, always.need, device="cpu", forced=True)
    if recorded:  # and recorded steps follow what is said after they were recorded
        tower.worker.runner.capture(capturer=CallAgain())
    found = measure(tower, always, seed=3, limit=60.0).measures()
    assert (found["graph_replays"] > 0) == recorded
    # What an answer has no use for at its end is not accepted by it.
    assert 0.95 <= found["accepted_tokens"] / found["draft_tokens"] <= 1
    if model == "tiny-q4":
        found = measure(tower, never, seed=3, limit=60.0).measures()
        assert found["draft_tokens"] > 0
        assert found["accepted_tokens"] == 0


def test_requests_arrive_at_their_times() -> None:
    one = variant("B", "")
    tower = build("tiny-q4", one.need, device="cpu")
    watched = tower.engine(**one.settings)
    run = watched.run(at_once(Draw(1, 512), 3, 20, 2, every=0.05))
    watched.engine.close()
    times = sorted(track.submitted - run.began for track in run.tracks)
    assert times == pytest.approx([0.0, 0.05, 0.1], abs=1e-3)
    assert all(track.first > track.submitted for track in run.tracks)


def test_a_run_out_of_time_is_broken_off_and_says_so() -> None:
    one = variant("B", "")
    found = measure(build("tiny-q4", one.need, device="cpu"), one, seed=1, limit=0.0).measures()
    assert found["cut"]
    assert found["finished"] == {"abort": 64}
    assert found["ms_per_token_at_the_end"] is None


def test_results_are_on_the_disk_as_they_come(tmp_path: Path) -> None:
    file = tmp_path / "results" / "engine.jsonl"
    arguments = "--model tiny-q4 --workloads A,D --trials 1 --scale 0.02 --shrink 0.02"
    assert command.main([*arguments.split(), "--out", str(file), "--device", "cpu"]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["tower"] + ["trial"] * 6
    assert {"commit", "machine", "versions", "date", "model", "load_s"} <= set(lines[0])
    trials = [(line["workload"], line["variant"], line["trial"]) for line in lines[1:]]
    # Variants take turns, after one repetition to warm up.
    assert trials[2:] == [("D", "off", 0), ("D", "on", 0), ("D", "off", 1), ("D", "on", 1)]


def test_a_workload_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    trials = Trials(Lines(tmp_path / "lines.jsonl"))

    def fail() -> None:
        raise ValueError("planted")

    trials.guarded("A", fail)
    trials.guarded("B", lambda: trials.lines.add("trial", workload="B"))
    kinds = [json.loads(line)["kind"] for line in trials.lines.path.read_text().splitlines()]
    assert kinds == ["error", "trial"]
    assert trials.failed == ["A"]


def test_workloads_that_fit_share_a_tower() -> None:
    variants = [v for letter in "ABCDEF" for v in WORKLOADS[letter](Scale())]
    found = [
        (need.drafts, need.session, {v.workload for v in ones}) for need, ones in groups(variants)
    ]
    assert found[0] == (0, 8192 + 128 + 8, {"A", "B", "C", "D", "F"})
    assert (0, 32770 + 32, {"E"}) in found
    assert [drafts for drafts, _, letters in found if letters == {"F"}] == [1, 3, 5]


def test_the_models_are_of_the_published_sizes(tmp_path: Path) -> None:
    q4 = Sizes.of(describe(write("q4", tmp_path)), torch.bfloat16)
    # 24 layers of 2 MiB of state and 48 KiB of window each, and one hidden vector.
    assert q4.slot == 51_511_296 + 2 * 2560
    assert q4.page == 64 * (32_768 + 4_096)
    assert q4.weights == pytest.approx(2 * (4.206e9 + 121e6), rel=2e-3)
    g8 = Sizes.of(describe(write("g8", tmp_path)), torch.bfloat16)
    assert g8.slot == 6 * 4_341_760 + 2 * 4096
    assert g8.page == 3 * 64 * (1024 + 64)
    assert 93e9 < g8.weights < 94e9  # leaves a third of 141 GB


def test_idle_time_lies_between_steps_and_before_late_ones() -> None:
    prompt = Step("mixed", late=True, launching=0.5, begin=0.0, end=4.0)
    first = Step("decode", late=True, launching=0.1, begin=5.0, end=6.0)
    ahead = Step("decode", late=False, launching=0.1, begin=6.0, end=7.0)
    late = Step("verify", late=True, launching=0.1, begin=7.3, end=8.0)
    log = StepLog([prompt, first, ahead, late])
    assert log.idle() == pytest.approx(1.3 / 8)
    # From the end of the first steady one on: a gap, and the launch of the one after it.
    assert log.idle_when_steady() == pytest.approx((0.3 + 0.1) / 2)
    assert (log.launching(True), log.launching(False)) == (pytest.approx(0.3), 0.5)
    told = {kind: (n, pytest.approx(spent)) for kind, (n, spent) in log.by_kind().items()}
    assert told == {"mixed": (1, 4.0), "decode": (2, 2.0), "verify": (1, 0.7)}
    assert StepLog().idle() is None
    assert StepLog([prompt]).idle_when_steady() is None


class Moment:
    """Stands in for an event of a stream that has come as far as `now`, in milliseconds."""

    now = 0.0
    done = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = float("nan")

    def record(self) -> None:
        Moment.now += 1.0
        self.at = Moment.now

    def query(self) -> bool:
        return Moment.done

    def synchronize(self) -> None:
        assert self.at == self.at

    def elapsed_time(self, other: Moment) -> float:
        return other.at - self.at


def test_on_a_gpu_steps_are_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    inner = SimpleNamespace(launch=lambda plan: SimpleNamespace(result=lambda: plan))
    timed = Timed(inner, torch.device("cuda"))
    for done in (False, False, True):
        monkeypatch.setattr(Moment, "done", done)
        timed.launch(StepPlan(step=1))
    assert [step.late for step in timed.log.steps] == [True, False, True]
    assert timed.log.by_kind() == {"decode": (3, pytest.approx(3e-3))}
    assert timed.log.idle() == pytest.approx(2 / 5)  # each begins a moment after the one before


def test_a_tower_has_the_pages_that_fit_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(weights=90 << 30, slot=26 << 20, page=1 << 20, seat={})
    need = Need(seats=64, session=1600, tokens=64 * 1600, checkpoints=56)
    place = torch.device("cuda")

    def left(gib: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gib << 30, 140 << 30))

    left(139)
    assert room(need, sizes, place) == (128, 1600 + 64 + 1)
    left(108)  # 128 slots take 3.25 GiB, and 14 GiB are left alone
    assert room(need, sizes, place) == (128, 768)
    left(107)
    with pytest.raises(Refused, match="no room for 1600 tokens"):
        room(need, sizes, place)


def test_kernels_that_overlap_count_once() -> None:
    step = [Busy("_up", 0, 10), Busy("nvjet_sm90", 5, 12), Busy("_up", 20, 30)]
    assert covered(step) == 22
    again = [Busy("_up", 100, 104)]  # of another step: what lies between them is neither's
    found = summary([step, again], seconds=52e-6)
    assert found["idle"] == pytest.approx(0.5)
    assert found["kernels"][0] == {"name": "_up", "per_step": 1.5, "us_per_step": 12.0}
    assert found["parts"] == {"experts": 12.0, "products": 3.5}
    assert found["launches_per_step"] == 2.0


def test_kernels_belong_to_parts_of_the_model() -> None:
    assert part_of("_up") == part_of("_down") == "experts"
    assert part_of("_fold_verify") == part_of("ready_verify") == peers.DELTA
    assert part_of("_pre") == part_of("_parts") == "streams, routers"
    assert part_of("void cublasLt::splitKreduce_kernel<32>") == "products"
    assert part_of("void at::native::vectorized_elementwise_kernel") == OTHER
    assert set(kernels.PARTS) <= set(kernels.modules().values())  # no part of what is gone
    assert kernels.modules()["_choose"] == "moe"


def test_steps_of_every_kind_are_watched_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU a stand-in tells one kernel for every launch it saw."""
    running: list[str] = []

    class Profile:
        def __init__(self, **_: object) -> None:
            running.append("watched")

        def start(self) -> None:
            pass

        def stop(self) -> None:
            running.pop()

        def events(self) -> list[object]:
            span = SimpleNamespace(start=0.0, end=3.0)
            device = torch.autograd.DeviceType.CUDA
            return [SimpleNamespace(name="_up", time_range=span, device_type=device)]

    monkeypatch.setattr(kernels, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    one = variant("F", "B, 1 drafts, 0.5")
    tower = build("tiny-q4", one.need, device="cpu", forced=True)
    kinds = measure(tower, one, 3, 60.0).log.by_kind()
    watching = kernels.KernelProfile({kind: number for kind, (number, _) in kinds.items()})
    measure(tower, one, 3, 60.0, watching)
    found = watching.found()
    assert not running
    assert {"prompt", "verify"} <= set(found)
    assert found["verify"]["steps"] == min(kernels.WATCHED, kinds["verify"][0])
    assert all(of["parts"] == {"experts": 3.0} for of in found.values())


def test_kernels_are_watched_when_all_times_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def kernels(trials: Trials, tower: object, one: Variant, kinds: dict[str, int]) -> None:
        assert kinds["decode"] > 0
        said.append(one.label)

    monkeypatch.setattr(Trials, "kernels", kernels)
    trials = Trials(Lines(tmp_path / "lines.jsonl"), trials=1, profiled="^(A|D on)$")
    ones = [*WORKLOADS["A"](Scale(0.02, 0.02)), *WORKLOADS["D"](Scale(0.02, 0.02))]
    tower = build("tiny-q4", groups(ones)[0][0], device="cpu")
    for letter in "AD":
        trials.workload(tower, [(one, one) for one in ones if one.workload == letter])
    trials.by_kernel(tower, ones)
    assert not said  # there is no GPU to watch
    tower.device = torch.device("cuda")
    trials.by_kernel(tower, ones)
    assert said == ["A", "D on"]


def test_what_is_watched_is_spread_over_a_run() -> None:
    assert kernels.spread(3) == [0, 1, 2]
    assert kernels.spread(100) == [12, 37, 62, 87]
    assert kernels.spread(0) == []


def test_a_variant_that_fails_leaves_the_others_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.engine import trials as module

    sound = module.measure

    def planted(tower: object, one: Variant, *rest: Any) -> object:
        if one.name == "off":
            raise ValueError("planted")
        return sound(tower, one, *rest)

    monkeypatch.setattr(module, "measure", planted)
    arguments = "--model tiny-q4 --workloads D --trials 1 --scale 0.02 --shrink 0.02 --device cpu"
    file = tmp_path / "lines.jsonl"
    assert command.main([*arguments.split(), "--out", str(file)]) == 1
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["kind"], r.get("what"), r.get("variant")) for r in lines[1:]] == [
        ("error", "D off", None),
        ("trial", None, "on"),
        ("trial", None, "on"),
    ]


def test_a_brief_run_warms_up_once_and_ends_in_time(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    arguments = "--model tiny-q4 --workloads G --trials 1 --scale 0.02 --shrink G=0.02 --brief"
    assert command.main([*arguments.split(), "--out", str(file), "--device", "cpu"]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["trial"] for r in lines[1:]] == [0, 1, 1, 1, 1]
    assert not any(r["full"] for r in lines[1:])
    late = [*arguments.split(), "--out", str(file), "--device", "cpu", "--seconds", "0"]
    assert command.main(late) == 0
    assert len(file.read_text().splitlines()) == len(lines)


def test_scales_are_for_all_or_for_one_workload() -> None:
    found = command.scales_of("0.5,I=0.25", "I=0.125", "BI")
    assert found == {"B": Scale(0.5, 1.0), "I": Scale(0.25, 0.125)}
    with pytest.raises(ValueError):
        command.scales_of("B=half", "1", "B")


def test_cold_prompts_among_shared_ones_are_told_apart() -> None:
    found = measured("I", "long in, batch 64, 5 drafts, on", scale=Scale(0.002, 0.01))
    asked = variant("I", "long in, batch 64, 5 drafts, on", Scale(0.002, 0.01)).asked
    hits = 48 - 1  # the first of those that share computes
    assert found["cached_tokens"] == hits * (asked["shared"] // 64 * 64) > 0
    times = found["ttft_p99_by_label_s"]
    assert set(times) == {"cold", "shared"}
    assert found["ttft_cold_p99_s"] == times["cold"] >= found["ttft_by_label_s"]["cold"]
    assert measured("B", "")["ttft_cold_p99_s"] is None


def test_a_tower_leaves_nothing_behind() -> None:
    """The next one may need all of the memory."""
    need = Need(seats=2, session=64, tokens=128, checkpoints=4, drafts=1)
    tower = build("tiny-g8", need, device="cpu", forced=True)
    tower.worker.runner.capture(capturer=CallAgain())
    watched = tower.engine(**settings(need, caching=True))
    watched.run(at_once(Draw(1, 512), 2, 20, 4))
    watched.engine.close()
    del watched
    weights = weakref.ref(tower.worker.runner.model)
    del tower
    give_back()
    assert weights() is None


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(i) for i in range(100)], 99) == 98.0
    assert percentile([], 99) is None
