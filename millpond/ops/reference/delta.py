"""The gated delta rule, from slot to slot, decaying by head (GDN) or by key channel (KDA).

Per value head, with state S [V, K] in fp32, and q, k normalised to length 1 (q then scaled by
K^-0.5):
    S <- S * exp(g)        S <- S + beta * (v - S k) k^T        o = S q
The per-token form applies just that. The chunk form folds 64 tokens at once (the WY form of Yang et
al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"): chunks lie on
the absolute grid, so that every way to cut a prompt on the grid applies the same operations to the
same states. Decay is only ever exponentiated as a difference that is at most 0, so nothing
overflows. The cumulative decay alone is fp64: after a steep fall a small difference would vanish in
fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond.ops.batch import RowSlots
from millpond.ops.reference.elementwise import row_sum, sigmoid, softplus
from millpond.ops.reference.linear import batched_matmul
from millpond.ops.reference.slots import read_slots, write_slots, write_targets

CHUNK = 64
"""Tokens folded at once, on the absolute grid."""

EXPORT_GRANULARITY = CHUNK
"""`delta_prefill` can export at multiples of this, and at a row's end."""

SUB_BLOCK = 16
"""Rows of a chunk whose pairwise per-channel decay is formed explicitly."""

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Gate:
    """How the raw decay input of a layer becomes a log decay.

    With `lower_bound` (negative): lower_bound * sigmoid(exp(a_log) * (raw + dt_bias)). Without:
    -exp(a_log) * softplus(raw + dt_bias). They are two functions, not one and its clamp.
    """

    a_log: torch.Tensor  # [H]
    dt_bias: torch.Tensor  # [H], or [H * K] when the decay is by key channel
    lower_bound: float | None = None


def log_decay(raw: torch.Tensor, gate: Gate) -> torch.Tensor:
    """raw [T, H] or [T, H, K] -> log decay g <= 0 of the same shape, fp32."""
    rate = torch.exp(gate.a_log.float()).view(1, -1, *[1] * (raw.ndim - 2))
    shifted = raw.float() + gate.dt_bias.float().view(1, *raw.shape[1:])
    if gate.lower_bound is None:
        return -rate * softplus(shifted)
    return gate.lower_bound * sigmoid(rate * shifted)


def delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate: Gate,
    bank: torch.Tensor,
    rows: RowSlots,
) -> torch.Tensor:
    """Fold rows in chunk form; every row starts on the absolute grid of 64 tokens.

    q, k [T, Hk, K]; v [T, H, V]; decay, raw, [T, H] or [T, H, K]; beta, raw, [T, H]; bank [S, H, V,
    K] fp32 -> o [T, H, V] in the dtype of `v`. The r = H / Hk value heads of one key head are
    consecutive. States go to `state_out` and to every export: at a multiple of 64 or the row's end.
    """
    heads = v.shape[1]
    chunks = tuple(-(-n // CHUNK) for n in rows.lengths)
    place = _chunk_places(rows, chunks)

    def lay_out(x: torch.Tensor) -> torch.Tensor:
        """[T, H, ...] -> [B, H, 64, ...] fp32; zeros after a row's last token change nothing."""
        out = x.new_zeros((sum(chunks) * CHUNK, *x.shape[1:]), dtype=torch.float32)
        out[place] = x.float()
        return out.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()

    qn, kn = normalise(q, k, heads)
    before = read_slots(bank, rows.state_in)
    o, after = chunked_delta(
        lay_out(qn),
        lay_out(kn),
        lay_out(v),
        lay_out(log_decay(decay, gate)),
        lay_out(sigmoid(beta)),
        before,
        chunks,
    )
    row, folded, slot = write_targets(rows)
    first = torch.tensor((0, *chunks[:-1]), device=v.device).cumsum(0)
    index = first[row] + (folded - 1) // CHUNK
    if 0 in rows.lengths:  # a row without tokens writes its input
        after = torch.cat((before, after))
        index = torch.where(folded > 0, rows.num_rows + index, row)
    write_slots(bank, slot, after[index])
    rows.written.record(slot, folded)
    return o.transpose(1, 2).reshape(-1, heads, v.shape[-1])[place].to(v.dtype)


def delta_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate: Gate,
    bank: torch.Tensor,
    rows: RowSlots,
) -> torch.Tensor:
    """As `delta_prefill` in per-token form: any start, any number of tokens a row, in place or not.

    Exports are possible after every token. Rows may share a `state_in`.
    """
    tokens = TokenInputs.of(q, k, v, decay, beta, gate)
    state = read_slots(bank, rows.state_in)
    o = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    lengths = rows.cu_seqlens[1:] - rows.cu_seqlens[:-1]
    writes: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(max(rows.lengths, default=0)):
        active = (lengths > step).nonzero().squeeze(1)
        at = rows.cu_seqlens[active] + step
        token = tokens.at(at)
        s = token.fold(state[active])
        o[at] = token.read(s)
        state[active] = s
        due = (rows.export_offset == step + 1).nonzero().squeeze(1)
        writes.append((rows.export_slot[due], state[rows.export_row[due]]))
    write_slots(bank, rows.state_out, state)
    for slots, states in writes:
        write_slots(bank, slots, states)
    _, folded, slot = write_targets(rows)
    rows.written.record(slot, folded)
    return o.to(v.dtype)


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What the per-token form folds, made ready: n tokens in fp32, every head its own key."""

    q: torch.Tensor  # [n, H, K]
    k: torch.Tensor  # [n, H, K]
    v: torch.Tensor  # [n, H, V]
    keep: torch.Tensor  # [n, H, 1, 1 or K], what decay leaves of a state [V, K]
    weight: torch.Tensor  # [n, H, 1], beta

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        gate: Gate,
    ) -> TokenInputs:
        """From what `delta_decode` is given."""
        qn, kn = normalise(q, k, v.shape[1])
        keep = torch.exp(log_decay(decay, gate))
        keep = keep[:, :, None] if keep.ndim == 3 else keep[:, :, None, None]
        return cls(qn, kn, v.float(), keep, sigmoid(beta)[..., None])

    def at(self, index: torch.Tensor) -> TokenInputs:
        """Some of them: index [m] int64."""
        return TokenInputs(
            self.q[index], self.k[index], self.v[index], self.keep[index], self.weight[index]
        )

    def fold(self, state: torch.Tensor) -> torch.Tensor:
        """One token into each of n states [n, H, V, K]."""
        s = state * self.keep
        error = self.weight * (self.v - (s * self.k[:, :, None]).sum(-1))
        return s + error[..., None] * self.k[:, :, None]

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """What the tokens' queries read of states [n, H, V, K]: [n, H, V]."""
        return (state * self.q[:, :, None]).sum(-1)


def normalise(q: torch.Tensor, k: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [T, Hk, K] -> unit length in fp32, q scaled by K^-0.5 after; heads repeated to H."""
    repeat = heads // q.shape[1]
    qn = l2norm(q) * q.shape[-1] ** -0.5
    return qn.repeat_interleave(repeat, 1), l2norm(k).repeat_interleave(repeat, 1)


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum of squares + 1e-6) over the last axis, in fp32."""
    x = x.float()
    return x * torch.rsqrt(row_sum(x * x) + NORM_EPS)


def chunked_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    s0: torch.Tensor,
    chunks: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunk form itself, without slots: B chunks of 64 tokens, row by row, all in fp32.

    q, k [B, H, 64, K] normalised; v [B, H, 64, V]; g [B, H, 64] or [B, H, 64, K] log decay <= 0;
    beta [B, H, 64] in (0, 1); s0 [N, H, V, K]; `chunks` how many belong to each row (sum B).
    Tokens that pad the last chunk of a row have q, k, v, g and beta zero.
    -> o [B, H, 64, V] and the state after every chunk [B, H, V, K].
    """
    cumulative = g.double().cumsum(2)
    if g.ndim == 3:
        product_kk, product_qk = _scalar_products(q, k, cumulative)
        cumulative = cumulative[..., None]
    else:
        product_kk, product_qk = _channel_products(q, k, cumulative)
    decayed = torch.exp(cumulative.float())
    total = cumulative[:, :, -1:]
    # (I + A)^-1 applied to beta v and beta k exp(G), in one triangular solve.
    lower = beta[..., None] * product_kk.tril(-1)
    right = beta[..., None] * torch.cat((v, k * decayed), -1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
    k_out = k * torch.exp((total - cumulative).float())
    q_in = q * decayed
    carry = torch.exp(total.float())  # [B, H, 1, 1 or K]

    o = torch.empty_like(v)
    after = s0.new_empty((q.shape[0], *s0.shape[1:]))
    state = s0
    counts = torch.tensor(chunks, device=q.device)
    first = counts.cumsum(0) - counts
    for index in range(max(chunks, default=0)):
        active = (counts > index).nonzero().squeeze(1)
        at = first[active] + index
        s = state[active]
        s_t = s.transpose(-1, -2).contiguous()
        fresh = u[at] - batched_matmul(w[at], s_t)
        o[at] = batched_matmul(q_in[at], s_t) + batched_matmul(product_qk[at], fresh)
        s = s * carry[at] + batched_matmul(fresh.transpose(-1, -2).contiguous(), k_out[at])
        after[at] = s
        state = state.index_copy(0, active, s)
    return o, after


def _chunk_places(rows: RowSlots, chunks: tuple[int, ...]) -> torch.Tensor:
    """Where each packed token lies once every row is laid out in whole chunks: [T]."""
    device = rows.cu_seqlens.device
    lengths = rows.cu_seqlens[1:] - rows.cu_seqlens[:-1]
    counts = torch.tensor(chunks, dtype=torch.int64, device=device)
    shift = (counts.cumsum(0) - counts) * CHUNK - rows.cu_seqlens[:-1]
    tokens = torch.arange(rows.num_tokens, device=device)
    return tokens + torch.repeat_interleave(shift, lengths)


def _scalar_products(
    q: torch.Tensor, k: torch.Tensor, cumulative: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k_i . k_j and q_i . k_j times exp(G_i - G_j) for j <= i, else 0: [B, H, 64, 64] each."""
    difference = (cumulative[..., :, None] - cumulative[..., None, :]).float()
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    factor = torch.exp(difference.masked_fill(~lower, float("-inf")))
    k_t = k.transpose(-1, -2).contiguous()
    return batched_matmul(k, k_t) * factor, batched_matmul(q, k_t) * factor


def _channel_products(
    q: torch.Tensor, k: torch.Tensor, cumulative: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_scalar_products` where every key channel has its own decay: G [B, H, 64, K].

    Pairs within a sub-block form their difference outright. A pair further apart is split at the
    boundary b before the later sub-block, exp(G_i - G_b) * exp(G_b - G_j): both are at most 1, and
    a factor that underflows belongs to a product that does.
    """
    lead = q.shape[:2]
    product_kk, product_qk = (q.new_zeros((*lead, CHUNK, CHUNK)) for _ in range(2))
    lower = torch.ones(SUB_BLOCK, SUB_BLOCK, dtype=torch.bool, device=q.device).tril()[..., None]
    for begin in range(0, CHUNK, SUB_BLOCK):
        block = slice(begin, begin + SUB_BLOCK)
        g, q_b, k_b = cumulative[:, :, block], q[:, :, block], k[:, :, block]
        difference = (g[..., :, None, :] - g[..., None, :, :]).float()
        right = k_b[..., None, :, :] * torch.exp(difference.masked_fill(~lower, float("-inf")))
        product_kk[:, :, block, block] = (k_b[..., :, None, :] * right).sum(-1)
        product_qk[:, :, block, block] = (q_b[..., :, None, :] * right).sum(-1)
        if begin:
            boundary = cumulative[:, :, begin - 1 : begin]
            since = torch.exp((g - boundary).float())
            earlier = k[:, :, :begin] * torch.exp((boundary - cumulative[:, :, :begin]).float())
            earlier = earlier.transpose(-1, -2).contiguous()
            product_kk[:, :, block, :begin] = batched_matmul(k_b * since, earlier)
            product_qk[:, :, block, :begin] = batched_matmul(q_b * since, earlier)
    return product_kk, product_qk
