"""Aborts at every moment, failures, death and closing: every stream ends, nothing stays held."""

from __future__ import annotations

import threading

import msgspec
import pytest

from millpond.engine.loop import Engine
from millpond.errors import Broken, Unavailable
from tests.support.symbolic import step_failure
from tests.support.towers import Tower, collect


def reasons(stream) -> list[str | None]:
    """Finish reasons of all samples."""
    return [reason for _, reason in collect(stream).values()]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_at_any_moment_ends_the_stream_and_leaves_nothing_held(steps, in_flight, n):
    tower = Tower(num_slots=4, max_prefill_tokens=64)
    stream = tower.engine.submit(tower.request(range(200), n=n, max_tokens=50))
    for _ in range(steps):
        tower.step()
    if in_flight:
        tower.executor.during = lambda plan: stream.abort()
    else:
        stream.abort()
    tower.step()
    assert reasons(stream) == ["abort"] * n
    tower.run()
    assert tower.engine.stats().finished == {"abort": 1}
    again = tower.request(range(200), max_tokens=9)
    tower.executor.during = None
    assert tower.answers([again]) == [tower.naive(again)]
    tower.assert_nothing_is_held()


def test_an_abort_while_waiting_needs_no_step():
    tower = Tower(max_batch_size=1)
    first = tower.engine.submit(tower.request(range(100)))
    second = tower.engine.submit(tower.request(range(100)))
    tower.step()
    second.abort()
    second.abort()
    tower.step()
    assert reasons(second) == ["abort"]
    tower.run()
    assert reasons(first) == ["length"]
    first.abort()
    tower.engine.abort("unknown")
    assert not tower.step()


def test_a_prompt_cancelled_in_flight_hits_no_deeper_than_what_was_written():
    tower = Tower(max_prefill_tokens=128, checkpoint_interval=64)
    stream = tower.engine.submit(tower.request(range(600)))
    tower.step()
    tower.executor.fail = step_failure
    tower.executor.during = lambda plan: stream.abort()
    tower.step()
    assert reasons(stream) == ["abort"]
    tower.executor.fail = tower.executor.during = None
    again = tower.request(range(600))
    assert tower.answers([again]) == [tower.naive(again)]
    assert tower.outcomes[again.request_id].cached_tokens == 128


def test_a_failed_step_publishes_nothing_and_is_repeated():
    tower = Tower()
    requests = [tower.request(range(seed, seed + 150), n=2) for seed in range(2)]
    failures = iter([True, False, False, False, True, False])
    tower.executor.fail = lambda plan: step_failure(plan) if next(failures, False) else None
    streams = [tower.engine.submit(request) for request in requests]
    tower.step()
    assert tower.engine.stats().slots_checkpoint == 0
    tower.run()
    assert [collect(stream) for stream in streams] == [tower.naive(r) for r in requests]
    assert tower.engine.stats().steps_failed == 2


def test_an_executor_that_dies_ends_every_stream_with_an_error():
    tower = Tower(max_batch_size=1)
    streams = [tower.engine.submit(tower.request(range(100), n=1)) for _ in range(3)]
    tower.step()
    tower.executor.fail = lambda plan: RuntimeError("the device fell off the bus")
    tower.engine.step()
    assert [reasons(stream) for stream in streams] == [["error"]] * 3
    assert not tower.engine.healthy
    assert "fell off the bus" in str(tower.engine.failure)
    with pytest.raises(Unavailable, match="fell off the bus"):
        tower.engine.submit(tower.request(range(10)))
    assert not tower.engine.step()
    stats = tower.engine.stats()
    assert stats.slots_running == stats.requests_running == stats.requests_waiting == 0
    tower.engine.flush_cache()
    tower.engine.close()
    assert tower.executor.closed


def test_a_defect_of_the_engine_itself_ends_the_streams_and_is_raised(monkeypatch):
    tower = Tower()
    stream = tower.engine.submit(tower.request(range(100)))
    monkeypatch.setattr(tower.engine._committer, "apply", lambda *_: [][0])
    with pytest.raises(IndexError):
        tower.engine.step()
    assert reasons(stream) == ["error"]
    assert not tower.engine.healthy


def test_a_defect_ends_the_streams_of_an_engine_in_its_own_thread_too(monkeypatch, caplog):
    tower = Tower()
    monkeypatch.setattr(tower.engine._committer, "apply", lambda *_: [][0])
    stream = tower.engine.submit(tower.request(range(100)))
    tower.engine.start()
    assert reasons(stream) == ["error"]
    tower.engine.close(timeout=30)
    assert not tower.engine.healthy
    assert tower.executor.closed
    assert "no request is served any more" in caplog.text


