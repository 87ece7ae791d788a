"""Kind: the last, shorter chunk of a prompt is computed wrongly."""

from __future__ import annotations

import pytest
import torch

from millpond.ops.reference.conv import conv_prefill
from millpond.ops.reference.delta import delta_prefill
from tests.faults.delta_rule import HEADS, K, V, layer, packed

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
def test_lengths_around_a_chunk_leave_the_state_of_the_token_by_token_fold(by_channel):
    """The state is compared, not only the outputs: text can stay right for a long while."""
    sequence = layer(max(LENGTHS), by_channel=by_channel)
    for length in LENGTHS:
        chunked = sequence.state_after(length, delta_prefill)
        torch.testing.assert_close(chunked, sequence.state_after(length), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
def test_rows_of_uneven_length_in_one_forward_leave_the_states_they_leave_alone(by_channel):
    sequence = layer(max(LENGTHS), by_channel=by_channel)
    count = len(LENGTHS)
    bank = torch.full((count, HEADS, V, K), float("nan"))
    rows = packed(LENGTHS, [-1] * count, range(count))
    sequence.fold(delta_prefill, bank, rows, [(0, n) for n in LENGTHS])
    for slot, length in enumerate(LENGTHS):
        assert torch.equal(bank[slot], sequence.state_after(length, delta_prefill)), length


def test_a_convolution_window_holds_the_last_inputs_whatever_the_length():
    channels, width = 5, 4
    x = torch.randn(max(LENGTHS), channels)
    weight = torch.randn(channels, width)
    for length in LENGTHS:
        bank = torch.full((1, channels, width - 1), float("nan"))
        conv_prefill(x[:length], weight, bank=bank, rows=packed([length], [-1], [0]))
        whole = torch.cat((torch.zeros(width - 1, channels), x[:length]))
        assert torch.equal(bank[0], whole[-(width - 1) :].T), length
