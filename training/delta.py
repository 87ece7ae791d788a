"""The gated delta rule with one decay per key channel, differentiable, over packed documents.

`delta_rule` runs the chunked form on any device; on CUDA it runs the kernels of `delta_cuda`.
"""

import torch

CLEAR = -60.0
"""The log decay that empties a state: small enough, and finite, so that differences stay exact."""


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    starts: torch.Tensor,
    row: int,
) -> torch.Tensor:
    """Outputs of the recurrence S = e^g S; S += k (beta (v - S'k))'; o = S'q.

    q, k, v, g: [N, H, D] float32, q and k already normalised and q scaled; beta: [N, H].
    Documents lie in rows of `row` tokens and begin at `starts`, where g is `CLEAR`.
    """
    if q.is_cuda:
        from training.delta_cuda import DeltaRule  # noqa: PLC0415  (triton is optional)

        return DeltaRule.apply(q, k, v, g, beta, starts)
    rows = [x.view(-1, row, *x.shape[1:]).transpose(1, 2) for x in (q, k, v, g, beta)]
    return chunked(*rows).transpose(1, 2).reshape(v.shape)


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk: int = 32,
) -> torch.Tensor:
    """The chunked form; q, k, v, g: [B, H, T, D], beta: [B, H, T]; any T.

    Decays are subtracted before they are exponentiated.
    """
    batch, heads, length, width = q.shape
    pad = -length % chunk

    def split(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, pad))
        return padded.view(batch, heads, -1, chunk, x.shape[-1])

    q, k, v, g, beta = split(q), split(k), split(v), split(g), split(beta[..., None])
    total = g.cumsum(-2)
    place = torch.arange(chunk, device=q.device)
    causal = (place[:, None] >= place)[..., None]
    gap = total[..., :, None, :] - total[..., None, :, :]
    decay = gap.masked_fill(~causal, float("-inf")).exp()
    inner = torch.einsum("bhnic,bhnjc,bhnijc->bhnij", k, k, decay).tril(-1) * beta
    scores = torch.einsum("bhnic,bhnjc,bhnijc->bhnij", q, k, decay)
    eye = torch.eye(chunk, device=q.device, dtype=q.dtype)
    solve = torch.linalg.solve_triangular(eye + inner, eye.expand_as(inner), upper=False)
    values = solve @ (beta * v)
    keys = solve @ (beta * k * total.exp())
    state = q.new_zeros(batch, heads, width, v.shape[-1])
    out = []
    for i in range(q.shape[2]):
        fresh = values[:, :, i] - keys[:, :, i] @ state
        out.append((q[:, :, i] * total[:, :, i].exp()) @ state + scores[:, :, i] @ fresh)
        last = total[:, :, i, -1:]
        carried = k[:, :, i] * (last - total[:, :, i]).exp()
        state = last.exp().transpose(-1, -2) * state + carried.transpose(-1, -2) @ fresh
    return torch.stack(out, 2).flatten(2, 3)[:, :, :length]
