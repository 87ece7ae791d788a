"""Hyper-connections (mHC): several residual streams, mixed by small matrices made from the token.

Knows that the Sinkhorn iteration is part of the model: its count and its order (rows by softmax,
then columns, then rows and columns in turn) are fixed, not a tolerance.
"""

from __future__ import annotations

import torch

from millpond.ops.reference.dense import normalised
from millpond.ops.reference.elementwise import sigmoid
from millpond.ops.reference.linear import linear


def hyper_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iterations: int,
    hyper_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse streams [T, n, H] into a sub-layer's input.

    fn [(2 + n) * n, n * H], base [(2 + n) * n] and scale [3] in the order pre, post, mix; all fp32
    inside -> post [T, n] fp32, mix [T, n, n] fp32 (source stream first), x [T, H] in model dtype.
    """
    tokens, n, _ = streams.shape
    base, scale = base.float(), scale.float()
    mixes = linear(normalised(streams.reshape(tokens, -1), norm_eps), fn.float())
    pre = sigmoid(mixes[:, :n] * scale[0] + base[:n]) + hyper_eps
    post = 2.0 * sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(tokens, n, n)
    mix = torch.exp(logits - logits.amax(-1, keepdim=True))
    mix = mix / _sum_over(mix, 2) + hyper_eps
    mix = mix / (_sum_over(mix, 1) + hyper_eps)
    for _ in range(iterations - 1):
        mix = mix / (_sum_over(mix, 2) + hyper_eps)
        mix = mix / (_sum_over(mix, 1) + hyper_eps)
    collapsed = _sum_over(pre[..., None] * streams.float(), 1).squeeze(1)
    return post, mix, collapsed.to(streams.dtype)


def hyper_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """Streams after a sub-layer: out_k = post_k * y + sum over j of mix[j, k] * stream_j.

    y [T, H], streams [T, n, H], post [T, n], mix [T, n, n] -> [T, n, H]. Weights are rounded to the
    model dtype; the sum over streams is fp32, rounded once before the sub-layer's part is added.
    """
    weights = mix.to(y.dtype).float()[..., None]
    mixed = _sum_over(weights * streams.float()[:, :, None], 1).squeeze(1).to(y.dtype)
    return post.to(y.dtype)[..., None] * y[:, None] + mixed


def hyper_mean(streams: torch.Tensor) -> torch.Tensor:
    """The unweighted mean of streams [T, n, H] -> [T, H], in fp32 with one rounding."""
    return (_sum_over(streams.float(), 1).squeeze(1) / streams.shape[1]).to(streams.dtype)


def _sum_over(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Sum over a short axis, kept, term by term: no reduction kernel, no order of its choosing."""
    terms = x.unbind(axis)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.unsqueeze(axis)
