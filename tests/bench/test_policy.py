"""Traces replayed through the real engine: what a policy saves, in simulated time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.policy.replay import POLICIES, Replay, Result, Scale
from bench.policy.report import table, write
from bench.policy.trace import Prompt, dump, load, synthesize
from tests.support.symbolic import SymbolicExecutor

CONVERSATIONS = Path(__file__).parents[2] / "bench" / "policy" / "data" / "conversations.jsonl"
VALUE, LRU, NO_LADDER = POLICIES


def compare(prompts: list[Prompt], budget: int) -> list[Result]:
    replay = Replay(prompts, Scale())
    return [replay.run(policy, budget) for policy in POLICIES]


@pytest.mark.parametrize("budget", [16, 48])
@pytest.mark.parametrize("trace", ["made from a seed", "of a file"])
def test_value_recomputes_less_than_lru(trace: str, budget: int) -> None:
    prompts = load(CONVERSATIONS) if trace == "of a file" else synthesize(1, 500)
    value, lru, no_ladder = compare(prompts, budget)
    print(table([value, lru, no_ladder]))
    assert value.recomputed_tokens < 0.9 * lru.recomputed_tokens
    assert value.recomputed_tokens < 0.95 * no_ladder.recomputed_tokens
    assert value.hit_tokens > max(lru.hit_tokens, no_ladder.hit_tokens)


def test_every_token_is_hit_new_or_recomputed() -> None:
    prompts = load(CONVERSATIONS)[:100]
    few, many = (Replay(prompts, Scale()).run(VALUE, budget) for budget in (4, 200))
    assert few.preemptions == many.preemptions == 0
    assert few.prompt_tokens == many.prompt_tokens
    new = {one.prompt_tokens - one.hit_tokens - one.recomputed_tokens for one in (few, many)}
    assert len(new) == 1
    assert few.recomputed_tokens > many.recomputed_tokens >= 0


def test_a_replay_is_the_same_every_time() -> None:
    replay = Replay(synthesize(3, 150), Scale())
    one, other = (replace(replay.run(VALUE, 12), replay_s=0.0) for _ in range(2))
    assert one == other


def test_a_device_that_checks_every_state_sees_the_same() -> None:
    """The hits are real: each state a prompt starts from holds the prompt's own tokens."""
    replay = Replay(load(CONVERSATIONS)[:40], Scale())
    idle = replay.run(VALUE, 12)
    checked = replay.run(VALUE, 12, SymbolicExecutor)
    assert idle.hit_tokens > 0
    assert replace(checked, replay_s=0.0) == replace(idle, replay_s=0.0)


def test_blocks_may_be_replayed_at_their_full_size() -> None:
    prompts = load(CONVERSATIONS)[:12]
    small, full = (Replay(prompts, Scale(block_tokens=n)).run(VALUE, 20) for n in (64, 512))
    assert full.prompt_tokens == sum(prompt.length for prompt in prompts)
    assert small.prompt_tokens == pytest.approx(full.prompt_tokens, rel=0.02)
    assert full.hit_tokens >= small.hit_tokens > 0


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    prompts = synthesize(5, 50)
    path = tmp_path / "trace.jsonl"
    path.write_text(dump(prompts), "utf-8")
    read = load(path)
    assert [one.blocks for one in read] == [one.blocks for one in prompts]
    assert dump(read) == dump(prompts)


@pytest.mark.parametrize(
    "line",
    ["no json", "{}", "[]", '{"timestamp": 0, "input_length": 513, "output_length": 1}']
    + [
        json.dumps(
            {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": list(ids)}
        )
        for length, ids in ((513, (1,)), (0, ()), (512, (1, 2)))
    ],
)
def test_a_line_that_is_not_of_the_format_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(dump(synthesize(1, 1)) + line + "\n", "utf-8")
    with pytest.raises(ValueError, match="line 2"):
        load(path)


def test_blocks_are_told_apart_by_their_first_tokens() -> None:
    prompts = synthesize(1, 200)
    blocks = {one for prompt in prompts for one in prompt.blocks}
    tokens = {Prompt(0, 512, 1, (one,)).tokens(64) for one in blocks}
    assert len(tokens) == len(blocks)


def test_a_report_holds_table_numbers_and_plot(tmp_path: Path) -> None:
    results = compare(synthesize(2, 40), 8)
    files = write(results, {"trace": "a short one"}, tmp_path)
    assert {path.name for path in files} >= {"policy.json", "policy.md"}
    numbers = json.loads((tmp_path / "policy.json").read_text("utf-8"))
    assert [one["policy"] for one in numbers["results"]] == [one.policy for one in results]
    assert f"{results[0].hit_tokens:,}" in (tmp_path / "policy.md").read_text("utf-8")
