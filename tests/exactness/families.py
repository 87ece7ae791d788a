"""Small random models of both families, from nothing but a configuration; each is built once.

A `Kind` says where and how one computes: the same weights on any device, in any dtype.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from millpond.memory.layout import ModelLayout
from millpond.models.base import Description, Model, describe
from millpond.models.weights import Dummy, Weights
from millpond.ops.bind import AUTO, Bound, bind
from millpond.runtime.graphs import CallAgain
from millpond.runtime.worker import Worker
from tests.support.products import with_products
from tests.support.recording import RecordingExecutor, Truth

VOCAB = 96
MAX_POSITION = 1024

GLM: dict[str, Any] = dict(
    model_type="glm5_next_text",
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=4,
    num_nextn_predict_layers=1,
    intermediate_size=96,
    moe_intermediate_size=32,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    layer_types=["linear_attention"] * 2 + ["deepseek_sparse_attention", "linear_attention"],
    mlp_layer_types=["dense", "dense", "sparse", "dense"],
    linear_attn_config=dict(
        num_heads=2, head_dim=32, short_conv_kernel_size=4, gate_lower_bound=-5.0
    ),
    num_attention_heads=2,
    num_key_value_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=0,
    v_head_dim=32,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=64,  # sparse from token 68 on
    index_kpool=4,
    hc_mult=2,
    hc_sinkhorn_iters=4,
    hc_eps=1e-6,
    swiglu_limit=10.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=MAX_POSITION,
    tie_word_embeddings=True,
    eos_token_id=[VOCAB - 1],
)
QWEN: dict[str, Any] = dict(
    model_type="qwen3_5_moe_text",
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=4,
    mtp_num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    attn_output_gate=True,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
    max_position_embeddings=MAX_POSITION,
    tie_word_embeddings=True,
    eos_token_id=VOCAB - 1,
)
FAMILIES = {"glm": GLM, "qwen": QWEN}
OTHERS: dict[str, dict[str, Any]] = {
    "glm other": GLM
    | dict(
        linear_attn_config=dict(
            num_heads=2, head_dim=32, short_conv_kernel_size=3, gate_lower_bound=None,
            safe_gate=False,
        ),
        n_shared_experts=2,
        norm_topk_prob=False,
        routed_scaling_factor=0.5,
        swiglu_limit=0.3,
        index_kpool=8,
        hc_mult=2,
        tie_word_embeddings=False,
    ),
    "qwen dense": {key: value for key, value in QWEN.items() if "expert" not in key}
    | dict(
        model_type="qwen3_5_text",
        intermediate_size=96,
        linear_num_key_heads=4,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
"""What the two above do not do: other branches of both families."""


@dataclass(frozen=True)
class Kind:
    """A family's model, where it computes and in what.

    `products` says how it multiplies: see `tests.support.products`. `recorded`: steps of live rows
    are replayed where two may be in flight, as a graph on a GPU.
    """

    family: str
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    products: str = "own"
    backend: str = AUTO
    recorded: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.family} on {self.device} in {dtype}"


@dataclass(frozen=True)
class Built:
    """A model and what a worker needs to know of it."""

    model: Model
    description: Description
    ops: Bound
    kind: Kind

    def layout(self, num_drafts: int = 0) -> ModelLayout:
        """What slots, pages and seats hold when a step verifies so many drafts."""
        return self.description.layout(self.kind.dtype, num_drafts)


@cache
def built(which: str | Kind) -> Built:
    """The model, weights drawn from a fixed seed on the CPU, then moved."""
    kind = which if isinstance(which, Kind) else Kind(which)
    device = torch.device(kind.device)
    with TemporaryDirectory() as folder:
        config = {**FAMILIES, **OTHERS}[kind.family]
        (Path(folder) / "config.json").write_text(json.dumps(config))
        description = describe(Path(folder))
    ops = with_products(bind(device, backend=kind.backend), kind.products)
    family, config = description.family, description.config
    drawn = Dummy(lambda *what: family.draw(config, *what), seed=3)
    model = family.build(config, Weights(drawn, dtype=kind.dtype, device=device), ops)
    return Built(model, description, ops, kind)


def executor(
    family: str | Kind,
    truth: Truth,
    where: str,
    *,
    num_slots: int = 24,
    num_pages: int = 64,
    num_seats: int = 8,
    num_drafts: int = 0,
    count_writes: bool = False,
    runs_ahead: bool = False,
) -> RecordingExecutor:
    """A fresh rank with poisoned arenas. Writes of kernels cannot be counted, only compared."""
    found = built(family)
    device = torch.device(found.kind.device)
    worker = Worker(
        found.model,
        found.layout(num_drafts),
        device=device,
        num_slots=num_slots,
        num_pages=num_pages,
        num_seats=num_seats,
        vocab_size=VOCAB,
        max_position=MAX_POSITION,
        ops=found.ops,
        num_draft_tokens=num_drafts,
        eos_token_ids=(VOCAB - 1,),
        num_threads=1,
        debug_poison=True,
        runs_ahead=runs_ahead,
    )
    if found.kind.recorded and runs_ahead:
        worker.runner.capture(capturer=CallAgain() if device.type == "cpu" else None)
    counts = count_writes and device.type == "cpu"
    return RecordingExecutor(worker, truth, where, count_writes=counts)
