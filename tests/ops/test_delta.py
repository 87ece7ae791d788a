"""The delta rule: both forms against the per-token formula in fp64, outputs and every state."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from millpond.ops.reference.delta import Gate, chunked_delta, delta_decode, delta_prefill
from tests.ops.batches import make_rows, strided_bank

SLOTS = 16


class Layer:
    """Random inputs of one layer; GDN has a scalar decay and fewer key heads, KDA neither."""

    def __init__(self, kind: str, tokens: int, dtype: torch.dtype = torch.float32) -> None:
        made = torch.Generator().manual_seed(tokens)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made)

        key_heads, self.heads, self.k_dim, self.v_dim = (
            (2, 6, 16, 24) if kind == "gdn" else (3, 3, 32, 16)
        )
        per_head = () if kind == "gdn" else (self.k_dim,)
        self.q = random(tokens, key_heads, self.k_dim).to(dtype)
        self.k = random(tokens, key_heads, self.k_dim).to(dtype)
        self.v = random(tokens, self.heads, self.v_dim).to(dtype)
        self.decay = (random(tokens, self.heads, *per_head) * 3).to(dtype)
        self.beta = random(tokens, self.heads).to(dtype)
        bias = self.heads if kind == "gdn" else self.heads * self.k_dim
        bound = {"gdn": None, "kda": -5.0, "kda_softplus": None}[kind]
        self.gate = Gate(random(self.heads) * 0.5 - 1.0, random(bias), bound)
        self.bank = strided_bank(SLOTS, (self.heads, self.v_dim, self.k_dim))

    def run(self, op, rows, at: slice = slice(None), bank: torch.Tensor | None = None):
        args = (x[at] for x in (self.q, self.k, self.v, self.decay, self.beta))
        bank = self.bank if bank is None else bank
        return op(*args, gate=self.gate, bank=bank, rows=rows)

    def formula(self, s0: torch.Tensor, at: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [T, H, V] and the state after every token [T, H, V, K], in fp64."""
        repeat = self.heads // self.q.shape[1]

        def unit(x: torch.Tensor) -> torch.Tensor:
            x = x[at].double().repeat_interleave(repeat, 1)
            return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)

        q, k, v = unit(self.q) * self.k_dim**-0.5, unit(self.k), self.v[at].double()
        raw = self.decay[at].double()
        raw = raw + self.gate.dt_bias.double().view(1, *raw.shape[1:])
        rate = self.gate.a_log.double().exp().view(1, -1, *[1] * (raw.ndim - 2))
        if self.gate.lower_bound is None:
            g = -rate * torch.nn.functional.softplus(raw)
        else:
            g = self.gate.lower_bound * torch.sigmoid(rate * raw)
        beta = torch.sigmoid(self.beta[at].double())
        s, outs, states = s0.double(), [], []
        for t in range(len(v)):
            kept = g[t].exp()[:, None, :] if g.ndim == 3 else g[t].exp()[:, None, None]
            s = s * kept
            error = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", s, k[t]))
            s = s + torch.einsum("hv,hk->hvk", error, k[t])
            outs.append(torch.einsum("hvk,hk->hv", s, q[t]))
            states.append(s)
        return torch.stack(outs), torch.stack(states)


