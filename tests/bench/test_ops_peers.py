"""What the benchmark gives to fla-core's functions, by stand-ins that compute as those document."""

from __future__ import annotations

import sys
import time
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from bench.ops import cases, measure, peers
from millpond.ops.reference import steps
from millpond.ops.reference.delta import Gate, delta_decode, delta_prefill
from tests.ops.batches import make_rows

CPU, FP32 = torch.device("cpu"), torch.float32
TOLD = {
    "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "A_log", "dt_bias", "state_v_first",
}  # fmt: skip


def causal_conv1d_update(
    x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, 1, D]; cache [N, D, W] loses its oldest."""
    assert activation == "silu"
    assert all(t.is_contiguous() for t in (x, cache, weight))
    cache.copy_(torch.cat((cache[..., 1:], x.mT), -1))
    return torch.nn.functional.silu((cache * weight).sum(-1))[:, None], cache


def folded(op, q, k, v, g, beta, rows, told):  # type: ignore[no-untyped-def]
    """Outputs of packed tokens and final states, both by the reference."""
    assert set(told) - {"lower_bound", "safe_gate", "cu_seqlens"} == TOLD
    assert told["scale"] == q.shape[-1] ** -0.5
    bank = told["initial_state"].clone()
    gate = Gate(told["A_log"], told["dt_bias"], told.get("lower_bound"))
    return op(q, k, v, g, beta, gate=gate, bank=bank, rows=rows), bank


def chunk(q, k, v, g, beta, **told):  # type: ignore[no-untyped-def]
    ends = told["cu_seqlens"]
    lengths = [q.shape[1]] if ends is None else ends.diff().tolist()
    slots = list(range(len(lengths)))
    rows = make_rows(lengths, slots, slots)
    out, states = folded(delta_prefill, q[0], k[0], v[0], g[0], beta[0], rows, told)
    return out[None], states


def fused_recurrent(q, k, v, g, beta, **told):  # type: ignore[no-untyped-def]
    slots = list(range(len(q)))
    rows = make_rows([1] * len(q), slots, slots)
    parts = (x[:, 0] for x in (q, k, v, g, beta))
    out, states = folded(delta_decode, *parts, rows, told)
    return out[:, None], states


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "fla.modules.causal_conv1d": {"causal_conv1d_update": causal_conv1d_update},
        "fla.ops.kda": {"chunk_kda": chunk, "fused_recurrent_kda": fused_recurrent},
        "fla.ops.gated_delta_rule": {
            "chunk_gated_delta_rule": chunk,
            "fused_recurrent_gated_delta_rule": fused_recurrent,
        },
    }
    for name, functions in modules.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "installed", lambda: "0.6.0")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", ["small-kda", "small-gdn"])
def test_a_peer_is_given_what_makes_the_same_outputs(name: str) -> None:
    where = (cases.SHAPES[name], CPU, FP32)
    decode = cases.mix_decode(*where, [1] * 3, [])
    call = peers.peer(decode)
    assert call is not None
    assert measure.difference(call(), measure.outcome(decode, steps.mix_decode)[0]) < 1e-6
    assert (
        measure.difference(call(), measure.outcome(decode, steps.mix_decode)[0]) > 1e-3
    )  # moved on
    for lengths in ([70], [70, 64]):
        prompts = cases.prefill(*where, lengths, [])
        call = peers.peer(prompts)
        assert call is not None
        assert measure.difference(call(), measure.outcome(prompts, delta_prefill)[0]) < 1e-6


@pytest.mark.usefixtures("stand_in")
def test_rows_that_a_peer_cannot_take_have_none() -> None:
    where = (cases.SHAPES["small-kda"], CPU, FP32)
    assert peers.peer(cases.mix_decode(*where, [1, 2], [])) is None
    assert peers.peer(cases.mix_verify(*where, 2, 1, 1)) is None
    assert peers.peer(cases.conv(*where, [70], [])) is None


@pytest.mark.usefixtures("stand_in")
def test_a_case_is_timed_beside_its_peer_if_that_is_ready_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "serving", measure.REFERENCE.ops.__getitem__)
    monkeypatch.setattr(measure, "captured", lambda call: call)
    monkeypatch.setattr(measure, "microseconds", lambda call: (call(), 5.0)[1])
    case = cases.mix_decode(cases.SHAPES["small-gdn"], CPU, FP32, [1] * 3, [])
    times = measure.timed(case, 60.0)
    assert (times.graph, times.launch, times.peer, times.peer_note) == (5.0, 5.0, 5.0, "")
    assert times.peer_error is not None
    assert times.peer_error < 1e-6
    monkeypatch.setattr(peers, "peer", lambda case: time.sleep(20.0))
    times = measure.timed(case, 0.2)
    assert (times.graph, times.peer, times.peer_note) == (5.0, None, "more than 0 s to tune")

    def broken(case: cases.Case) -> None:
        raise TypeError("another version")

    monkeypatch.setattr(peers, "peer", broken)
    assert measure.timed(case, 60.0).peer_note == "TypeError"
