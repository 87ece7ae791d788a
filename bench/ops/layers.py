"""Calls of every op but the linear-attention ones at the shapes of real models, on any device.

Knows contracts, least bytes and least arithmetic; times nothing. Rows of a batch are staged as the
engine stages them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from millpond.nn.batch import Staging
from millpond.ops.batch import ForwardBatch
from millpond.ops.reference.sampling import SamplingRows
from millpond.plan.step import PAGE_SIZE, PageUpdate, Row, StepPlan
from millpond.state.lease import PageId, Seat, SlotId

FAMILIES = ("attention", "indexer", "moe", "hyper", "norms", "products", "sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The layers of one model, whole (no tensor parallelism). What a model lacks is 0."""

    name: str
    hidden: int
    inner: int
    vocab: int
    heads: int
    kv_heads: int = 0
    dim: int = 0
    latent: int = 0
    index_heads: int = 0
    index_dim: int = 0
    top_k: int = 0
    pool: int = 4
    experts: int = 0
    per_token: int = 0
    expert_inner: int = 0
    streams: int = 0
    small: bool = False
    by_channel: bool = False  # no linear attention here, so no peers


SHAPES = {
    "q4": Shape(
        name="q4", hidden=2560, inner=9216, vocab=248320, heads=16, kv_heads=4, dim=256
    ),
    "g8": Shape(
        name="g8", hidden=4096, inner=12288, vocab=154880, heads=64, latent=512, index_heads=32,
        index_dim=128, top_k=2048, experts=288, per_token=8, expert_inner=2048, streams=4,
    ),
    "small-q4": Shape(
        name="small-q4", hidden=64, inner=96, vocab=300, heads=4, kv_heads=2, dim=32, small=True
    ),
    "small-g8": Shape(
        name="small-g8", hidden=64, inner=96, vocab=300, heads=4, latent=32, index_heads=16,
        index_dim=16, top_k=64, experts=6, per_token=2, expert_inner=32, streams=4, small=True,
    ),
}  # fmt: skip


@dataclass(slots=True)
class Case:
    """One call of `op`. `changed` names those of `named` that it writes.

    `least_bytes` must cross the memory and `least_flops` be computed.
    """

    op: str
    label: str
    shape: Shape
    args: tuple[object, ...]
    named: dict[str, object]
    least_bytes: int
    least_flops: int = 0
    changed: tuple[str, ...] = ()

    def call(self, op: Callable[..., object]) -> object:
        """Run it once."""
        return op(*self.args, **self.named)


