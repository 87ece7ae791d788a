"""Numbers of outcomes, and gates on them."""

from __future__ import annotations

import pytest

from millpond.errors import Refused
from millpond.evaluate import Gate, Report, TaskScore, compare, default_gates, judge, parse_gates
from millpond.evaluate.cases import Case
from millpond.evaluate.running import Drafts, Outcome
from millpond.evaluate.score import margins

CASE = Case(task="t", seed=0, kind="text", prompt=(1, 2), reply="x")


def outcome(*steps: tuple[int, dict[int, float]]) -> Outcome:
    return Outcome(CASE, tuple(t for t, _ in steps), tuple(top for _, top in steps), 0)


def scored(task: str, **numbers: float) -> TaskScore:
    known = dict.fromkeys(("accuracy", "parses", "margin", "acceptance"))
    return TaskScore(task=task, replies=4, failed=0, **{**known, "cached": 0.0, **numbers})


def report(*scores: TaskScore) -> Report:
    return Report(model="m", mode="", other=None, scores=scores)


def test_a_margin_is_the_distance_of_the_two_likeliest() -> None:
    assert margins(outcome((5, {5: -0.1, 6: -3.1, 7: -9.0}))) == [pytest.approx(3.0)]


def test_drift_counts_up_to_the_first_different_token() -> None:
    one = outcome((5, {5: -0.1, 6: -2.0}), (8, {8: -1.0, 9: -1.1}), (5, {5: -1.0, 6: -2.0}))
    two = outcome((5, {5: -0.1, 6: -2.3}), (9, {8: -1.2, 9: -1.1}), (5, {5: -9.0, 6: -8.0}))
    assert compare(one, two) == (pytest.approx(0.3), True)
    assert compare(one, one) == (0.0, False)


def test_a_reply_that_goes_on_has_parted() -> None:
    one = outcome((5, {5: -0.1, 6: -2.0}))
    two = outcome((5, {5: -0.1, 6: -2.0}), (6, {6: -0.1, 7: -4.0}))
    assert compare(one, two) == (0.0, True)


def test_the_share_of_accepted_drafts_of_none_is_unknown() -> None:
    assert Drafts().acceptance is None
    assert Drafts(4, 3).acceptance == 0.75


def test_each_gate_can_fail() -> None:
    good = report(
        *(scored(t, accuracy=1.0, margin=8.0, drift=0.0) for t in ("ledger", "recall", "copy")),
        scored("arithmetic", accuracy=1.0, margin=8.0, drift=0.0),
        scored("tools", accuracy=1.0, parses=1.0, drift=0.0),
        scored("json", accuracy=0.5, parses=1.0, drift=0.0),
        scored("speech", accuracy=1.0, drift=0.0, acceptance=0.95),
        scored("random", drift=0.0, acceptance=0.5),
    )
    gates = default_gates(drafts=3)
    judged = judge(good, gates)
    assert all(j.ok for j in judged)
    assert len(judged) == len(gates) - 1  # the ledger had no drafts
    for bad in (
        scored("ledger", accuracy=0.98),
        scored("recall", accuracy=0.98),
        scored("copy", accuracy=0.97),
        scored("arithmetic", margin=4.9),
        scored("tools", parses=0.98),
        scored("json", parses=0.98),
        scored("speech", acceptance=0.89),
        scored("ledger", acceptance=0.89),
        scored("random", acceptance=0.29),
        scored("random", acceptance=0.81),
        scored("chat", drift=0.011),
    ):
        assert [j.ok for j in judge(report(bad), gates)].count(False) == 1, bad


def test_drift_is_judged_once_over_all_tasks() -> None:
    (judged,) = judge(
        report(scored("a", drift=0.001), scored("b", drift=0.5)), [Gate("drift", 0.1)]
    )
    assert (judged.task, judged.value, judged.ok) == ("all", 0.5, False)


def test_a_gate_by_name_replaces_one_for_all_and_later_ones_earlier() -> None:
    gates = parse_gates("accuracy=0.9, copy.accuracy=0.5,accuracy=0.8")
    judged = judge(report(scored("copy", accuracy=0.6), scored("chat", accuracy=0.85)), gates)
    assert [(j.task, j.gate.threshold, j.ok) for j in judged] == [
        ("copy", 0.5, True),
        ("chat", 0.8, True),
    ]


@pytest.mark.parametrize("text", ["accuracy", "speed=1", "accuracy=high", "accuracy=nan", "=1"])
def test_what_is_no_gate_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="gate"):
        parse_gates(text)
