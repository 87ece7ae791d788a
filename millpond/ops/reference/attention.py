"""Causal attention over paged keys and values: grouped-query (GQA) and latent (MLA, absorbed form).

Scores, softmax and sums are fp32. A query folds tiles of 64 positions, one page each, in rising
order from position 0, with a running maximum and sum; so its bytes depend on nothing but its own
past: not on the batch, nor on where its row begins. Chunk-form rows give one block of 64 queries
per page of queries, per-token and verify rows one block per token; all heads that share keys stand
in the same block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond.ops.batch import ForwardBatch
from millpond.ops.reference.dense import rotate_partial, sigmoid_gate, zero_centred_rms_norm
from millpond.ops.reference.linear import batched_matmul, padded_rows

TILE = 64
"""Positions per tile; equals the page size."""

NEGATIVE_INFINITY = float("-inf")


def write_kv(
    cache: torch.Tensor,
    values: torch.Tensor,
    token_page: torch.Tensor,
    token_offset: torch.Tensor,
) -> None:
    """Store values [T, D] in cache [Pg, 64, D], or [T, H, D] in [Pg, H, 64, D].

    token_page, token_offset [T] int64; a token with a negative page is not stored.
    """
    some = token_page >= 0
    page, offset, values = token_page[some], token_offset[some], values[some].to(cache.dtype)
    if cache.ndim == 3:
        cache[page, offset] = values
    else:
        cache[page, :, offset] = values


def turn_and_write(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    token_page: torch.Tensor,
    token_offset: torch.Tensor,
) -> torch.Tensor | None:
    """Queries and keys normalised (zero-centred) and rotated; keys and values into their pages.

    query [T, Hq, D], key, value [T, Hkv, D]; norms [D]; cos, sin [T, n]; pages [Pg, Hkv, 64, D]
    -> the queries [T, Hq, D], or None of none. As `write_kv` for tokens of no page.
    """
    key = rotate_partial(zero_centred_rms_norm(key, k_norm, eps), cos, sin)
    write_kv(key_pages, key, token_page, token_offset)
    write_kv(value_pages, value, token_page, token_offset)
    if query is None:
        return None
    return rotate_partial(zero_centred_rms_norm(query, q_norm, eps), cos, sin)


def paged_gqa(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    *,
    batch: ForwardBatch,
    scale: float,
    gate: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """q [T, Hq, D], key_pages [Pg, Hkv, 64, D], value_pages [Pg, Hkv, 64, Dv] -> [T, Hq, Dv].

    Query head h reads key head h // (Hq / Hkv). The keys of this forward must be written already.
    Positions before `first` are not attended to. What is found goes through `sigmoid_gate` with
    `gate` [T, Hq, Dv], if given.
    """
    selected = None
    if first:
        position = torch.arange(batch.page_table.shape[1] * TILE, device=q.device)
        selected = (position >= first).expand(q.shape[0], -1)
    out = _attend(q, key_pages, value_pages, batch=batch, scale=scale, selected=selected)
    return out if gate is None else sigmoid_gate(out, gate)


def paged_mla(
    q_latent: torch.Tensor,
    latent_pages: torch.Tensor,
    *,
    batch: ForwardBatch,
    scale: float,
    selected: torch.Tensor | None,
) -> torch.Tensor:
    """q_latent [T, H, C], latent_pages [Pg, 64, C] -> [T, H, C]: keys and values are the latents.

    `scale` belongs to the un-absorbed head size. `selected` [T, P * 64] bool limits what a token
    attends to, by absolute position (None: all up to its own); an empty selection gives zeros.
    """
    pages = latent_pages[:, None]
    return _attend(q_latent, pages, pages, batch=batch, scale=scale, selected=selected)


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """The tokens of a batch in blocks that fold the same tiles: B blocks of up to W tokens."""

    token: torch.Tensor  # [B, W] int64, index into the T tokens; negative: no token
    row: torch.Tensor  # [B] int64
    tiles: torch.Tensor  # [B] int64, tiles up to the block's last token
    max_tiles: int


def query_blocks(batch: ForwardBatch) -> tuple[QueryBlocks, ...]:
    """Blocks of chunk-form rows (W = 64), then of per-token rows, then of verify rows (W = 1).

    A kind without tokens is left out. The padding of verify rows gives blocks of no token.
    """
    device = batch.token_ids.device
    tokens, row, tiles, at = [], [], [], 0
    for index, length in enumerate(batch.prefill.lengths):
        for first in range(0, length, TILE):
            tokens.append((at + first, min(TILE, length - first)))
            row.append(index)
            tiles.append(-(-(batch.starts[index] + min(first + TILE, length)) // TILE))
        at += length
    found = []
    if tokens:
        begin, count = torch.tensor(tokens, device=device).unsqueeze(-1).unbind(1)
        step = torch.arange(TILE, device=device)
        token = torch.where(step < count, begin + step, -1)
        found.append(
            QueryBlocks(
                token,
                torch.tensor(row, device=device),
                torch.tensor(tiles, device=device),
                max(tiles),
            )
        )
    singles = at + batch.decode.num_tokens
    if singles > at:
        filled = torch.ones(singles - at, dtype=torch.bool, device=device)
        found.append(_single_queries(batch, at, filled))
    if batch.verify is not None and batch.verify.num_rows:
        found.append(_single_queries(batch, singles, batch.verify.filled.flatten()))
    return tuple(found)


def _single_queries(batch: ForwardBatch, first: int, filled: torch.Tensor) -> QueryBlocks:
    """One block for each token from packed token `first` on: filled [B] bool, whether it is one."""
    token = torch.arange(first, first + filled.shape[0], device=filled.device)
    longest = max(batch.ends[batch.prefill.num_rows :])
    return QueryBlocks(
        torch.where(filled, token, -1)[:, None],
        batch.token_row[token],
        batch.positions[token] // TILE + 1,
        -(-longest // TILE),
    )


def page_tile(
    pages: torch.Tensor, batch: ForwardBatch, row: torch.Tensor, tile: int, pool: int = 1
) -> torch.Tensor:
    """The tile's page of each row in fp32: pages [Pg, H, 64 / pool, D], row [B] -> [B, H, ., D].

    An entry stands for `pool` positions and is there once the last of them is; others read zero,
    whatever the page holds.
    """
    page = batch.page_table[row, tile]
    last = tile * TILE + torch.arange(pool - 1, TILE, pool, device=row.device)
    filled = (page >= 0)[:, None] & (last < batch.row_end[row][:, None])
    values = pages.index_select(0, page.clamp(min=0)).float()
    return values.masked_fill(~filled[:, None, :, None], 0.0)


def _attend(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    *,
    batch: ForwardBatch,
    scale: float,
    selected: torch.Tensor | None,
) -> torch.Tensor:
    out = q.new_zeros((*q.shape[:2], value_pages.shape[-1]))
    for blocks in query_blocks(batch):
        token = blocks.token
        mixed = _attend_blocks(q, key_pages, value_pages, blocks, batch, scale, selected)
        real = token >= 0
        out[token[real]] = mixed[real].to(q.dtype)
    return out


def _attend_blocks(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    blocks: QueryBlocks,
    batch: ForwardBatch,
    scale: float,
    selected: torch.Tensor | None,
) -> torch.Tensor:
    """The attention of one kind of blocks: [B, W, Hq, Dv] fp32."""
    count, width = blocks.token.shape
    heads, kv_heads = q.shape[1], key_pages.shape[1]
    group = heads // kv_heads
    token = blocks.token.clamp(min=0)
    real = blocks.token >= 0
    # Rows of a block's matrix: token by token, each with the heads of its group; padded to 16.
    queries = q[token].float().view(count, width, kv_heads, group, -1).transpose(1, 2)
    queries = queries.reshape(count, kv_heads, width * group, -1)
    lines = padded_rows(width * group)
    queries = torch.nn.functional.pad(queries, (0, 0, 0, lines - width * group))
    position = batch.positions[token]

    shape = (count, kv_heads, lines, 1)
    top = q.new_full(shape, NEGATIVE_INFINITY, dtype=torch.float32)
    total = torch.zeros(shape, dtype=torch.float32, device=q.device)
    mixed = total.new_zeros((*shape[:3], value_pages.shape[-1]))
    for tile in range(blocks.max_tiles):
        active = (blocks.tiles > tile).nonzero().squeeze(1)
        row = blocks.row[active]
        keys = page_tile(key_pages, batch, row, tile)
        values = keys if value_pages is key_pages else page_tile(value_pages, batch, row, tile)
        span = torch.arange(tile * TILE, (tile + 1) * TILE, device=q.device)
        seen = (span <= position[active][..., None]) & real[active][..., None]  # [b, W, 64]
        if selected is not None:
            seen = seen & selected[token[active], tile * TILE : (tile + 1) * TILE]
        seen = torch.nn.functional.pad(
            seen.repeat_interleave(group, 1), (0, 0, 0, lines - width * group)
        )
        scores = batched_matmul(queries[active], keys.transpose(-1, -2).contiguous()) * scale
        scores = scores.masked_fill(~seen[:, None], NEGATIVE_INFINITY)

        old = top[active]
        new = torch.maximum(old, scores.amax(-1, keepdim=True))
        finite = torch.where(new == NEGATIVE_INFINITY, 0.0, new)  # nothing seen so far
        shrink = torch.exp(old - finite)
        weights = torch.exp(scores - finite)
        top[active] = new
        total[active] = total[active] * shrink + weights.sum(-1, keepdim=True)
        mixed[active] = mixed[active] * shrink + batched_matmul(weights, values)
    mixed = mixed / torch.where(total == 0.0, 1.0, total)
    mixed = mixed[:, :, : width * group].reshape(count, kv_heads, width, group, -1)
    return mixed.transpose(1, 2).reshape(count, width, heads, -1)
