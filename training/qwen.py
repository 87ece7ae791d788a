"""The differentiable qwen3_5 text model (dense) with its draft layer, over packed batches.

Written from the architecture's published formulas; training only: no cache, no decoding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.batch import Batch
from training.delta import CLEAR, delta_rule
from training.layers import Linear, Output, RMSNorm, attend, joint, parameter
from training.qwen_shape import QwenShape


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: QwenShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.mlp)
        self.up_proj = Linear(shape.hidden, shape.mlp)
        self.down_proj = Linear(shape.mlp, shape.hidden, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = joint(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class GatedDelta(nn.Module):
    """The linear-attention mixer, in two parts around the delta rule."""

    def __init__(self, shape: QwenShape) -> None:
        super().__init__()
        self.shape = shape
        d, width = shape.hidden, shape.value_heads * shape.linear_dim
        channels = 2 * shape.key_heads * shape.linear_dim + width
        self.in_proj_qkv, self.in_proj_z = Linear(d, channels), Linear(d, width)
        self.in_proj_a = Linear(d, shape.value_heads, 0.3)
        self.in_proj_b = Linear(d, shape.value_heads)
        self.conv = nn.Parameter(torch.randn(channels, shape.conv) * 0.3)
        self.A_log = nn.Parameter(torch.zeros(shape.value_heads))
        rate = torch.exp(torch.linspace(-7.0, -1.0, shape.value_heads))
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(rate)))
        self.norm = RMSNorm(shape.linear_dim, shape.eps)
        self.out_proj = Linear(width, d, 0.3)

    def before(self, x: Tensor, pos: Tensor, clear: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, g [N, H, D] and beta [N, H] for the delta rule; the output gate [N, H, D]."""
        s = self.shape
        maps = (self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)
        qkv, z, a, b = joint(x, *maps)
        mixed = qkv * self.conv[:, -1]
        for back in range(1, s.conv):
            earlier = F.pad(qkv, (0, 0, back, 0))[: len(qkv)]
            seen = (pos >= back)[:, None]
            mixed = mixed + torch.where(seen, earlier, 0.0) * self.conv[:, -1 - back]
        keys, times = s.key_heads * s.linear_dim, s.value_heads // s.key_heads
        q, k, v = F.silu(mixed).split([keys, keys, s.value_heads * s.linear_dim], -1)
        q, k = (x.reshape(-1, s.key_heads, s.linear_dim) for x in (q, k))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * s.linear_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        q, k = (x.repeat_interleave(times, 1) for x in (q, k))
        v = v.reshape(-1, s.value_heads, s.linear_dim)
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        g = torch.where(clear[:, None], CLEAR, g)[..., None].expand_as(v)
        return q, k, v, g, torch.sigmoid(b), z.view_as(v)

    def after(self, out: Tensor, gate: Tensor) -> Tensor:
        """Gated norm and output map: [N, D]."""
        return self.out_proj((self.norm(out) * F.silu(gate)).flatten(1))


