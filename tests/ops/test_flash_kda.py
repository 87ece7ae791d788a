"""The FlashKDA adapter against a stand-in of the library's operator: the real library did not run.

The stand-in has the operator's schema, checks what the library checks of its arguments, and folds
with the reference: whatever the adapter packs, cuts and copies must come out to the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from millpond.errors import Refused
from millpond.ops.batch import WriteLog
from millpond.ops.bind import backends, bind
from millpond.ops.flash_kda import backend
from millpond.ops.flash_kda.adapter import Piece, delta_prefill, pieces
from millpond.ops.reference import delta, steps
from tests.ops.batches import make_rows, strided_bank

HEADS, DIM = 1, 128
TAIL = "Tensor(d!)? checkpoint_state=None, Tensor? checkpoint_offsets=None"
SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out,"
    " Tensor(c!) workspace, Tensor A_log, Tensor dt_bias, float lower_bound,"
    " Tensor? initial_state=None, Tensor(b!)? final_state=None, Tensor? cu_seqlens=None, {}) -> ()"
)
CALLS: list[int] = []


def fwd(
    q, k, v, g, beta, scale, out, workspace, A_log, dt_bias, lower_bound, initial_state=None,
    final_state=None, cu_seqlens=None, checkpoint_state=None, checkpoint_offsets=None,
) -> None:  # fmt: skip
    """One packed batch; states by value."""
    count = len(cu_seqlens) - 1
    tokens = q.shape[1]
    for x in (q, k, v, g, out):
        assert x.shape == (1, tokens, HEADS, DIM)
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
    assert beta.shape == (1, tokens, HEADS)
    assert beta.dtype == torch.bfloat16
    assert scale == DIM**-0.5
    assert workspace.dtype == torch.uint8
    assert workspace.numel() >= workspace_size(tokens, HEADS, count)
    assert A_log.shape == (HEADS,)
    assert dt_bias.shape == (HEADS, DIM)
    assert A_log.dtype == dt_bias.dtype == torch.float32
    for x in (initial_state, final_state):
        assert x.shape == (count, HEADS, DIM, DIM)
        assert x.dtype == torch.float32
        assert x.is_contiguous()
    lengths = cu_seqlens.diff().tolist()
    assert sum(lengths) == tokens
    assert min(lengths) > 0
    exports = []
    assert (checkpoint_state is None) == (checkpoint_offsets is None)
    if checkpoint_state is not None:
        assert checkpoint_state.shape == final_state.shape
        assert checkpoint_state.dtype == torch.float32
        assert checkpoint_offsets.shape == (count,)
        assert checkpoint_offsets.dtype == cu_seqlens.dtype
        offsets = checkpoint_offsets.tolist()
        assert all(o % 16 == 0 for o in offsets)
        exports = [(row, o, 2 * count + row) for row, o in enumerate(offsets) if o]
    bank = torch.full((3 * count, HEADS, DIM, DIM), float("nan"))
    bank[:count] = initial_state
    ids = range(count)
    rows = make_rows(lengths, [*ids], [count + i for i in ids], exports)
    gate = delta.Gate(A_log, dt_bias.flatten(), lower_bound)
    out[0] = delta.delta_prefill(q[0], k[0], v[0], g[0], beta[0], gate=gate, bank=bank, rows=rows)
    final_state.copy_(bank[count : 2 * count])
    if checkpoint_state is not None:
        checkpoint_state.copy_(bank[2 * count :])
    CALLS.append(count)


def workspace_size(tokens: int, heads: int, count: int = 1) -> int:
    return heads * (-(-tokens // 16) + count) * 16


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A library of the right ABI, or with the last arguments the test names instead."""
    module = ModuleType("flash_kda")
    module.__spec__ = ModuleSpec("flash_kda", None)
    monkeypatch.setitem(sys.modules, "flash_kda", module)
    library = torch.library.Library("flash_kda", "FRAGMENT")
    library.define(SCHEMA.format(getattr(request, "param", TAIL)))
    library.define("get_workspace_size(int T_total, int H, int N=1) -> int")
    library.impl("fwd", fwd, "CPU")
    library.impl("get_workspace_size", workspace_size, "CompositeExplicitAutograd")
    CALLS.clear()
    yield
    library._destroy()
    for name in ("fwd", "get_workspace_size"):
        torch.ops.flash_kda.__dict__.pop(name, None)
    torch.ops.flash_kda._dir.clear()


