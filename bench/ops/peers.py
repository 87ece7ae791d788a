"""The functions of fla-core that do the same as our ops, where that package can be imported.

Knows their signatures (0.6.0). They take states by value; copying those out of slots and back is
not part of what is timed, and inputs are made contiguous for them beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

from bench.ops.cases import Case
from millpond.ops.batch import RowSlots, VerifyRows
from millpond.ops.reference.delta import Gate

NAMES = {
    ("delta_prefill", True): ("fla.ops.kda", "chunk_kda"),
    ("delta_decode", True): ("fla.ops.kda", "fused_recurrent_kda"),
    ("delta_prefill", False): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ("delta_decode", False): ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
}


def installed() -> str | None:
    """The version of fla-core, or None."""
    if find_spec("fla") is None:
        return None
    return str(getattr(import_module("fla"), "__version__", "of unknown version"))


def peer(case: Case) -> Callable[[], tuple[torch.Tensor, torch.Tensor]] | None:
    """A call of the matching function: outputs [1, T, H, V] and final states [N, H, V, K]."""
    home = NAMES.get((case.op, case.shape.by_channel))
    if home is None or installed() is None:
        return None
    function = getattr(import_module(home[0]), home[1])
    rows, bank, gate = (case.named[name] for name in ("rows", "bank", "gate"))
    assert isinstance(rows, RowSlots)
    assert not isinstance(rows, VerifyRows)
    assert isinstance(bank, torch.Tensor)
    assert isinstance(gate, Gate)
    q, k, v, g, beta = (x[None].contiguous() for x in case.args)
    arguments = {
        "scale": case.shape.k_dim**-0.5,
        "initial_state": bank.index_select(0, rows.state_in).contiguous(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": gate.a_log,
        "dt_bias": gate.dt_bias,
        "state_v_first": True,
        "cu_seqlens": rows.cu_seqlens if rows.num_rows > 1 else None,
    }
    if gate.lower_bound is not None:
        arguments["lower_bound"] = gate.lower_bound
        if case.op == "delta_prefill":
            arguments["safe_gate"] = True

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            out, state = function(q=q, k=k, v=v, g=g, beta=beta, **arguments)
        return out, state

    return call
