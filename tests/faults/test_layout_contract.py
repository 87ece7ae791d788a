"""Kind: two kernels of one engine disagree on the order of a state's dimensions."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.reference.delta import delta_decode, delta_prefill
from tests.faults.delta_rule import HEADS, K, V, layer, packed


@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
@pytest.mark.parametrize("forms", [(delta_prefill, delta_decode), (delta_decode, delta_prefill)])
def test_chunk_form_and_token_form_continue_from_each_others_states(forms, by_channel):
    """A square state hides a transposition from the shapes; here V and K differ."""
    sequence = layer(192, by_channel=by_channel)
    first, second = forms
    bank = torch.full((2, HEADS, V, K), float("nan"))
    sequence.fold(first, bank, packed([64], [-1], [0]), [(0, 64)])
    sequence.fold(second, bank, packed([128], [0], [1]), [(64, 192)])
    torch.testing.assert_close(bank[0], sequence.state_after(64), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bank[1], sequence.state_after(192), rtol=1e-4, atol=1e-5)