KINDS = ["gdn", "kda", "kda_softplus"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", [delta_prefill, delta_decode])
def test_both_forms_are_the_formula_in_outputs_states_and_exports(kind: str, op) -> None:
    lengths = [130, 63, 64, 65, 31, 1]
    sources, targets = [3, 3, -1, 5, 6, 4], [7, 8, 9, 5, -1, 10]
    exports = [(0, 64, 11), (0, 128, 12), (2, 64, 13), (3, 64, 0), (3, 64, -1)]
    layer = Layer(kind, sum(lengths))
    before = layer.bank.clone()
    rows = make_rows(lengths, sources, targets, exports)
    o = layer.run(op, rows)
    at, expected = 0, {}
    for row, length in enumerate(lengths):
        source = sources[row]
        s0 = before[source] if source >= 0 else torch.zeros_like(before[0])
        outs, states = layer.formula(s0, slice(at, at + length))
        torch.testing.assert_close(o[at : at + length].double(), outs, atol=2e-6, rtol=2e-6)
        expected[targets[row]] = states[-1]
        expected |= {slot: states[end - 1] for r, end, slot in exports if r == row}
        at += length
    del expected[-1]
    for slot in range(SLOTS):
        if slot in expected:
            torch.testing.assert_close(
                layer.bank[slot].double(), expected[slot], atol=4e-6, rtol=4e-6
            )
        else:
            assert torch.equal(layer.bank[slot], before[slot])
    ends = [(targets[r], n) for r, n in enumerate(lengths)] + [(s, e) for _, e, s in exports]
    assert rows.written.agreed() == {pair for pair in ends if pair[0] >= 0}


@pytest.mark.parametrize("kind", KINDS)
def test_per_token_rows_may_be_cut_anywhere_and_give_the_same_bytes(kind: str) -> None:
    layer = Layer(kind, 9)
    whole, cut = layer.bank.clone(), layer.bank.clone()
    rows = make_rows([9], [3], [3], [(0, 5, 8)])
    o = layer.run(delta_decode, rows, bank=whole)
    parts, source = [], 3
    for begin, end in ((0, 1), (1, 5), (5, 9)):
        target = {5: 8}.get(end, 2)
        rows = make_rows([end - begin], [source], [target])
        parts.append(layer.run(delta_decode, rows, slice(begin, end), bank=cut))
        source = target
    assert torch.equal(torch.cat(parts), o)
    assert torch.equal(cut[2], whole[3])
    assert torch.equal(cut[8], whole[8])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_cut_on_the_grid_gives_the_same_bytes_as_in_one_piece(kind: str) -> None:
    layer = Layer(kind, 64 * 3 + 17)
    whole, cut = layer.bank.clone(), layer.bank.clone()
    rows = make_rows([209], [-1], [1], [(0, 64, 2), (0, 128, 3), (0, 192, 4)])
    o = layer.run(delta_prefill, rows, bank=whole)
    first = layer.run(delta_prefill, make_rows([128], [-1], [3], [(0, 64, 2)]), slice(128), cut)
    second = layer.run(delta_prefill, make_rows([64], [3], [4]), slice(128, 192), cut)
    third = layer.run(delta_prefill, make_rows([17], [4], [1]), slice(192, 209), cut)
    assert torch.equal(torch.cat((first, second, third)), o)
    for slot in (1, 2, 3, 4):
        assert torch.equal(cut[slot], whole[slot])


def spiky(shape: tuple[int, ...], steep: float) -> torch.Tensor:
    made = torch.Generator().manual_seed(3)
    return -torch.where(torch.rand(shape, generator=made) < 0.2, steep, 0.003)


@pytest.mark.parametrize(
    "g",
    [
        pytest.param(torch.full((64, 2, 16), -5.0), id="channel decay at its bound"),
        pytest.param(torch.full((64, 2), -1000.0), id="head decay that erases all"),
        pytest.param(torch.zeros(64, 2), id="no decay"),
        pytest.param(spiky((64, 2), 900.0), id="steep head decay among small ones"),
        pytest.param(spiky((64, 2, 16), 80.0), id="steep channel decay among small ones"),
    ],
)
def test_extreme_decay_neither_overflows_nor_loses_what_stays(g: torch.Tensor) -> None:
    torch.manual_seed(4)
    q, k = (normalize(torch.randn(64, 2, 16), dim=-1) for _ in range(2))
    v, beta, s = torch.randn(64, 2, 8), torch.rand(64, 2), torch.randn(2, 8, 16)
    o, after = chunked_delta(
        *(x.transpose(0, 1)[None].contiguous() for x in (q, k, v, g, beta)), s[None], (1,)
    )
    state, factors = s.double(), g.double().exp()
    for t in range(64):
        kept = factors[t][:, None, :] if g.ndim == 3 else factors[t][:, None, None]
        state = state * kept
        error = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t].double()))
        state = state + torch.einsum("hv,hk->hvk", error, k[t].double())
        expected = torch.einsum("hvk,hk->hv", state, q[t].double())
        torch.testing.assert_close(o[0, :, t].double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(after[0].double(), state, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("op", [delta_prefill, delta_decode])
def test_no_slot_is_the_zero_state_and_is_never_written(op) -> None:
    layer = Layer("kda", 70)
    layer.bank.fill_(float("nan"))
    o = layer.run(op, make_rows([70], [-1], [-1], [(0, 64, -1)]))
    torch.testing.assert_close(
        o.double(), layer.formula(torch.zeros(3, 16, 32), slice(None))[0], atol=2e-6, rtol=2e-6
    )
    assert layer.bank.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", [delta_prefill, delta_decode])
def test_model_dtype_rounds_the_output_once_and_the_state_never(kind: str, op) -> None:
    layer = Layer(kind, 66, torch.bfloat16)
    before = layer.bank[3].clone()
    o = layer.run(op, make_rows([66], [3], [4]))
    outs, states = layer.formula(before, slice(None))
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.double(), outs, atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(layer.bank[4].double(), states[-1], atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("op", [delta_prefill, delta_decode])
def test_a_row_without_tokens_writes_its_input(op) -> None:
    layer = Layer("kda", 3)
    before = layer.bank.clone()
    rows = make_rows([0, 3, 0, 0], [4, 5, -1, 6], [7, 8, 9, -1])
    layer.run(op, rows)
    assert torch.equal(layer.bank[7], before[4])
    assert not layer.bank[9].any()
    assert not torch.equal(layer.bank[8], before[5])
    assert rows.written.agreed() == {(7, 0), (8, 3), (9, 0)}
