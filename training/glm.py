"""The differentiable glm5_next text model with its draft layer, over packed batches.

Written from the architecture's published formulas; training only: no cache, no decoding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import indexer
from training.batch import Batch
from training.delta import CLEAR, delta_rule
from training.layers import Linear, Output, RMSNorm, attend, joint, parameter
from training.shape import Shape
from training.sinkhorn import sinkhorn


class HyperConnection(nn.Module):
    """Mixes the residual streams around one sub-layer (mHC); all in float32."""

    def __init__(self, shape: Shape, lead: int) -> None:
        super().__init__()
        n = shape.streams
        self.shape = shape
        self.fn = parameter((2 + n) * n, n * shape.hidden)
        base = torch.zeros((2 + n) * n)
        base[:n] = -1.5
        base[lead % n] = 1.5
        base[2 * n :] = 3.0 * torch.eye(n).flatten()
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [N, streams, D]. Returns the sub-layer's input [N, D], post [N, n], comb [N, n, n]."""
        s, n = self.shape, self.shape.streams
        flat = x.flatten(1)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + s.eps)
        mix = F.linear(flat, self.fn)
        pre = torch.sigmoid(mix[:, :n] * self.scale[0] + self.base[:n]) + s.hc_eps
        post = 2 * torch.sigmoid(mix[:, n : 2 * n] * self.scale[1] + self.base[n : 2 * n])
        comb = (mix[:, 2 * n :] * self.scale[2] + self.base[2 * n :]).view(-1, n, n)
        comb = sinkhorn(torch.softmax(comb, -1) + s.hc_eps, s.sinkhorn, s.hc_eps)
        return (pre[..., None] * x).sum(1), post, comb


