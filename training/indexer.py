"""The pooled indexer: scores of past pools, the hard selection, and the loss that fits it.

Selection passes no gradient; the indexer learns from the divergence to the attention itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.batch import Batch
from training.shape import Shape


class Indexer(nn.Module):
    """What a token contributes as a query and as a member of a pool."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d, width = shape.hidden, shape.index_dim
        self.wq_b = nn.Parameter(
            torch.randn(shape.index_heads * width, shape.q_rank) * shape.q_rank**-0.5
        )
        self.wk = nn.Parameter(torch.randn(width, d) * d**-0.5)
        self.k_norm = nn.LayerNorm(width, eps=1e-6)
        self.weights_proj = nn.Parameter(torch.randn(shape.index_heads, d) * d**-0.5)
        self.index_kpool_compress_gate = nn.Parameter(torch.randn(width, d) * 0.02)
        self.index_kpool_compress_ape = nn.Parameter(torch.randn(shape.pool, width) * 0.02)

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, heads, dim], head weights [N, heads], pooled keys [N / pool, dim]."""
        s = self.shape
        query = F.linear(r, self.wq_b).view(-1, s.index_heads, s.index_dim)
        maps = torch.cat([self.wk, self.index_kpool_compress_gate, self.weights_proj])
        key, gate, weight = F.linear(x, maps).split([s.index_dim, s.index_dim, s.index_heads], -1)
        key = self.k_norm(key).view(-1, s.pool, s.index_dim)
        gate = gate.reshape(-1, s.pool, s.index_dim)
        share = torch.softmax(gate + self.index_kpool_compress_ape, 1)
        return query, weight * s.index_heads**-0.5, (share * key).sum(1)


def scores(shape: Shape, query: Tensor, weight: Tensor, pools: Tensor) -> Tensor:
    """[B, T, P] from query [B, T, heads, dim], weight [B, T, heads], pools [B, P, dim]."""
    flat = query.flatten(1, 2) @ pools.transpose(-1, -2)
    each = F.relu(flat.view(*query.shape[:3], -1) * shape.index_dim**-0.5)
    return (weight[:, :, None, :] @ each).squeeze(-2)


def _rows(shape: Shape, features: list[Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    query, weight, pools = features
    return (
        query.view(-1, batch.row, *query.shape[1:]),
        weight.view(-1, batch.row, weight.shape[-1]),
        pools.view(-1, batch.row // shape.pool, pools.shape[-1]),
    )


def _complete(shape: Shape, mask: Tensor) -> Tensor:
    """[B, T, P]: pools a query may choose, those whose last token it may see."""
    return mask[:, :, shape.pool - 1 :: shape.pool]


@torch.no_grad()
def select(shape: Shape, features: list[Tensor], mask: Tensor, batch: Batch) -> Tensor:
    """`mask` narrowed to the best pools of every query and its unpooled tail.

    Rows under a `near` mask see so little that nothing is taken from them.
    """
    visible = _complete(shape, mask)
    score = scores(shape, *_rows(shape, features, batch)).masked_fill(~visible, float("-inf"))
    best = score.topk(min(shape.index_topk // shape.pool, score.shape[-1]), -1).indices
    chosen = torch.zeros_like(visible).scatter_(-1, best, True) & visible
    place = torch.arange(batch.row, device=mask.device)
    tail = place[None, :] >= ((place + 1) // shape.pool * shape.pool)[:, None]
    wide = chosen.repeat_interleave(shape.pool, -1)
    return mask & (wide | tail | batch.near.view(-1, batch.row)[:, :, None])


def divergence(
    shape: Shape, q: Tensor, k: Tensor, features: list[Tensor], mask: Tensor, batch: Batch,
    queries: Tensor,
) -> Tensor:  # fmt: skip
    """Mean KL from the attention, summed over heads and inside pools, to the indexer's softmax."""
    query, weight, pools = _rows(shape, features, batch)
    query, weight, mask = query[:, queries], weight[:, queries], mask[:, queries]
    visible = _complete(shape, mask)
    with torch.no_grad():
        rows = [x.detach().view(-1, batch.row, *x.shape[1:]).transpose(1, 2) for x in (q, k)]
        logits = rows[0][:, :, queries] @ rows[1].transpose(-1, -2) * shape.head_dim**-0.5
        shares = logits.masked_fill(~mask[:, None], float("-inf")).softmax(-1).mean(1)
        pooled = shares.unflatten(-1, (-1, shape.pool)).sum(-1) * visible
        mass = pooled.sum(-1, keepdim=True)
        target = pooled / (mass + 1e-9)
    guess = scores(shape, query, weight, pools).masked_fill(~visible, -1e9).log_softmax(-1)
    each = (torch.xlogy(target, target) - target * guess).sum(-1)
    trust = mass.squeeze(-1).clamp(max=0.2) * ~batch.near.view(-1, batch.row)[:, queries]
    return (each * trust).sum() / (trust.sum() + 1e-6)
