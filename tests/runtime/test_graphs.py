"""For which numbers of rows something is recorded, and what a recording keeps."""

from __future__ import annotations

import pytest
import torch

from millpond.runtime.graphs import (
    CallAgain,
    CudaCapturer,
    bucket_sizes,
    least_with_room,
    num_graphs,
    reach_sizes,
)


def test_the_last_bucket_is_as_large_as_there_are_seats() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(5) == (1, 2, 4, 5)
    assert bucket_sizes(16) == (1, 2, 4, 8, 16)
    assert bucket_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert bucket_sizes(256)[-4:] == (96, 128, 192, 256)
    for most in range(1, 300):
        sizes = bucket_sizes(most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == most


def test_rows_go_to_the_least_bucket_with_room() -> None:
    sizes = bucket_sizes(20)
    assert [least_with_room(rows, sizes) for rows in (1, 2, 3, 5, 8, 9, 17, 20)] == [
        1, 2, 4, 8, 8, 16, 20, 20
    ]  # fmt: skip
    assert least_with_room(21, sizes) is None
    assert least_with_room(1, ()) is None


def test_short_sequences_have_recordings_of_their_own() -> None:
    assert reach_sizes(16) == (16,)
    assert reach_sizes(32) == (32,)
    assert reach_sizes(200) == (32, 200)
    assert reach_sizes(4096) == (32, 256, 4096)
    assert num_graphs(16, 200) == 2 * 5 * 2


CAPTURERS = [
    pytest.param("cpu", id="stand-in"),
    pytest.param("cuda", id="graph", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("where", CAPTURERS)
def test_a_recording_reads_and_writes_the_same_addresses_every_time(where: str) -> None:
    device = torch.device(where)
    capturer = CallAgain() if where == "cpu" else CudaCapturer(torch.device("cuda"))
    x = torch.zeros(4, device=device)
    first = capturer.capture(lambda: (x + 1, x.sum()))
    second = capturer.capture(lambda: (first.outputs[0] * 2,))
    kept = [out.data_ptr() for out in (*first.outputs, *second.outputs)]
    for value in (3.0, 5.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert first.outputs[0].tolist() == [value + 1] * 4
        assert float(first.outputs[1]) == 4 * value
        assert second.outputs[0].tolist() == [2 * value + 2] * 4
    assert [out.data_ptr() for out in (*first.outputs, *second.outputs)] == kept
