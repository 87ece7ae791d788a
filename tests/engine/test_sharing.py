"""The tree of prompts in the engine against what comparing every pair of them says."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from millpond.engine.request import Request, Sequence
from millpond.engine.sharing import SharedPrefixes
from millpond.engine.stream import RequestStream
from millpond.engine.types import EngineRequest
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import PAGE_SIZE

# Prompts as words of one letter a page: "aab" and "aac" part after two pages.
words = st.text("ab", min_size=0, max_size=7)


def waiting(word: str, more: int = 1, salt: str = "", logprobs: int | None = None) -> Sequence:
    tokens = tuple(ord(letter) for letter in word for _ in range(PAGE_SIZE)) + (0,) * more
    spec = EngineRequest(
        request_id=word,
        tokens=tokens,
        params=SamplingParams(max_tokens=1, prompt_logprobs=logprobs),
        cache_salt=salt,
    )
    stream = RequestStream(word, 1, lambda _: None)
    return Request(spec, 0, stream, stop_ids=frozenset(), token_limit=10_000).samples[0]


def common(one: Sequence, other: Sequence) -> int:
    """Whole pages two prompts share, each without its last token; in tokens."""
    if one.request.spec.cache_salt != other.request.spec.cache_salt:
        return 0
    a, b = (sequence.request.spec.tokens[:-1] for sequence in (one, other))
    pages = 0
    while (end := (pages + 1) * PAGE_SIZE) <= min(len(a), len(b)) and a[:end] == b[:end]:
        pages += 1
    return pages * PAGE_SIZE


@given(st.lists(st.tuples(words, st.sampled_from([1, 5]), st.sampled_from(["", "s"]))), st.data())
def test_branches_are_where_prompts_part_whoever_came_and_went(prompts, data):
    shared = SharedPrefixes()
    inside: list[Sequence] = []
    for word, more, salt in prompts:
        inside.append(waiting(word, more, salt))
        shared.add(inside[-1])
        shared.add(inside[-1])
        if len(inside) > 1 and data.draw(st.booleans()):
            shared.discard(inside.pop(data.draw(st.integers(0, len(inside) - 1))))
    for one in inside:
        ends: dict[int, int] = {}
        for other in inside:
            end = common(one, other)
            if other is not one and end:
                ends[end] = ends.get(end, 0) + 1
        assert shared.branches(one) == [(end, ends[end]) for end in sorted(ends, reverse=True)]
    for one in inside:
        shared.discard(one)
        shared.discard(one)
    assert not len(shared)
    assert not shared._roots


@given(st.lists(words, min_size=2, max_size=12), st.data())
def test_those_ahead_come_with_what_is_shared_most_first(prompts, data):
    shared = SharedPrefixes()
    sequences = [waiting(word) for word in prompts]
    running = data.draw(st.lists(st.sampled_from(sequences), unique_by=id))
    for sequence in sequences:
        shared.add(sequence)
        if sequence in running:
            shared.start(sequence)
    gone = data.draw(st.sampled_from(sequences))
    shared.discard(gone)
    for one in sequences:
        if one is gone:
            continue
        wanted = {o: common(one, o) for o in running if o is not gone and o is not one}
        found = list(shared.ahead(one))
        assert dict(found) == {other: end for other, end in wanted.items() if end}
        assert [end for _, end in found] == sorted((end for _, end in found), reverse=True)


@given(words, words)
def test_two_prompts_have_one_place_as_far_as_they_are_alike(one, other):
    shared = SharedPrefixes()
    first, second = waiting(one), waiting(other)
    shared.add(first)
    shared.add(second)
    for end in range(PAGE_SIZE, 8 * PAGE_SIZE, PAGE_SIZE):
        same = shared.place(first, end) is shared.place(second, end)
        assert same == (end <= common(first, second))


def test_a_prompt_that_matches_nothing_is_no_reason_to_keep_a_state():
    shared = SharedPrefixes()
    reader, asker = waiting("aab"), waiting("aac", logprobs=0)
    shared.add(asker)
    shared.add(reader)
    assert shared.branches(reader) == []
    assert shared.branches(asker) == [(2 * PAGE_SIZE, 1)]


def test_a_folded_prompt_counts_as_long_as_one_is_here_that_shares_its_beginning():
    shared = SharedPrefixes()
    first, second, third = waiting("aab"), waiting("aac"), waiting("aad")
    shared.add(first)
    shared.add(second)
    shared.discard(first, folded=True)
    assert shared.branches(second) == [(2 * PAGE_SIZE, 1)]
    shared.discard(second, folded=True)
    shared.add(third)
    assert shared.branches(third) == []


def test_long_prompts_that_part_late_make_few_stretches():
    shared = SharedPrefixes()
    body = random.Random(0).choices("abcdefgh", k=2_000)
    sequences = [waiting("".join(body) + end) for end in ("a", "b", "cc", "cd")]
    for sequence in sequences:
        shared.add(sequence)
    stretches = 0
    level = list(shared._roots.values())
    while level:
        level = [below for stretch in level for below in stretch.below.values()]
        stretches += len(level)
    assert stretches == 6
