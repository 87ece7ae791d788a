"""The torch backend: the reference of every op, on any device torch knows."""

from __future__ import annotations

import torch

from millpond.ops.bind import Backend
from millpond.ops.reference import (
    attention,
    conv,
    delta,
    dense,
    fused,
    hyper,
    indexer,
    linear,
    moe,
    sampling,
    slots,
    staging,
    steps,
    verify,
)


def unusable(device: torch.device) -> str | None:
    """Never: it needs nothing but torch."""
    del device
    return None


BACKEND = Backend(
    name="torch",
    rank=0,
    unusable=unusable,
    export_granularity=delta.EXPORT_GRANULARITY,
    ops={
        "linear": linear.linear,
        "linear_float": fused.linear_float,
        "norm_linear": fused.norm_linear,
        "linear_swiglu": fused.linear_swiglu,
        "norm_swiglu": fused.norm_swiglu,
        "gated_norm_linear": fused.gated_norm_linear,
        "add_norm": fused.add_norm,
        "linear_by_head": linear.linear_by_head,
        "conv_prefill": conv.conv_prefill,
        "delta_prefill": delta.delta_prefill,
        "boundary_store": slots.boundary_store,
        "mix_decode": steps.mix_decode,
        "mix_verify": steps.mix_verify,
        "hidden_before_verify": verify.hidden_before_verify,
        "boundary_verify": verify.boundary_verify,
        "write_kv": attention.write_kv,
        "turn_and_write": attention.turn_and_write,
        "paged_gqa": attention.paged_gqa,
        "paged_mla": attention.paged_mla,
        "pool_keys": indexer.pool_keys,
        "select": indexer.select,
        "embedding": dense.embedding,
        "rms_norm": dense.rms_norm,
        "zero_centred_rms_norm": dense.zero_centred_rms_norm,
        "layer_norm": dense.layer_norm,
        "swiglu": dense.swiglu,
        "rope_tables": dense.rope_tables,
        "rotate_partial": dense.rotate_partial,
        "hyper_pre": hyper.hyper_pre,
        "hyper_post": hyper.hyper_post,
        "hyper_mean": hyper.hyper_mean,
        "moe_route_softmax": moe.moe_route_softmax,
        "moe_route_sigmoid": moe.moe_route_sigmoid,
        "grouped_experts": moe.grouped_experts,
        "stage_live": staging.stage_live,
        "stage_singles": staging.stage_singles,
        "settle": staging.settle,
        "keep_counters": staging.keep_counters,
        "sample": sampling.sample,
        "token_logprobs": sampling.token_logprobs,
    },
)