class Attention(nn.Module):
    """Gated grouped-query attention with partly rotated heads, in two parts around the softmax."""

    def __init__(self, shape: QwenShape) -> None:
        super().__init__()
        self.shape = shape
        d, width = shape.hidden, shape.heads * shape.head_dim
        self.q_proj = Linear(d, 2 * width)
        self.k_proj = Linear(d, shape.kv_heads * shape.head_dim)
        self.v_proj = Linear(d, shape.kv_heads * shape.head_dim)
        self.o_proj = Linear(width, d, 0.3)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps, zero_centred=True)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps, zero_centred=True)

    def before(self, x: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        """q, k, v [N, H, D], keys and values repeated for every query head; the gate [N, H, D]."""
        s = self.shape
        q, k, v = joint(x, self.q_proj, self.k_proj, self.v_proj)
        q, gate = q.view(-1, s.heads, 2, s.head_dim).unbind(2)
        k, v = (x.reshape(-1, s.kv_heads, s.head_dim) for x in (k, v))
        q, k = rotate(s, self.q_norm(q), pos), rotate(s, self.k_norm(k), pos)
        k, v = (x.repeat_interleave(s.heads // s.kv_heads, 1) for x in (k, v))
        return q, k, v, gate

    def after(self, out: Tensor, gate: Tensor) -> Tensor:
        """The gated output map: [N, D]."""
        return self.o_proj((out * torch.sigmoid(gate)).flatten(1))


def rotate(shape: QwenShape, x: Tensor, pos: Tensor) -> Tensor:
    """Rotary position on the first features of every head, paired by halves; x: [N, H, D]."""
    half = shape.rotary_dim // 2
    power = torch.arange(half, device=x.device) / half
    angle = (pos[:, None] * shape.theta**-power)[:, None]
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x.split([half, half, shape.head_dim - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Layer(nn.Module):
    """One decoder layer: norm, mixer, norm, feed-forward, with plain residuals."""

    def __init__(self, shape: QwenShape, kind: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps, zero_centred=True)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps, zero_centred=True)
        self.mixer: GatedDelta | Attention = GatedDelta(shape) if kind == "g" else Attention(shape)
        self.mlp = Mlp(shape)

    def open(self, x: Tensor, *where: Tensor) -> tuple[Tensor, ...]:
        """The inputs of the mixer's core."""
        return self.mixer.before(self.input_layernorm(x), *where)

    def close(self, x: Tensor, *out: Tensor) -> Tensor:
        """From the mixer's core to the next layer."""
        x = x + self.mixer.after(*out)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftLayer(nn.Module):
    """The multi-token-prediction layer: a fused input and one attention layer."""

    def __init__(self, shape: QwenShape) -> None:
        super().__init__()
        d = shape.hidden
        self.pre_fc_norm_embedding = RMSNorm(d, shape.eps, zero_centred=True)
        self.pre_fc_norm_hidden = RMSNorm(d, shape.eps, zero_centred=True)
        self.fc = Linear(2 * d, d)
        self.layer = Layer(shape, "a")
        self.norm = RMSNorm(d, shape.eps, zero_centred=True)

    def open(self, embedding: Tensor, hidden: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        """The fused input and the attention's inputs."""
        parts = [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)]
        z = self.fc(torch.cat(parts, -1))
        return z, *self.layer.open(z, pos)

    def close(self, z: Tensor, *out: Tensor) -> Tensor:
        """The hidden the target's head reads."""
        return self.norm(self.layer.close(z, *out))


class Model(nn.Module):
    """The whole text model; embedding and head are one matrix."""

    def __init__(self, shape: QwenShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = parameter(shape.vocab, shape.hidden, std=0.05)
        self.layers = nn.ModuleList(Layer(shape, kind) for kind in shape.mixers)
        self.norm = RMSNorm(shape.hidden, shape.eps, zero_centred=True)
        self.draft = DraftLayer(shape)

    def forward(
        self, batch: Batch, *, drafts: int = 1, sparse: bool = False, queries: Tensor | None = None
    ) -> Output:
        """`sparse` and `queries` are for families with an indexer; here they change nothing."""
        clear = batch.reset | (batch.pos == 0)
        mask = batch.mask()
        x = F.embedding(batch.ids, self.embed_tokens)
        for layer in self.layers:
            if isinstance(layer.mixer, GatedDelta):
                *parts, gate = layer.open(x, batch.pos, clear)
                out = delta_rule(*parts, batch.starts, batch.row)
            else:
                *parts, gate = layer.open(x, batch.pos)
                out = attend(*parts, mask)
            x = layer.close(x, out, gate)
        hidden = self.norm(x)
        made: list[Tensor] = []
        for step in range(drafts):
            ahead = F.embedding(torch.roll(batch.ids, -1 - step), self.embed_tokens)
            z, *parts, gate = self.draft.open(ahead, made[-1] if made else hidden, batch.pos)
            made.append(self.draft.close(z, attend(*parts, mask), gate))
        return Output(hidden, made, hidden.new_zeros(()), [])

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token, float32."""
        return F.linear(hidden.to(Linear.dtype), self.embed_tokens.to(Linear.dtype)).float()

    def routers(self) -> list[nn.Module]:
        """This family has none."""
        return []
