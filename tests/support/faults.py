"""Faults of state and KV, as what they leave in memory. Only tests can cause them.

A fault takes a hand-off and that of another sequence, and returns the memory the first goes on
from. No flag, setting or environment variable of the package leads here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from millpond.memory.arena import Arena
from millpond.plan.step import PAGE_SIZE
from tests.support.handoff import Handoff, Memory, num_pages

Fault = Callable[[Handoff, Handoff], Memory]


def nothing(case: Handoff, other: Handoff) -> Memory:
    """The correct hand-off."""
    return case.memory


def state_zeroed(case: Handoff, other: Handoff) -> Memory:
    """The recurrent state is empty; the convolution window is right."""
    return _emptied(case, "recurrent")


def state_swapped(case: Handoff, other: Handoff) -> Memory:
    """The recurrent state is another sequence's; the convolution window is right."""
    return _taken(case, other.memory, "recurrent")


def state_two_tokens_old(case: Handoff, other: Handoff) -> Memory:
    """The recurrent state lacks the last two tokens; the convolution window is right."""
    return _taken(case, case.earlier(2), "recurrent")


def window_dropped(case: Handoff, other: Handoff) -> Memory:
    """The convolution window is empty; the recurrent state is right."""
    return _emptied(case, "conv")


def rejected_digit_kept(case: Handoff, other: Handoff) -> Memory:
    """State and window hold one token too many: a draft that said a wrong digit, kept."""
    said = case.tokens[case.reply :]
    wrong = [digit for digit in case.bench.digits if digit not in said]
    digits = wrong or [digit for digit in case.bench.digits if digit != said[0]]
    return _taken(case, case.ahead(digits[sum(case.tokens) % len(digits)]), "recurrent", "conv")


def foreign_token_kept(case: Handoff, other: Handoff) -> Memory:
    """State and window hold one token too many: any token of another sequence."""
    return _taken(case, case.ahead(other.tokens[other.cut // 2]), "recurrent", "conv")


def state_one_token_ahead(case: Handoff, other: Handoff) -> Memory:
    """The recurrent state holds a foreign token too many; the convolution window is right."""
    return _taken(case, case.ahead(other.tokens[other.cut // 2]), "recurrent")


def kv_zeroed(case: Handoff, other: Handoff) -> Memory:
    """All pages are empty."""
    made = case.memory.clone()
    made.pages.zero_()
    return made


def kv_swapped(case: Handoff, other: Handoff) -> Memory:
    """All pages are another sequence's, used in turn where it has fewer."""
    made = case.memory.clone()
    for page in range(len(made.pages)):
        made.pages[page] = _page_of(other, page)
    return made


def wrong_page(case: Handoff, other: Handoff) -> Memory:
    """One page is another sequence's: the one that changes the reply most."""
    worst, least = case.memory, float("inf")
    for page in range(num_pages(case.cut)):
        made = case.memory.clone()
        made.pages[page] = _page_of(other, page)
        *said, _ = case.goes_on(made)  # which of several tokens ends the turn does not count
        likely = min((s.logprob for s in said), default=0.0)
        if likely < least:
            worst, least = made, likely
    return worst


def first_page_wrong(case: Handoff, other: Handoff) -> Memory:
    """The first page is another sequence's."""
    made = case.memory.clone()
    made.pages[0] = _page_of(other, 0)
    return made


def _page_of(other: Handoff, index: int) -> torch.Tensor:
    """A page that `other` has filled, or the only one it has."""
    return other.memory.pages[index % max(1, other.cut // PAGE_SIZE)]


def _taken(case: Handoff, source: Memory, *names: str) -> Memory:
    """The case's memory with tensors of the slot from `source`."""
    made, arena = case.memory.clone(), case.bench.arenas.slots
    for name in names:
        pairs = zip(_views(arena, made.slot, name), _views(arena, source.slot, name), strict=True)
        for mine, theirs in pairs:
            mine.copy_(theirs)
    return made


def _emptied(case: Handoff, name: str) -> Memory:
    made = case.memory.clone()
    for mine in _views(case.bench.arenas.slots, made.slot, name):
        mine.zero_()
    return made


def _views(arena: Arena, entry: torch.Tensor, name: str) -> list[torch.Tensor]:
    """The bytes of every layer's tensor `name` in an entry."""
    found = [
        entry[offset : offset + tensor.num_bytes]
        for tensor, offset in zip(arena.spec.tensors, arena.spec.offsets(), strict=True)
        if tensor.name == name
    ]
    assert found, f"a slot holds no {name}"
    return found
