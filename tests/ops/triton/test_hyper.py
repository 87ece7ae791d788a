"""Hyper-connections against the reference, with logits that twenty iterations do not settle."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.reference import hyper as reference
from tests.ops.triton.layers import DTYPES, NAN, poisoned
from tests.ops.triton.side_by_side import equal_bytes
from tests.ops.triton.tolerances import within

kernels = pytest.importorskip("millpond.ops.triton.hyper")
pytestmark = pytest.mark.usefixtures(poisoned.__name__)

NAMED = {"iterations": 20, "hyper_eps": 1e-6, "norm_eps": 1e-5}


def inputs(n: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """streams [7, n, hidden], fn, base, scale."""
    made = torch.Generator().manual_seed(n)
    mixes = (2 + n) * n
    return (
        torch.randn(7, n, hidden, generator=made).to(dtype),
        torch.randn(mixes, n * hidden, generator=made) / (n * hidden) ** 0.5,
        torch.randn(mixes, generator=made),
        torch.tensor([1.0, 0.7, 3.0]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "hidden"), [(4, 300), (2, 33), (4, 1100)], ids=str)
def test_streams_collapse_and_mix_as_in_the_reference(
    n: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    streams, *rest = inputs(n, hidden, dtype)
    there = [v.to(device) for v in (streams, *rest)]
    expected = reference.hyper_pre(streams, *rest, **NAMED)
    found = kernels.hyper_pre(*there, **NAMED)
    for part, wanted in zip(found, expected, strict=True):
        assert part.dtype == wanted.dtype
        torch.testing.assert_close(part.cpu(), wanted, **within("hyper", wanted.dtype))
    alone = kernels.hyper_pre(there[0][-1:], *there[1:], **NAMED)
    for part, all_of_them in zip(alone, found, strict=True):
        assert equal_bytes(part.cpu(), all_of_them[-1:].cpu())

    post, mix, y = expected
    wanted = reference.hyper_post(y, streams, post, mix)
    out = kernels.hyper_post(y.to(device), there[0], post.to(device), mix.to(device))
    torch.testing.assert_close(out.cpu(), wanted, **within("hyper", dtype))
    mean = kernels.hyper_mean(there[0])
    torch.testing.assert_close(mean.cpu(), reference.hyper_mean(streams), **within("hyper", dtype))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # numpy's
def test_no_tokens_are_none_and_a_broken_one_stays_alone(device: torch.device) -> None:
    streams, *rest = (v.to(device) for v in inputs(4, 40, torch.float32))
    none = kernels.hyper_pre(streams[:0], *rest, **NAMED)
    assert [tuple(part.shape) for part in none] == [(0, 4), (0, 4, 4), (0, 40)]
    assert kernels.hyper_post(none[2], streams[:0], none[0], none[1]).shape == (0, 4, 40)
    assert kernels.hyper_mean(streams[:0]).shape == (0, 40)
    clean = kernels.hyper_pre(streams, *rest, **NAMED)
    streams[2] = NAN
    broken = kernels.hyper_pre(streams, *rest, **NAMED)
    others = [0, 1, 3, 4, 5, 6]
    for part, wanted in zip(broken, clean, strict=True):
        assert part[2].isnan().all()
        assert equal_bytes(part[others].cpu(), wanted[others].cpu())


def test_three_streams_are_refused(device: torch.device) -> None:
    streams = torch.zeros(1, 3, 16, device=device)
    with pytest.raises(ValueError, match="3 residual streams"):
        kernels.hyper_pre(streams, streams, streams, streams, **NAMED)