@pytest.mark.usefixtures("stand_in")
def test_what_the_adapter_packs_cuts_and_copies_comes_out_as_the_reference() -> None:
    made = torch.Generator().manual_seed(2)
    lengths = [64 * 5 + 3, 0, 64, 17, 128]
    tokens = sum(lengths)
    exports = [
        (0, 256, 10), (0, 64, 11), (0, 192, 12), (0, 128, 13), (0, 64, 14), (0, 323, 15),
        (4, 64, 16), (2, 64, 17), (4, 64, -1), (0, 65, 18), (3, 17, 19),
    ]  # fmt: skip

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).bfloat16()

    wide = random(tokens, 3 * HEADS * DIM)  # as the projections give them
    q, k, v = (x.unflatten(-1, (HEADS, DIM)) for x in wide.split(HEADS * DIM, -1))
    decay, beta = random(tokens, HEADS, DIM), random(tokens, HEADS)
    gate = delta.Gate(torch.zeros(HEADS), torch.randn(HEADS * DIM, generator=made), -5.0)
    results = []
    for op in (delta.delta_prefill, delta_prefill):
        bank = strided_bank(20, (HEADS, DIM, DIM))
        wanted = [e for e in exports if e[1] != 65] if op is delta.delta_prefill else exports
        rows = make_rows(lengths, [2, 3, -1, 2, 4], [5, 6, 7, -1, 4], wanted)
        o = op(q, k, v, decay, beta, gate=gate, bank=bank, rows=rows)
        again = replace(rows, written=WriteLog())
        results.append((o, bank, rows.written.agreed(), again))
    (o, bank, report, _), (o_found, bank_found, report_found, _) = results
    assert torch.equal(o_found, o)
    assert torch.equal(bank_found, bank)
    assert report_found == report
    assert CALLS == [4, 1, 1]


def test_a_row_is_cut_at_every_second_state_that_is_wanted() -> None:
    assert pieces([200], [], []) == ((Piece(0, 0, 200),),)
    assert pieces([200], [0], [64]) == ((Piece(0, 0, 200, (), 64, (0,)),),)
    found = pieces([200, 64], [0, 0, 0, 1], [192, 64, 128, 64])
    assert found == (
        (Piece(0, 0, 128, (2,), 64, (1,)), Piece(1, 0, 64, (3,))),
        (Piece(0, 128, 200, (), 64, (0,)),),
    )
    assert pieces([0], [], []) == ()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "dtype, dim, bound, what",
    [
        (torch.float32, 128, -5.0, "bfloat16"),
        (torch.bfloat16, 64, -5.0, "heads of 128"),
        (torch.bfloat16, 128, None, "bounded"),
        (torch.bfloat16, 128, -6.0, "bounded"),
    ],
)
def test_a_layer_that_the_library_cannot_compute_is_refused(dtype, dim, bound, what) -> None:
    x = torch.zeros(3, HEADS, dim, dtype=dtype)
    gate = delta.Gate(torch.zeros(HEADS), torch.zeros(HEADS * dim), bound)
    with pytest.raises(Refused, match=what):
        delta_prefill(
            x, x, x, x, x[:, :, 0], gate=gate, bank=torch.zeros(1, HEADS, dim, dim),
            rows=make_rows([3]),
        )  # fmt: skip


def test_absence_is_said_when_it_is_asked_for_and_nobody_minds_otherwise() -> None:
    with pytest.raises(Refused, match="flash_kda: FlashKDA is not installed"):
        bind(torch.device("cpu"), delta_prefill_backend="flash_kda")
    assert bind(torch.device("cpu")).delta_prefill is not delta_prefill


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "stand_in, missing, extra",
    [
        ("bool use_vsplit=False", "checkpoint_offsets, checkpoint_state", "use_vsplit"),
        (TAIL + ", Tensor? checkpoint_indptr=None", "nothing", "checkpoint_indptr"),
    ],
    indirect=["stand_in"],
)
def test_another_abi_is_an_error_that_names_the_difference(missing: str, extra: str) -> None:
    wanted = f"another ABI: flash_kda::fwd lacks {missing}, adds {extra}"
    with pytest.raises(Refused, match=wanted):
        bind(torch.device("cpu"), delta_prefill_backend="flash_kda")


@pytest.mark.usefixtures("stand_in")
def test_the_right_library_still_needs_cuda_and_is_never_chosen_unasked() -> None:
    assert backend.obstacle() is None
    with pytest.raises(Refused, match="flash_kda: needs CUDA"):
        bind(torch.device("cpu"), delta_prefill_backend="flash_kda")
    known = [replace(b, unusable=lambda device: None) for b in backends() if b.name != "triton"]
    cpu = torch.device("cpu")
    assert bind(cpu, among=known, quiet=True).delta_prefill is delta.delta_prefill
    named = bind(cpu, among=known, delta_prefill_backend="flash_kda", quiet=True)
    assert named.delta_prefill is delta_prefill
    assert named.mix_decode is steps.mix_decode


def test_a_library_that_cannot_be_imported_says_why(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_kda.py").write_text("raise ImportError('undefined symbol: f')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert backend.obstacle() == (
        "FlashKDA is installed and cannot be imported: undefined symbol: f"
    )
