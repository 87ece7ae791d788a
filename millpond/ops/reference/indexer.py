"""The pooled-key indexer of sparse MLA: keeps pooled keys, chooses which positions a token sees.

A pool is `pool` consecutive positions counted from 0; it has a key once its last token is folded.
Pooled keys lie in the pages, next to the latents of their tokens; the raw keys and gates of the
unfinished pool lie in the seat's tail, by position modulo its size R: a multiple of the pool, and
at least pool + K where K drafts are verified, since some of those must be forgotten again. A pool
that a rejected draft completed is written anew by the token that completes it in its stead, before
any query sees it. (KPool indexer of GLM-5.3.)
"""

from __future__ import annotations

import torch

from millpond.ops.batch import ForwardBatch
from millpond.ops.reference.attention import TILE, page_tile, query_blocks
from millpond.ops.reference.elementwise import row_sum
from millpond.ops.reference.linear import batched_matmul, padded_rows


def pool_keys(
    key: torch.Tensor,
    gate: torch.Tensor,
    position_bias: torch.Tensor,
    *,
    pooled_pages: torch.Tensor,
    tails: torch.Tensor,
    batch: ForwardBatch,
) -> None:
    """Write the key of every pool that this forward completes, and every row's new tail.

    key, gate [T, D]; position_bias [pool, D]; pooled_pages [Pg, 64 / pool, D]; tails
    [seats, R, 2, D] (keys, then gates). The key is the mean of the pool's keys under a softmax
    of gate + position_bias over the pool, per channel: softmax in fp32, rounded to the model dtype.
    """
    pool = position_bias.shape[0]
    position, row = batch.positions, batch.token_row
    seat = batch.seats[row]

    done = ((position + 1) % pool == 0).nonzero().squeeze(1)
    behind = torch.arange(pool - 1, -1, -1, device=key.device)  # tokens before the last, by slot
    source = done[:, None] - behind
    here = position[done][:, None] - behind >= batch.row_start[row[done]][:, None]
    member = (position[done][:, None] - behind) % tails.shape[1]
    tail = tails[seat[done].clamp(min=0)[:, None], member].to(key.dtype)  # [n, pool, 2, D]
    tail = tail.masked_fill((seat[done] < 0)[:, None, None, None], 0.0)
    both = torch.stack((key, gate), 1)[source.clamp(min=0)]
    both = torch.where(here[..., None, None], both, tail)
    logits = both[:, :, 1].float() + position_bias.float()
    share = torch.exp(logits - logits.amax(1, keepdim=True))
    total = share[:, 0]
    for slot in range(1, pool):
        total = total + share[:, slot]
    share = (share / total[:, None]).to(key.dtype)
    parts = (share * both[:, :, 0]).float()
    pooled = parts[:, 0]
    for slot in range(1, pool):
        pooled = pooled + parts[:, slot]
    page, place = batch.token_page[done], batch.token_offset[done] // pool
    some = page >= 0
    pooled_pages[page[some], place[some]] = pooled[some].to(pooled_pages.dtype)

    end = batch.row_end[row]
    kept = position >= end - end % pool
    if batch.verify is not None:  # any of a verify row's tokens may turn out to be in the open pool
        kept[batch.first_verify_token :] = batch.verify.filled.flatten()
    kept = kept & (seat >= 0)
    entry = torch.stack((key, gate), 1)[kept].to(tails.dtype)
    tails[seat[kept], position[kept] % tails.shape[1]] = entry


def select(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    *,
    pooled_pages: torch.Tensor,
    batch: ForwardBatch,
    pool: int,
    top_k: int,
    scale: float,
    weight_scale: float = 1.0,
    first: int = 0,
) -> torch.Tensor | None:
    """Which positions each token attends to: [T, P * 64] bool, or None when that is all its past.

    query [T, Hi, D]; head_weights [T, Hi]; pooled_pages [Pg, 64 / pool, D]. A pool scores
    sum over heads of weight * weight_scale * relu(q . key * scale), in fp32. Of the complete pools
    that end at or before a token, the `top_k // pool` best are kept (ties: the lower pool), and
    always the visible tail: the last (t + 1) mod pool tokens. `top_k` counts tokens. Call after
    `pool_keys`.

    Positions before `first` are not attended to; a pool that holds one is not scored but kept, and
    counts as one of the best. Where `first` is not 0 there always is a mask.
    """
    keep = top_k // pool
    if not first and all(end // pool <= keep for end in batch.ends):
        return None
    weights = head_weights.float() * weight_scale
    scores = _pool_scores(query, weights, pooled_pages, batch, pool, scale)
    visible = batch.positions[:, None] + 1
    pools = torch.arange(scores.shape[1], device=query.device)
    candidate = pools < visible // pool
    scores = scores.masked_fill(~candidate, float("-inf"))
    scores = scores.masked_fill(candidate & (pools * pool < first), float("inf"))
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :keep]
    chosen = torch.zeros_like(candidate).scatter_(1, best, True) & candidate
    position = torch.arange(scores.shape[1] * pool, device=query.device)
    tail = (position >= visible - visible % pool) & (position < visible)
    return (chosen.repeat_interleave(pool, 1) | tail) & (position >= first)


def _pool_scores(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    pooled_pages: torch.Tensor,
    batch: ForwardBatch,
    pool: int,
    scale: float,
) -> torch.Tensor:
    """Scores of all pools up to each token's block: [T, P * 64 / pool] fp32; others are zero."""
    tokens, heads, _ = query.shape
    per_page = TILE // pool
    scores = query.new_zeros((tokens, batch.page_table.shape[1] * per_page), dtype=torch.float32)
    for blocks in query_blocks(batch):
        count, width = blocks.token.shape
        lines = padded_rows(width * heads)
        token = blocks.token.clamp(min=0)
        q = query[token].float().reshape(count, width * heads, -1)
        q = torch.nn.functional.pad(q, (0, 0, 0, lines - width * heads))
        weights = head_weights[token][:, :, None]  # [B, W, 1, Hi]
        for tile in range(blocks.max_tiles):
            active = (blocks.tiles > tile).nonzero().squeeze(1)
            keys = page_tile(pooled_pages[:, None], batch, blocks.row[active], tile, pool)[:, 0]
            dots = batched_matmul(q[active], keys.transpose(-1, -2).contiguous())
            dots = (dots[:, : width * heads] * scale).clamp(min=0.0)
            dots = dots.view(-1, width, heads, per_page).transpose(2, 3).contiguous()
            found = row_sum(weights[active] * dots).squeeze(-1)  # [b, W, 64 / pool]
            real = blocks.token[active] >= 0
            scores[token[active][real], tile * per_page : (tile + 1) * per_page] = found[real]
    return scores