def spread(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams after a sub-layer: y to every stream, plus the mixed old streams."""
    mixed = (comb[..., None] * x[:, :, None, :]).sum(1)
    return post[..., None] * y[:, None, :] + mixed


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Clamped SwiGLU: the gate from above, the other factor on both sides."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Mlp(nn.Module):
    """The dense feed-forward part, also the shared expert."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.limit = shape.swiglu_limit
        self.gate_proj = Linear(shape.hidden, width)
        self.up_proj = Linear(shape.hidden, width)
        self.down_proj = Linear(width, shape.hidden, 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.down_proj(swiglu(*joint(x, self.gate_proj, self.up_proj), self.limit)), None


class Router(nn.Module):
    """Chooses experts by sigmoid score plus bias, weighs them by score alone."""

    e_score_correction_bias: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = parameter(shape.experts, shape.hidden, std=shape.hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.experts))

    def forward(self, x: Tensor) -> Tensor:
        """Weights of all experts, zero for those not chosen: [N, experts]."""
        scores = torch.sigmoid(F.linear(x.float(), self.weight))
        chosen = (
            (scores.detach() + self.e_score_correction_bias).topk(self.shape.active, -1).indices
        )
        kept = scores * torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.shape.routed_scale


class Moe(nn.Module):
    """Routed and shared experts; every expert computes every token, most weights are zero."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = Router(shape)
        self.experts_gate_up = parameter(
            shape.experts, 2 * shape.expert, shape.hidden, std=shape.hidden**-0.5
        )
        self.experts_down = parameter(
            shape.experts, shape.hidden, shape.expert, std=0.3 * shape.expert**-0.5
        )
        self.shared_experts = Mlp(shape, shape.expert)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output [N, D] and the share of tokens each expert got [experts]."""
        s = self.shape
        weights = self.gate(x)
        both = F.linear(x.to(Linear.dtype), self.experts_gate_up.flatten(0, 1).to(Linear.dtype))
        gate, up = both.float().view(-1, s.experts, 2, s.expert).unbind(2)
        inner = (swiglu(gate, up, s.swiglu_limit) * weights[..., None]).flatten(1)
        down = self.experts_down.transpose(0, 1).flatten(1)
        routed = F.linear(inner.to(Linear.dtype), down.to(Linear.dtype)).float()
        return routed + self.shared_experts(x)[0], (weights.detach() > 0).float().mean(0)


class KimiDelta(nn.Module):
    """The linear-attention mixer, in two parts around the delta rule."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d, w = shape.hidden, shape.width
        self.q_proj, self.k_proj, self.v_proj = (Linear(d, w) for _ in range(3))
        self.conv = nn.Parameter(torch.randn(3 * w, shape.conv) * 0.3)
        self.f_a_proj, self.f_b_proj = Linear(d, shape.head_dim), Linear(shape.head_dim, w, 0.3)
        self.g_a_proj, self.g_b_proj = Linear(d, shape.head_dim), Linear(shape.head_dim, w)
        self.b_proj = Linear(d, shape.heads)
        self.A_log = nn.Parameter(torch.zeros(shape.heads))
        decay = torch.exp(torch.rand(w) * 7.0 - 7.6)
        self.dt_bias = nn.Parameter(torch.logit(decay / -shape.gate_lower_bound))
        self.o_norm = RMSNorm(shape.head_dim, shape.eps)
        self.o_proj = Linear(w, d, 0.3)

    def before(self, x: Tensor, pos: Tensor, clear: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, g [N, H, D] and beta [N, H] for the delta rule; the output gate [N, H, D]."""
        s = self.shape
        maps = (self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.g_a_proj, self.b_proj)
        *parts, f_a, g_a, b = joint(x, *maps)
        qkv = torch.cat(parts, -1)
        mixed = qkv * self.conv[:, -1]
        for back in range(1, s.conv):
            earlier = F.pad(qkv, (0, 0, back, 0))[: len(qkv)]
            seen = (pos >= back)[:, None]
            mixed = mixed + torch.where(seen, earlier, 0.0) * self.conv[:, -1 - back]
        q, k, v = F.silu(mixed).view(-1, 3, s.heads, s.head_dim).unbind(1)
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * s.head_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        raw = (self.f_b_proj(f_a) + self.dt_bias).view(-1, s.heads, s.head_dim)
        g = s.gate_lower_bound * torch.sigmoid(self.A_log.exp()[:, None] * raw)
        g = torch.where(clear[:, None, None], CLEAR, g)
        gate = self.g_b_proj(g_a).view(-1, s.heads, s.head_dim)
        return q, k, v, g, torch.sigmoid(b), gate

    def after(self, out: Tensor, gate: Tensor) -> Tensor:
        """Gated norm and output map: [N, D]."""
        return self.o_proj((self.o_norm(out) * torch.sigmoid(gate)).flatten(1))


class Latent(nn.Module):
    """Multi-head latent attention without positions, in two parts around the attention itself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_a_proj = Linear(shape.hidden, shape.q_rank)
        self.q_a_layernorm = RMSNorm(shape.q_rank, shape.eps)
        self.q_b_proj = Linear(shape.q_rank, shape.width)
        self.kv_a_proj_with_mqa = Linear(shape.hidden, shape.kv_rank)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, shape.eps)
        self.kv_b_proj = Linear(shape.kv_rank, 2 * shape.width)
        self.o_proj = Linear(shape.width, shape.hidden, 0.3)
        self.indexer = indexer.Indexer(shape)

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v [N, H, D], then what the indexer reads, cut off from the gradient."""
        s = self.shape
        q_a, kv_a = joint(x, self.q_a_proj, self.kv_a_proj_with_mqa)
        r = self.q_a_layernorm(q_a)
        q = self.q_b_proj(r).view(-1, s.heads, s.head_dim)
        c = self.kv_a_layernorm(kv_a)
        k, v = self.kv_b_proj(c).view(-1, s.heads, 2, s.head_dim).unbind(2)
        return q, k, v, *self.indexer(x.detach(), r.detach())

    def after(self, out: Tensor) -> Tensor:
        """The output map: [N, D]."""
        return self.o_proj(out.flatten(1))


class Layer(nn.Module):
    """One decoder layer with its two hyper-connections."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.hc_attn = HyperConnection(shape, index)
        self.hc_ffn = HyperConnection(shape, index + 1)
        linear = shape.mixers[index] == "k"
        self.self_attn: KimiDelta | Latent = KimiDelta(shape) if linear else Latent(shape)
        dense = index < shape.dense_layers
        self.mlp: Mlp | Moe = Mlp(shape, shape.mlp) if dense else Moe(shape)

    def open(self, x: Tensor, *where: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Up to the mixer's core: its inputs, and what `close` needs of the hyper-connection."""
        entry, post, comb = self.hc_attn(x)
        return post, comb, self.self_attn.before(self.input_layernorm(entry), *where)

    def close(
        self, x: Tensor, post: Tensor, comb: Tensor, *out: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """From the mixer's core to the next layer's streams, and the expert loads."""
        x = spread(self.self_attn.after(*out), x, post, comb)
        entry, post, comb = self.hc_ffn(x)
        y, load = self.mlp(self.post_attention_layernorm(entry))
        return spread(y, x, post, comb), load


class DraftLayer(nn.Module):
    """The multi-token-prediction layer: attention and experts with plain residuals."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.hidden
        self.enorm, self.hnorm = RMSNorm(d, shape.eps), RMSNorm(d, shape.eps)
        self.eh_proj = Linear(2 * d, d)
        self.input_layernorm = RMSNorm(d, shape.eps)
        self.post_attention_layernorm = RMSNorm(d, shape.eps)
        self.self_attn = Latent(shape)
        self.mlp = Moe(shape)
        self.shared_head_norm = RMSNorm(d, shape.eps)

    def open(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The fused input and the attention's inputs."""
        z = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], -1))
        return z, self.self_attn.before(self.input_layernorm(z))

    def close(self, z: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden the shared head reads, and the expert loads."""
        z = z + self.self_attn.after(out)
        y, load = self.mlp(self.post_attention_layernorm(z))
        return self.shared_head_norm(z + y), load


class Model(nn.Module):
    """The whole text model; embedding and head are one matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = parameter(shape.vocab, shape.hidden, std=0.05)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(len(shape.mixers)))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.draft = DraftLayer(shape)

    def _attend(
        self,
        parts: tuple[Tensor, ...],
        mask: Tensor,
        batch: Batch,
        sparse: bool,
        queries: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, *features = parts
        loss = q.new_zeros(())
        if queries is not None:
            loss = indexer.divergence(self.shape, q, k, features, mask, batch, queries)
        if sparse:
            mask = indexer.select(self.shape, features, mask, batch)
        return attend(q, k, v, mask), loss

    def forward(
        self, batch: Batch, *, drafts: int = 1, sparse: bool = False, queries: Tensor | None = None
    ) -> Output:
        """`queries` (row positions, [Q]) are where the indexers are compared with the attention."""
        clear = batch.reset | (batch.pos == 0)
        mask = batch.mask()
        loads: list[Tensor] = []
        losses: list[Tensor] = []
        x = F.embedding(batch.ids, self.embed_tokens)[:, None].repeat(1, self.shape.streams, 1)
        for layer in self.layers:
            if isinstance(layer.self_attn, KimiDelta):
                post, comb, (*parts, gate) = layer.open(x, batch.pos, clear)
                core = (delta_rule(*parts, batch.starts, batch.row), gate)
            else:
                post, comb, parts = layer.open(x)
                out, loss = self._attend(parts, mask, batch, sparse, queries)
                core = (out,)
                losses.append(loss)
            x, load = layer.close(x, post, comb, *core)
            if load is not None:
                loads.append(load)
        hidden = self.norm(x.mean(1))
        made: list[Tensor] = []
        for step in range(drafts):
            ahead = torch.roll(batch.ids, -1 - step)
            z, parts = self.draft.open(
                F.embedding(ahead, self.embed_tokens), made[-1] if made else hidden
            )
            out, loss = self._attend(parts, mask, batch, sparse, None if step else queries)
            losses.append(loss)
            row, load = self.draft.close(z, out)
            made.append(row)
            if not step:
                loads.append(load)
        return Output(hidden, made, sum(losses, hidden.new_zeros(())), loads)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token, float32."""
        return F.linear(hidden.to(Linear.dtype), self.embed_tokens.to(Linear.dtype)).float()

    def routers(self) -> list[Router]:
        """Routers in the order of `Output.loads`."""
        parts = [layer.mlp for layer in self.layers] + [self.draft.mlp]
        return [part.gate for part in parts if isinstance(part, Moe)]
