"""A row's bytes depend on that row alone: not on others, their number or order, nor on threads.

What exactness across cold, resumed, split and batched runs rests on (fp32, CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from millpond.ops.reference import attention, conv, delta, dense, elementwise, hyper, indexer, moe
from millpond.ops.reference import linear as products
from tests.ops.batches import make_batch, make_rows, strided_bank

MOST = 700
COUNTS = (*range(1, 66), 127, 128, 129, 300, MOST)

Fn = Callable[..., object]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHT = random(40)
GATE_UP, DOWN = random(6, 2 * 20, 40), random(6, 40, 20)
HYPER = {"iterations": 20, "hyper_eps": 1e-6, "norm_eps": 1e-5}


def experts(x: torch.Tensor) -> object:
    weights, chosen = moe.moe_route_softmax(x, random(6, 40), top_k=2)
    return weights, chosen, moe.grouped_experts(x, weights, chosen, GATE_UP, DOWN, limit=2.0)


def sigmoid_route(x: torch.Tensor) -> object:
    return moe.moe_route_sigmoid(x, random(6, 40), random(6), top_k=2, scale=2.5, renormalise=True)


def hyper_layer(x: torch.Tensor) -> object:
    streams = x.view(-1, 4, 10)
    post, mix, y = hyper.hyper_pre(streams, random(24, 40), random(24), random(3), **HYPER)
    return post, mix, y, hyper.hyper_post(y, streams, post, mix), hyper.hyper_mean(streams)


def rotated(x: torch.Tensor) -> object:
    positions = (x[:, 0].abs() * 1000).long()
    cos, sin = dense.rope_tables(positions, 8, 1e7)
    return cos, sin, dense.rotate_partial(x.view(-1, 2, 20), cos, sin)


BY_TOKEN: dict[str, Fn] = {
    "linear": lambda x: products.linear(x, random(33, 40)),
    "linear to one column": lambda x: products.linear(x, random(1, 40)),
    "linear with bias": lambda x: products.linear(x, random(70, 40), random(70)),
    "sigmoid": elementwise.sigmoid,
    "silu": elementwise.silu,
    "softplus": elementwise.softplus,
    "row_sum": elementwise.row_sum,
    "rms_norm": lambda x: dense.rms_norm(x, WEIGHT, 1e-5),
    "zero_centred_rms_norm": lambda x: dense.zero_centred_rms_norm(x, WEIGHT, 1e-5),
    "layer_norm": lambda x: dense.layer_norm(x, WEIGHT, WEIGHT, 1e-5),
    "gated_rms_norm_silu": lambda x: dense.gated_rms_norm_silu(x, x, WEIGHT, 1e-5),
    "gated_rms_norm_sigmoid": lambda x: dense.gated_rms_norm_sigmoid(x, x, WEIGHT, 1e-5),
    "norm of heads": lambda x: dense.rms_norm(x.view(-1, 8, 5), WEIGHT[:5], 1e-5),
    "sigmoid_gate": lambda x: dense.sigmoid_gate(x, x),
    "swiglu": lambda x: dense.swiglu(x, x.flip(-1), 2.0),
    "rotary": rotated,
    "hyper-connections": hyper_layer,
    "softmax routing and experts": experts,
    "sigmoid routing": sigmoid_route,
    "log decay by head": lambda x: delta.log_decay(x, delta.Gate(WEIGHT, WEIGHT)),
    "log decay by channel": lambda x: delta.log_decay(
        x.view(-1, 4, 10), delta.Gate(WEIGHT[:4], WEIGHT, -5.0)
    ),
    "l2norm": delta.l2norm,
}


def tensors(out: object) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)  # type: ignore[return-value]


@pytest.mark.parametrize("op", BY_TOKEN.values(), ids=BY_TOKEN.keys())
def test_a_token_gives_the_same_bytes_among_any_number_of_tokens(op: Fn) -> None:
    x = random(MOST, 40)
    whole = tensors(op(x))
    for count in COUNTS:
        for begin in {0, MOST - count, (MOST - count) // 3}:
            part = tensors(op(x[begin : begin + count]))
            for mine, theirs in zip(part, whole, strict=True):
                assert torch.equal(mine, theirs[begin : begin + count]), (begin, count)


def test_two_threads_split_work_between_rows_never_within_one() -> None:
    x, long = random(MOST, 1200), random(3, 50_000)
    weight = random(96, 1200)
    with threads(2):
        product = products.linear(x, weight)
        norm = dense.rms_norm(x, x[0], 1e-5)
        assert torch.equal(elementwise.row_sum(long[:1]), elementwise.row_sum(long)[:1])
        for count in (1, 2, 15, 17, 40, 65, 300):
            assert torch.equal(products.linear(x[:count], weight), product[:count])
            assert torch.equal(dense.rms_norm(x[:count], x[0], 1e-5), norm[:count])


@pytest.mark.parametrize("shape", [(64, 16, 64), (24, 64, 40), (16, 256, 64), (64, 64, 512)])
def test_a_matrix_of_a_batch_gives_the_same_bytes_in_any_batch(
    shape: tuple[int, int, int],
) -> None:
    a, b = random(300, shape[0], shape[1]), random(300, shape[1], shape[2])
    whole = products.batched_matmul(a, b)
    for count in (*range(1, 66, 3), 150):
        for begin in (0, 300 - count):
            at = slice(begin, begin + count)
            assert torch.equal(products.batched_matmul(a[at], b[at]), whole[at])
    if shape[0] % products.ROW_MULTIPLE == 0:
        rows = products.batched_matmul(a[:9, : products.ROW_MULTIPLE], b[:9])
        assert torch.equal(rows, whole[:9, : products.ROW_MULTIPLE])


# Ops over sequences: `lengths[i]` tokens of row i; a row alone, in a batch, in the reverse order.
LENGTHS = (1, 64, 130, 63, 65, 7, 192, 17, 100)


def slots_of(rows: int) -> tuple[list[int], list[int]]:
    return list(range(rows)), list(range(rows, 2 * rows))


def batch_and_alone(run: Callable[[list[int]], tuple[torch.Tensor, ...]]) -> None:
    """`run(rows)` gives, for those rows in that order, packed outputs first, then one per row."""
    everyone = list(range(len(LENGTHS)))
    packed, *states = run(everyone)
    outs = packed.split(LENGTHS)
    reverse, *reverse_states = run(everyone[::-1])
    for row, out in zip(everyone[::-1], reverse.split(LENGTHS[::-1]), strict=True):
        assert torch.equal(out, outs[row])
    for mine, theirs in zip(reverse_states, states, strict=True):
        assert torch.equal(mine.flip(0), theirs)
    for row in everyone:
        alone, *alone_states = run([row])
        assert torch.equal(alone, outs[row]), LENGTHS[row]
        for mine, theirs in zip(alone_states, states, strict=True):
            assert torch.equal(mine[0], theirs[row])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("op", [delta.delta_prefill, delta.delta_decode])
def test_a_sequence_folds_to_the_same_state_in_any_batch(op: Fn, kind: str) -> None:
    tokens, heads = sum(LENGTHS), 3
    q, k = random(2, tokens, heads, 16)
    v, beta = random(tokens, heads, 24), random(tokens, heads)
    decay = random(tokens, heads) if kind == "gdn" else random(tokens, heads, 16)
    gate = delta.Gate(
        random(heads), random(heads if kind == "gdn" else heads * 16), None if kind == "gdn" else -5
    )
    start = strided_bank(2 * len(LENGTHS), (heads, 24, 16))
    offsets = torch.tensor((0, *LENGTHS)).cumsum(0)

    def run(rows: list[int]) -> tuple[torch.Tensor, ...]:
        at = torch.cat([torch.arange(offsets[r], offsets[r + 1]) for r in rows])
        bank = start.clone()
        out = [r + len(LENGTHS) for r in rows]
        made = make_rows([LENGTHS[r] for r in rows], rows, out)
        o = op(*(x[at] for x in (q, k, v, decay, beta)), gate=gate, bank=bank, rows=made)
        return o, bank[out]

    batch_and_alone(run)


def test_a_sequence_convolves_to_the_same_bytes_in_any_batch() -> None:
    x, weight = random(sum(LENGTHS), 13), random(13, 4)
    start = strided_bank(2 * len(LENGTHS), (13, 3))
    offsets = torch.tensor((0, *LENGTHS)).cumsum(0)

    def run(rows: list[int]) -> tuple[torch.Tensor, ...]:
        at = torch.cat([torch.arange(offsets[r], offsets[r + 1]) for r in rows])
        bank = start.clone()
        out = [r + len(LENGTHS) for r in rows]
        made = make_rows([LENGTHS[r] for r in rows], rows, out)
        return conv.conv_prefill(x[at], weight, bank=bank, rows=made), bank[out]

    batch_and_alone(run)


@pytest.mark.parametrize("form", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["gqa", "mla", "indexed"])
def test_a_sequence_attends_to_the_same_bytes_in_any_batch(kind: str, form: str) -> None:
    starts = [64 * (r % 3) if form == "prefill" else 11 * r for r in range(len(LENGTHS))]
    tables = [list(range(6 * r, 6 * r + 6)) for r in range(len(LENGTHS))]
    q, head_weights = random(sum(LENGTHS), 6, 16), random(sum(LENGTHS), 6)
    pages, latents = random(60, 2, 64, 16), random(60, 64, 16)
    pooled = random(60, 16, 16)
    offsets = torch.tensor((0, *LENGTHS)).cumsum(0)

    def run(rows: list[int]) -> tuple[torch.Tensor, ...]:
        at = torch.cat([torch.arange(offsets[r], offsets[r + 1]) for r in rows])
        spans = [(starts[r], LENGTHS[r]) for r in rows]
        batch = make_batch(**{form: spans}, tables=[tables[r] for r in rows])
        if kind == "gqa":
            return (attention.paged_gqa(q[at], pages, pages * 2, batch=batch, scale=0.25),)
        selected = None
        if kind == "indexed":
            selected = indexer.select(
                q[at], head_weights[at], pooled_pages=pooled, batch=batch, pool=4, top_k=16,
                scale=0.25,
            )  # fmt: skip
        return (attention.paged_mla(q[at], latents, batch=batch, scale=0.25, selected=selected),)

    batch_and_alone(run)


@pytest.mark.parametrize("form", ["prefill", "decode"])
def test_attention_cut_into_forwards_gives_the_same_bytes(form: str) -> None:
    length, table = 230, [[4, 1, 3, 0]]
    q, pages = random(length, 6, 16), random(5, 2, 64, 16)

    def run(begin: int, end: int) -> torch.Tensor:
        batch = make_batch(**{form: [(begin, end - begin)]}, tables=table)
        return attention.paged_gqa(q[begin:end], pages, pages * 2, batch=batch, scale=0.25)

    whole = run(0, length)
    cuts = (0, 64, 192, length) if form == "prefill" else (0, 1, 50, 64, 65, 199, length)
    parts = [run(a, b) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("heads", [2, 6, 14, 20])
def test_a_query_attends_to_the_same_bytes_in_either_form(heads: int) -> None:
    q, pages = random(130, heads, 16), random(3, 2, 64, 16)
    forms = (make_batch(**{form: [(0, 130)]}, tables=[[2, 0, 1]]) for form in ("prefill", "decode"))
    one, other = (
        attention.paged_gqa(q, pages, pages * 2, batch=batch, scale=0.25) for batch in forms
    )
    assert torch.equal(one, other)
