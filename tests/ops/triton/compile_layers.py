"""Compiles the layers' kernels for a GPU that need not be here; a live batch may compile none anew.

python -m tests.ops.triton.compile_layers [--sizes small,published] [--capability 90]

What this does not show: that a kernel is right, or fast.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bench.ops.compile import Compiled, NoDriver, usage
from millpond.ops.batch import ForwardBatch
from millpond.ops.triton import (
    attention,
    elementwise,
    hyper,
    indexer,
    latent,
    layer_choices,
    moe,
    norms,
    sampling,
    thin,
    writes,
)
from tests.ops.test_sampling import Ask, rows_of
from tests.ops.triton.layers import mixed_batch

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model, or of two halves of two models."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    rotary: int
    latent_heads: int
    rank: int
    index_heads: int
    index_dim: int
    experts: int
    middle: int
    top_k: int
    vocabulary: int


SIZES = {
    "small": Sizes(64, 4, 2, 32, 16, 4, 64, 4, 32, 8, 32, 2, 512),
    "published": Sizes(4096, 16, 2, 256, 64, 64, 512, 32, 128, 288, 2048, 8, 154_880),
}

BATCHES = (
    {"decode": [(70, 1)], "tables": [[1, 2]]},
    {
        "decode": [(70, 1)] * 16,
        "verify": [(5, 1), (0, -1)],
        "tables": [[1, 2, *[-1] * 14]] * 17 + [[-1]],
    },
    {"prefill": [(0, 64), (64, 3)], "decode": [(150, 1)], "tables": [[1], [1, 2], [3, 1, 2]]},
    {"prefill": [(0, 1)], "tables": [[1]]},
)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def view(*shape: int) -> torch.Tensor:
    """Tokens cut out of wider ones, one token into them."""
    size = torch.Size(shape[1:]).numel()
    return torch.zeros(shape[0] + 1, size + 64, dtype=BF16)[1:, 32 : 32 + size].view(shape)


def paged(s: Sizes, batch: ForwardBatch) -> None:
    """What reads pages, seats and positions."""
    t = len(batch.positions)
    keys, latents = zeros(4, s.kv_heads, 64, s.dim), zeros(4, 64, s.rank)
    where = batch.token_page, batch.token_offset
    writes.write_kv(keys, view(t, s.kv_heads, s.dim), *where)
    writes.write_kv(latents, view(t, s.rank), *where)
    both, angles = view(t, s.heads, 2, s.dim), zeros(t, s.rotary // 2, dtype=torch.float32)
    for query in (both[:, :, 0], None):
        writes.turn_and_write(
            query, view(t, s.kv_heads, s.dim), view(t, s.kv_heads, s.dim), zeros(s.dim),
            zeros(s.dim), angles, angles, eps=1e-6, key_pages=keys, value_pages=keys.clone(),
            token_page=where[0], token_offset=where[1],
        )  # fmt: skip
    attention.paged_gqa(
        view(t, s.heads, s.dim), keys, keys.clone(), batch=batch, scale=0.1, gate=both[:, :, 1]
    )
    q, mask = view(t, s.latent_heads, s.rank), zeros(t, 64 * batch.page_table.shape[1]).bool()
    for selected in (None, mask):
        latent.paged_mla(q, latents, batch=batch, scale=0.1, selected=selected)
    pooled, tails = zeros(4, 16, s.index_dim), zeros(20, 8, 2, s.index_dim)
    key, bias = view(t, s.index_dim), zeros(4, s.index_dim)
    indexer.pool_keys(
        key, view(t, s.index_dim), bias, pooled_pages=pooled, tails=tails, batch=batch
    )
    indexer.select(
        view(t, s.index_heads, s.index_dim), zeros(t, s.index_heads, dtype=torch.float32),
        pooled_pages=pooled, batch=batch, pool=4, top_k=8, scale=0.1, first=1,
    )  # fmt: skip


def by_token(s: Sizes, t: int) -> None:
    """What knows tokens only."""
    x, weight = view(t, s.hidden), zeros(s.hidden)
    norms.rms_norm(x, weight, 1e-5)
    short, of_head = view(t, s.heads, s.dim), zeros(s.dim)
    norms.zero_centred_rms_norm(short, of_head, 1e-6)
    norms.layer_norm(view(t, s.index_dim), zeros(s.index_dim), zeros(s.index_dim), 1e-6)
    norms.add_norm(x, x, weight, eps=1e-5, zero_centred=False)
    norms.gated_rms_norm_silu(short, short, of_head.float(), 1e-6)
    norms.gated_rms_norm_sigmoid(short, short, of_head.float(), 1e-6)
    elementwise.sigmoid_gate(short, short)
    elementwise.swiglu(x, x)
    elementwise.swiglu(x, x, 10.0)
    angles = zeros(t, s.rotary // 2, dtype=torch.float32)
    elementwise.rope_tables(torch.zeros(t, dtype=torch.int64), s.rotary, 1e7)
    elementwise.rotate_partial(short, angles, angles)
    streams, base = zeros(t, 4, s.hidden), zeros(24, dtype=torch.float32)
    post, mix, y = hyper.hyper_pre(
        streams, zeros(24, 4 * s.hidden, dtype=torch.float32), base, base[:3],
        iterations=20, hyper_eps=1e-6, norm_eps=1e-5,
    )  # fmt: skip
    hyper.hyper_post(y, streams, post, mix)
    hyper.hyper_mean(streams)
    gate = torch.empty((s.experts, s.hidden), dtype=BF16)
    weights, experts = moe.moe_route_softmax(x, gate, top_k=s.top_k)
    moe.moe_route_sigmoid(
        x, gate.float(), zeros(s.experts), top_k=s.top_k, scale=2.5, renormalise=True
    )
    for layer_choices.CROWD in (10**6, 0):  # few choices of an expert, and many
        moe.grouped_experts(
            x, weights, experts, torch.empty((s.experts, 2 * s.middle, s.hidden), dtype=BF16),
            torch.empty((s.experts, s.hidden, s.middle), dtype=BF16), limit=10.0, shared=x,
        )  # fmt: skip
    products(s, x)
    for ask in (Ask(top_k=20, top_p=0.9), Ask(temperature=0.0), Ask(seed=1)):
        rows = rows_of(*[ask] * t, vocab=s.vocabulary)
        sampling.sample(torch.zeros(t, s.vocabulary), rows)


def products(s: Sizes, x: torch.Tensor) -> None:
    """Those of one token, with all that may stand around them; logits."""
    norm, named = zeros(s.hidden), {"eps": 1e-6, "zero_centred": True}
    weight = zeros(2 * s.middle, s.hidden)
    if len(x) == 1:
        for choice in (layer_choices.FEW_OUTPUTS, layer_choices.OUTPUTS):
            thin.thin_linear(x, weight, choice)
            thin.thin_norm_linear(x, x, norm, weight, choice, **named)
        thin.thin_norm_swiglu(x, x, norm, weight, layer_choices.PAIRS, limit=None, **named)
    thin.wide_linear(x, weight, layer_choices.HEAD, dtype=torch.float32)


EXPECTED = {
    "splits.join": 2,  # of grouped queries with a gate, and of latents
    "writes._write_kv": 2,
    "writes._turn": 2,  # with and without queries
    "elementwise._swiglu": 2,  # with and without a limit
    "indexer._scores": 2,  # prompt rows, single tokens
    "moe._choose": 2,
    "moe._order": 2,  # few choices of an expert, and many
    "moe._up": 2,
    "moe._down": 2,
    "thin._thin": 5,  # few outputs and many, with a norm or not; pairs
    "thin._wide": 2,  # up to 16 tokens, and up to 64
    "narrow._parts": 3,  # two routers and the streams
    "norms._vectors": 6,
}
"""How many forms of a kernel one model's sizes make; one of all others: so one of latent attention,
whether a batch selects or not.
"""


def calls(s: Sizes) -> Iterator[Callable[[], None]]:
    """Every op with live batches that must share their kernels."""
    for spec in BATCHES:
        yield lambda spec=spec: paged(s, mixed_batch(**spec))
    for tokens in (1, 3, 64):
        yield lambda tokens=tokens: by_token(s, tokens)


def main(arguments: list[str]) -> int:
    """Exit 1 when a kernel came in more forms than the sizes make."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", default="published")
    parser.add_argument("--capability", type=int, default=90)
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    driver.set_active(NoDriver(chosen.capability))
    again = 0
    for name in chosen.sizes.split(","):
        compiled = Compiled()
        compiled.install()
        for call in calls(SIZES[name]):
            call()
        JITFunction.run = compiled.launch
        for label, kernels in compiled.kernels.items():
            short = label.removeprefix("millpond.ops.triton.")
            for kernel in kernels:
                registers, stack = usage(kernel)
                meta = kernel.metadata
                print(
                    f"{short:<24} {registers:4d} registers {stack:5d} B spilled"
                    f" {meta.shared:7d} B shared {meta.num_warps:3d} warps"
                )
            if len(kernels) != EXPECTED.get(short, 1):
                print(f"{short}: {len(kernels)} forms, expected {EXPECTED.get(short, 1)}")
                again += 1
    return 1 if again else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