def test_streams_end_even_when_the_ledger_is_what_broke(monkeypatch, caplog):
    tower = Tower()
    streams = [tower.engine.submit(tower.request(range(100))) for _ in range(2)]
    tower.step()
    monkeypatch.setattr(tower.engine._ledger, "vacate", _broken)
    monkeypatch.setattr(tower.engine._committer, "apply", _broken)
    with pytest.raises(Broken):
        tower.engine.step()
    assert [reasons(stream) for stream in streams] == [["error"]] * 2
    assert "could not give back" in caplog.text


@pytest.mark.parametrize("wrong", [{"step": 7}, {"emitted": ()}])
def test_a_report_that_does_not_answer_the_plan_ends_the_engine(wrong):
    tower = Tower()
    stream = tower.engine.submit(tower.request(range(100)))
    run = tower.executor.run
    tower.executor.run = lambda plan: msgspec.structs.replace(run(plan), **wrong)
    with pytest.raises(Broken):
        tower.engine.step()
    assert reasons(stream) == ["error"]


def _broken(*_: object) -> None:
    raise Broken("on purpose")


@pytest.mark.parametrize("threaded", [False, True])
def test_closing_with_drain_finishes_what_was_accepted_and_refuses_the_rest(threaded):
    tower = Tower(max_batch_size=1)
    requests = [tower.request(range(100)) for _ in range(3)]
    streams = [tower.engine.submit(request) for request in requests]
    if threaded:
        tower.engine.start()
    tower.engine.close(drain=True)
    assert [collect(stream) for stream in streams] == [tower.naive(r) for r in requests]
    with pytest.raises(Unavailable):
        tower.engine.submit(tower.request(range(10)))
    tower.engine.close()
    stats = tower.engine.stats()
    assert (stats.slots_free, stats.pages_free) == (stats.slots_total, stats.pages_total)
    assert tower.executor.closed


@pytest.mark.parametrize("threaded", [False, True])
def test_closing_without_drain_aborts_what_runs_and_what_waits(threaded):
    tower = Tower(max_batch_size=1)
    entered, go_on = threading.Event(), threading.Event()
    streams = [tower.engine.submit(tower.request(range(100), max_tokens=5000)) for _ in range(2)]
    if threaded:

        def hold(plan):
            entered.set()
            assert go_on.wait(30)

        tower.executor.during = hold
        tower.engine.start()
        assert entered.wait(30)
        closing = threading.Thread(target=tower.engine.close, kwargs={"drain": False})
        closing.start()
        go_on.set()
        closing.join(30)
        assert not closing.is_alive()
    else:
        tower.step()
        tower.engine.close(drain=False)
    assert [reasons(stream) for stream in streams] == [["abort"], ["abort"]]
    stats = tower.engine.stats()
    assert (stats.slots_free, stats.pages_free) == (stats.slots_total, stats.pages_total)


def test_a_drain_that_takes_too_long_is_cut_short():
    tower = Tower(num_pages=5)
    stream = tower.engine.submit(tower.request(range(10), max_tokens=10_000, ignore_eos=True))
    tower.engine.start()
    tower.engine.close(drain=True, timeout=0)
    assert reasons(stream)[0] in ("abort", "length")


@pytest.mark.parametrize("drain", [True, False])
def test_whom_the_engine_calls_cannot_make_it_wait_for_itself(drain):
    told: list[str] = []

    def sink(deltas):
        if told:
            return
        try:
            engine.close(drain=drain)
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
            threading.Thread(target=engine.close, daemon=True).start()

    tower = Tower()
    engine = Engine(tower.settings, tower.executor, sink)
    engine.submit(tower.request(range(100), max_tokens=50))
    engine.start()
    engine._intake.thread.join(30)
    assert not engine._intake.thread.is_alive()
    assert tower.executor.closed
    assert ("another thread" in told[0]) is drain
    assert engine.stats().finished == {"length" if drain else "abort": 1}


def test_an_engine_stepped_by_hand_is_not_closed_in_the_middle_of_a_step():
    tower = Tower()
    tower.engine.submit(tower.request(range(100), max_tokens=5))

    def close(plan):
        tower.executor.during = None
        with pytest.raises(RuntimeError, match="between two steps"):
            tower.engine.close()

    tower.executor.during = close
    tower.run()
    assert tower.engine.stats().finished == {"length": 1}
    tower.engine.close()
    assert tower.executor.closed


def test_an_engine_is_started_once():
    tower = Tower()
    tower.engine.start()
    with pytest.raises(RuntimeError):
        tower.engine.start()
    tower.engine.close()


def test_an_engine_whose_sink_fails_accepts_nothing_more():
    made = Tower()
    broken = [True]

    def sink(deltas):
        if broken and broken.pop():
            raise OSError("nobody listens")

    engine = Engine(made.settings, made.executor, sink)
    engine.start()
    engine.submit(made.request(range(10)))
    assert engine._intake.thread is not None
    engine._intake.thread.join(10)
    assert not engine.healthy
    with pytest.raises(Unavailable, match="nobody listens"):
        engine.submit(made.request(range(10)))
    assert made.executor.closed
    engine.close()
