"""The functions of fla-core that do the same as our ops, where that package can be imported.

Knows their signatures (0.6.0). They take states by value; copying those out of slots and back is
not part of what is timed, and inputs are made contiguous for them beforehand. Beside `mix_decode`
stand three of its convolutions, one for queries, keys and values each, as its layers have them,
then its recurrent form; beside `delta_prefill` its chunk form.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from bench.ops.cases import CONV_WIDTH, Case
from millpond.ops.batch import RowSlots
from millpond.ops.reference.delta import Gate

CONVOLUTION = ("fla.modules.causal_conv1d", "causal_conv1d_update")
NAMES = {
    ("delta_prefill", True): ("fla.ops.kda", "chunk_kda"),
    ("mix_decode", True): ("fla.ops.kda", "fused_recurrent_kda"),
    ("delta_prefill", False): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ("mix_decode", False): ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
}


def installed() -> str | None:
    """The version of fla-core, or None."""
    if find_spec("fla") is None:
        return None
    return str(getattr(import_module("fla"), "__version__", "of unknown version"))


def peer(case: Case) -> Callable[[], torch.Tensor] | None:
    """A call that gives the same outputs [T, H, V], or None: it has no peer, or not of these rows.

    Of `mix_decode`: rows of one token each.
    """
    home = NAMES.get((case.op, case.shape.by_channel))
    if home is None or installed() is None:
        return None
    rows = case.named["rows"]
    if not isinstance(rows, RowSlots) or (
        case.op == "mix_decode" and rows.lengths != (1,) * rows.num_rows
    ):
        return None
    function = getattr(import_module(home[0]), home[1])
    if case.op == "mix_decode":
        update = getattr(import_module(CONVOLUTION[0]), CONVOLUTION[1])
        return _tokens(case, rows, update, function)
    return _chunks(case, rows, function)


def _arguments(case: Case, rows: RowSlots) -> dict[str, Any]:
    """What both forms are told."""
    bank, gate = case.named["bank"], case.named["gate"]
    assert isinstance(bank, torch.Tensor)
    assert isinstance(gate, Gate)
    bounded = {} if gate.lower_bound is None else {"lower_bound": gate.lower_bound}
    return bounded | {
        "scale": case.shape.k_dim**-0.5,
        "initial_state": bank.index_select(0, rows.state_in).contiguous(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": gate.a_log,
        "dt_bias": gate.dt_bias,
        "state_v_first": True,
    }


def _chunks(case: Case, rows: RowSlots, function: Callable[..., Any]) -> Callable[[], torch.Tensor]:
    q, k, v, g, beta = (x[None].contiguous() for x in case.args)
    arguments = _arguments(case, rows)
    arguments["cu_seqlens"] = rows.cu_seqlens if rows.num_rows > 1 else None
    if case.shape.by_channel:
        arguments["safe_gate"] = True

    def call() -> torch.Tensor:
        with torch.inference_mode():
            out, _ = function(q=q, k=k, v=v, g=g, beta=beta, **arguments)
        return out[0]

    return call


def _tokens(
    case: Case, rows: RowSlots, update: Callable[..., Any], function: Callable[..., Any]
) -> Callable[[], torch.Tensor]:
    """Rows are a batch of one token each."""
    shape = case.shape
    keys, values = shape.key_heads * shape.k_dim, shape.heads * shape.v_dim
    sizes = (keys, keys, values)
    x, weight, decay, beta = case.args
    window = case.named["window"]
    assert isinstance(window, torch.Tensor)
    inputs = [part.contiguous()[:, None] for part in x.split(sizes, -1)]
    taps = [part.contiguous() for part in weight.split(sizes, 0)]
    # It keeps as many inputs as there are taps, and drops the oldest before it begins.
    held = x.new_zeros(rows.num_rows, x.shape[1], CONV_WIDTH)
    held[..., 1:] = window.index_select(0, rows.state_in)
    caches = [part.contiguous() for part in held.split(sizes, 1)]
    heads = [(shape.key_heads, shape.k_dim)] * 2 + [(shape.heads, shape.v_dim)]
    g, weights = decay[:, None].contiguous(), beta[:, None].contiguous()
    arguments = _arguments(case, rows)
    first = [cache.clone() for cache in caches]

    def call() -> torch.Tensor:
        with torch.inference_mode():
            q, k, v = (
                update(x=one, cache=cache, weight=tap, activation="silu")[0].unflatten(-1, size)
                for one, cache, tap, size in zip(inputs, caches, taps, heads, strict=True)
            )
            out, _ = function(q=q, k=k, v=v, g=g, beta=weights, **arguments)
        return out[:, 0]

    call()  # tuning runs it several times
    for cache, before in zip(caches, first, strict=True):
        cache.copy_(before)
    return call