class Maker:
    """Random tensors of one seed, device and dtype."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator(device).manual_seed(1)

    def random(self, *sizes: int, scale: float = 1.0, dtype: torch.dtype | None = None):
        """Normal, in the model dtype unless told otherwise."""
        drawn = torch.randn(
            *sizes, generator=self.generator, device=self.device, dtype=dtype or self.dtype
        )
        return drawn.mul_(scale)

    def matrix(self, *sizes: int) -> torch.Tensor:
        """Weights that keep the variance of what they multiply."""
        return self.random(*sizes, scale=sizes[-1] ** -0.5)

    def batch(self, prefill: list[tuple[int, int]], decode: list[int]) -> tuple[ForwardBatch, int]:
        """Chunk-form rows as (start, tokens), single tokens by position, and how many pages."""
        spans = [*prefill, *[(position, 1) for position in decode]]
        each = [-(-(start + count) // PAGE_SIZE) for start, count in spans]
        order = torch.randperm(sum(each), generator=torch.Generator().manual_seed(2)).tolist()
        staging = Staging(len(spans), max(each), self.device)
        rows, first = [], 0
        for seat, ((start, count), pages) in enumerate(zip(spans, each, strict=True)):
            held = tuple(PageId(page) for page in order[first : first + pages])
            staging.update([PageUpdate(Seat(seat), 0, held)])
            first += pages
            rows.append(
                Row(
                    request=str(seat), seat=Seat(seat), start=start, tokens=(0,) * count,
                    state_in=None, state_out=SlotId(-1),
                )
            )  # fmt: skip
        cut = len(prefill)
        plan = StepPlan(step=0, prefill=tuple(rows[:cut]), decode=tuple(rows[cut:]))
        return staging.batch(plan, ()), sum(each)


def seen(prefill: list[tuple[int, int]], decode: list[int], most: int | None = None) -> int:
    """Pairs of a query and a position it attends to; at most `most` positions a query."""
    total = 0
    for start, count in [*prefill, *[(position, 1) for position in decode]]:
        end = start + count
        whole = end if most is None else max(start, min(end, most))  # these see all their past
        total += (start + 1 + whole) * (whole - start) // 2 + (most or 0) * (end - whole)
    return total


Spans = tuple[list[tuple[int, int]], list[int]]


def spans(shape: Shape) -> Iterator[tuple[str, Spans]]:
    """Batches that attention sees, and what to call them."""
    if shape.small:
        yield "rows 2, mixed", ([(64, 70)], [129])
        return
    for rows, position in ((64, 1279), (64, 8191), (1, 1279), (16, 1279), (256, 1279)):
        yield f"decode, rows {rows} at {position}", ([], [position] * rows)
    for start, count, rows in ((0, 8192, 1), (4096, 4096, 2), (0, 2048, 1), (28672, 3648, 1)):
        yield f"prefill, rows {rows}, tokens {count} from {start}", ([(start, count)] * rows, [])


def gqa(shape: Shape, device: torch.device, dtype: torch.dtype, label: str, at: Spans) -> Case:
    """`paged_gqa`."""
    make = Maker(shape, device, dtype)
    batch, pages = make.batch(*at)
    q = make.random(len(batch.positions), shape.heads, shape.dim)
    keys, values = (make.random(pages, shape.kv_heads, PAGE_SIZE, shape.dim) for _ in "kv")
    moved = 2 * shape.kv_heads * shape.dim * sum(batch.ends) + 2 * q.numel()
    return Case(
        "paged_gqa", label, shape, (q, keys, values),
        {"batch": batch, "scale": shape.dim**-0.5},
        moved * dtype.itemsize, 4 * shape.heads * shape.dim * seen(*at),
    )  # fmt: skip


def mla(shape: Shape, device: torch.device, dtype: torch.dtype, label: str, at: Spans) -> Case:
    """`paged_mla`, of the positions that an indexer would keep where there are more."""
    make = Maker(shape, device, dtype)
    batch, pages = make.batch(*at)
    tokens = len(batch.positions)
    q = make.random(tokens, shape.heads, shape.latent)
    latents = make.random(pages, PAGE_SIZE, shape.latent)
    selected = None
    if max(batch.ends) > shape.top_k:
        width = batch.page_table.shape[1] * PAGE_SIZE
        keep = min(1.0, shape.top_k / (sum(batch.ends) / len(batch.ends)))
        chance = torch.rand((tokens, width), generator=make.generator, device=device)
        selected = chance < keep
    pairs = seen(*at, most=shape.top_k)
    moved = 2 * q.numel() + shape.latent * min(pairs, sum(batch.ends))
    return Case(
        "paged_mla", label, shape, (q, latents),
        {"batch": batch, "scale": 256**-0.5, "selected": selected},
        moved * dtype.itemsize, 4 * shape.heads * shape.latent * pairs,
    )  # fmt: skip


def select(shape: Shape, device: torch.device, dtype: torch.dtype, label: str, at: Spans) -> Case:
    """`select`: scores of all pools, and the best of them."""
    make = Maker(shape, device, dtype)
    batch, pages = make.batch(*at)
    tokens, pool = len(batch.positions), shape.pool
    query = make.random(tokens, shape.index_heads, shape.index_dim)
    weights = make.random(tokens, shape.index_heads, dtype=torch.float32)
    pooled = make.random(pages, PAGE_SIZE // pool, shape.index_dim)
    pairs = seen(*at) // pool
    mask = tokens * batch.page_table.shape[1] * PAGE_SIZE
    moved = (query.numel() + shape.index_dim * sum(batch.ends) // pool) * dtype.itemsize
    return Case(
        "select", label, shape, (query, weights),
        {
            "pooled_pages": pooled, "batch": batch, "pool": pool, "top_k": shape.top_k,
            "scale": shape.index_dim**-0.5, "weight_scale": shape.index_heads**-0.5,
        },
        moved + mask, 2 * shape.index_heads * shape.index_dim * pairs,
    )  # fmt: skip


def pool_keys(
    shape: Shape, device: torch.device, dtype: torch.dtype, label: str, at: Spans
) -> Case:
    """`pool_keys`."""
    make = Maker(shape, device, dtype)
    batch, pages = make.batch(*at)
    tokens, pool, dim = len(batch.positions), shape.pool, shape.index_dim
    named = {
        "pooled_pages": make.random(pages, PAGE_SIZE // pool, dim),
        "tails": make.random(len(batch.ends), pool, 2, dim),
        "batch": batch,
    }
    args = (make.random(tokens, dim), make.random(tokens, dim), make.random(pool, dim))
    moved = tokens * dim * 2 + tokens * dim // pool
    return Case(
        "pool_keys", label, shape, args, named, moved * dtype.itemsize,
        changed=("pooled_pages", "tails"),
    )  # fmt: skip


def route(shape: Shape, device: torch.device, dtype: torch.dtype, tokens: int) -> Case:
    """`moe_route_sigmoid`."""
    make = Maker(shape, device, dtype)
    gate = make.matrix(shape.experts, shape.hidden).float()
    bias = make.random(shape.experts, scale=0.1, dtype=torch.float32)
    args = (make.random(tokens, shape.hidden), gate, bias)
    moved = tokens * shape.hidden * dtype.itemsize + gate.numel() * 4
    return Case(
        "moe_route_sigmoid", f"tokens {tokens}", shape, args,
        {"top_k": shape.per_token, "scale": 2.5, "renormalise": True},
        moved, 2 * tokens * gate.numel(),
    )  # fmt: skip


def experts(shape: Shape, device: torch.device, dtype: torch.dtype, tokens: int) -> Case:
    """`grouped_experts`, every token with experts of its own choice."""
    make = Maker(shape, device, dtype)
    scores = torch.rand((tokens, shape.experts), generator=make.generator, device=device)
    picked = scores.topk(shape.per_token, dim=-1).indices
    gate_up = make.matrix(shape.experts, 2 * shape.expert_inner, shape.hidden)
    down = make.matrix(shape.experts, shape.hidden, shape.expert_inner)
    one = gate_up[0].numel() + down[0].numel()
    weights = torch.full_like(picked, 1 / shape.per_token, dtype=torch.float32)
    moved = int(picked.unique().numel()) * one + 2 * tokens * shape.hidden
    return Case(
        "grouped_experts", f"tokens {tokens}", shape,
        (make.random(tokens, shape.hidden), weights, picked, gate_up, down), {"limit": 10.0},
        moved * dtype.itemsize, 2 * tokens * shape.per_token * one,
    )  # fmt: skip


def hyper(shape: Shape, device: torch.device, dtype: torch.dtype, tokens: int, op: str) -> Case:
    """`hyper_pre`, `hyper_post` or `hyper_mean`."""
    make, n, hidden = Maker(shape, device, dtype), shape.streams, shape.hidden
    streams = make.random(tokens, n, hidden)
    label, size = f"tokens {tokens}", streams.numel()
    if op == "hyper_mean":
        moved = size + tokens * hidden
        return Case(op, label, shape, (streams,), {}, moved * dtype.itemsize)
    if op == "hyper_pre":
        rows = (2 + n) * n
        fn = make.matrix(rows, n * hidden).float()
        base, scale = (make.random(k, scale=0.3, dtype=torch.float32) for k in (rows, 3))
        named = {"iterations": 20, "hyper_eps": 1e-6, "norm_eps": 1e-5}
        moved = (size + tokens * hidden) * dtype.itemsize + fn.numel() * 4
        return Case(op, label, shape, (streams, fn, base, scale), named, moved)
    post = make.random(tokens, n, dtype=torch.float32)
    mix = make.random(tokens, n, n, dtype=torch.float32)
    args = (make.random(tokens, hidden), streams, post, mix)
    return Case(op, label, shape, args, {}, (2 * size + tokens * hidden) * dtype.itemsize)


def norm(shape: Shape, device: torch.device, dtype: torch.dtype, tokens: int, op: str) -> Case:
    """`rms_norm` or `zero_centred_rms_norm` over the hidden size, or `swiglu` over the inner."""
    make = Maker(shape, device, dtype)
    if op == "swiglu":
        both = make.random(tokens, 2 * shape.inner)
        moved = 3 * tokens * shape.inner * dtype.itemsize
        return Case(op, f"tokens {tokens}", shape, (*both.chunk(2, -1), None), {}, moved)
    args = (make.random(tokens, shape.hidden), make.random(shape.hidden, scale=0.1), 1e-6)
    moved = 2 * tokens * shape.hidden * dtype.itemsize
    return Case(op, f"tokens {tokens}", shape, args, {}, moved)


def product(
    shape: Shape, device: torch.device, dtype: torch.dtype, rows: int, size: tuple[int, int]
) -> Case:
    """`linear` by a matrix of `size` (outputs, inputs)."""
    make = Maker(shape, device, dtype)
    args = (make.random(rows, size[1]), make.matrix(*size))
    moved = size[0] * size[1] + rows * sum(size)
    return Case(
        "linear", f"rows {rows}, {size[1]} to {size[0]}", shape, args, {},
        moved * dtype.itemsize, 2 * rows * size[0] * size[1],
    )  # fmt: skip


def sample(shape: Shape, device: torch.device, dtype: torch.dtype, rows: int, how: str) -> Case:
    """`sample` from fp32 logits: greedy, with noise, or with noise and filters."""
    make = Maker(shape, device, torch.float32)
    del dtype

    def every(value: float, kind: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=kind, device=device)

    none = every(0, torch.int64)[:0]
    warm, cut = how != "greedy", how == "filters"
    numbers = SamplingRows(
        temperature=every(0.8 if warm else 0.0, torch.float32),
        top_k=every(40 if cut else 0, torch.int64),
        top_p=every(0.9 if cut else 1.0, torch.float32),
        min_p=every(0.0, torch.float32),
        seed=torch.arange(rows, device=device),
        sample_index=every(0, torch.int64),
        position=every(100, torch.int64),
        repetition=every(1.0, torch.float32),
        presence=every(0.0, torch.float32),
        frequency=every(0.0, torch.float32),
        generated=None, in_prompt=None, bias_row=none, bias_token=none, bias_value=none.float(),
        forbidden_row=none, forbidden_token=none,
        any_filter=cut, any_penalty=False, any_noise=warm,
    )  # fmt: skip
    logits = make.random(rows, shape.vocab)
    return Case("sample", f"rows {rows}, {how}", shape, (logits, numbers), {}, 4 * logits.numel())


def built(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, str, Callable[[], Case]]]:
    """Every case of a model as (family, what it is a case of, how to make it): one at a time, they
    are large. Of each kind the most telling comes first.
    """
    where = (shape, device, dtype)
    for label, at in spans(shape):
        form = label.split(",")[0]
        if shape.kv_heads:
            yield "attention", form, partial(gqa, *where, label, at)
            continue
        yield "attention", form, partial(mla, *where, label, at)
        yield "indexer", f"pool_keys, {form}", partial(pool_keys, *where, label, at)
        if max(start + count for start, count in [*at[0], *[(p, 1) for p in at[1]]]) > shape.top_k:
            yield "indexer", f"select, {form}", partial(select, *where, label, at)
    for tokens in (3, 70) if shape.small else (64, 8192, 1, 256, 2048):
        if shape.experts:
            yield "moe", "route", partial(route, *where, tokens)
            yield "moe", "experts", partial(experts, *where, tokens)
        for op in ("hyper_pre", "hyper_post", "hyper_mean") if shape.streams else ():
            yield "hyper", op, partial(hyper, *where, tokens, op)
        of_family = "rms_norm" if shape.streams else "zero_centred_rms_norm"
        for op in (of_family, "swiglu"):
            yield "norms", op, partial(norm, *where, tokens, op)
    sizes = (
        (2 * shape.inner, shape.hidden),
        (shape.hidden, shape.inner),
        (shape.vocab, shape.hidden),
    )
    for rows in (3,) if shape.small else (64, 1, 16, 256):
        for size in sizes:
            yield "products", str(size), partial(product, *where, rows, size)
        for how in ("greedy", "noise", "filters"):
            yield "sampling", how, partial(sample, *where, rows, how)
