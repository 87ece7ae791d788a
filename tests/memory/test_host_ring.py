"""Bytes on their way between host and device: they arrive as they were, however slow the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from millpond.memory.host_ring import HostRing, Landing

CPU = torch.device("cpu")


@dataclass
class SlowDevice:
    """Copies only when it is made to: by `run`, or by somebody who waits for a mark."""

    queued: list[Callable[[], object]] = field(default_factory=list)
    done: int = 0
    waits: int = 0
    staged: list[int] = field(default_factory=list)

    def stage(self, num_bytes: int) -> torch.Tensor:
        self.staged.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.queued.append(lambda: target.copy_(source))

    def mark(self) -> SlowMark:
        return SlowMark(self, self.done + len(self.queued))

    def run(self, count: int) -> None:
        """Do the oldest `count` copies."""
        for copy in self.queued[:count]:
            copy()
        del self.queued[:count]
        self.done += count


@dataclass
class SlowMark:
    device: SlowDevice
    at: int

    def query(self) -> bool:
        return self.device.done >= self.at

    def synchronize(self) -> None:
        if not self.query():
            self.device.waits += 1
            self.device.run(self.at - self.device.done)


def numbers(start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int64)


def test_arrays_of_every_kind_arrive_in_one_copy_as_they_were() -> None:
    device = SlowDevice()
    ring = HostRing(CPU, link=device)
    sent = (
        numbers(3, 5),
        np.array([[1.5, -0.0], [np.inf, 2.0**-126]], np.float32).T,
        np.array([7], np.int32),
        np.zeros((0, 3), np.int64),
        np.arange(9, dtype=np.uint8).reshape(3, 3),
    )
    found = ring.send(sent)
    assert len(device.queued) == 1
    device.run(1)
    for there, array in zip(found, sent, strict=True):
        assert there.shape == array.shape
        assert np.array_equal(there.numpy(), array)
        assert there.numpy().dtype == array.dtype
    assert [x.shape for x in ring.send(())] == []


@pytest.mark.parametrize("behind", [0, 1, 5, 11])
def test_a_stage_is_used_again_only_when_the_device_is_past_it(behind: int) -> None:
    """However far the device is behind, and wherever the ring ends."""
    device = SlowDevice()
    ring = HostRing(CPU, num_bytes=1024, link=device)
    found, sizes = [], [1 + (7 * i) % 23 for i in range(200)]
    for i, size in enumerate(sizes):
        found.append(ring.send((numbers(1000 * i, size),))[0])
        device.run(max(0, len(device.queued) - behind))
    device.run(len(device.queued))
    for i, (there, size) in enumerate(zip(found, sizes, strict=True)):
        assert np.array_equal(there.numpy(), numbers(1000 * i, size))
    assert device.waits == ring.num_waits
    assert device.staged == [1024]


def test_the_host_waits_where_a_whole_ring_is_under_way_and_nowhere_else() -> None:
    device = SlowDevice()
    ring = HostRing(CPU, num_bytes=8 * 64, link=device)
    for i in range(8):
        ring.send((numbers(i, 8),))
    assert (device.waits, len(device.queued)) == (0, 8)
    ring.send((numbers(8, 8),))
    assert (device.waits, len(device.queued)) == (1, 8)


def test_more_than_the_ring_holds_makes_it_grow_and_what_was_under_way_arrives() -> None:
    device = SlowDevice()
    ring = HostRing(CPU, num_bytes=256, link=device)
    small = ring.send((numbers(0, 20),))[0]
    large = ring.send((numbers(5, 1000),))[0]
    after = ring.send((numbers(9, 20),))[0]
    assert device.waits == 0
    device.run(3)
    for there, array in (
        (small, numbers(0, 20)),
        (large, numbers(5, 1000)),
        (after, numbers(9, 20)),
    ):
        assert np.array_equal(there.numpy(), array)
    assert len(device.staged) == 2


def test_what_has_a_place_on_the_device_is_overwritten_where_it_is() -> None:
    ring = HostRing(CPU)
    place = torch.zeros((2, 3), dtype=torch.int64)
    address = place.data_ptr()
    ring.fill(place, numbers(1, 6).reshape(2, 3))
    assert place.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert place.data_ptr() == address
    with pytest.raises(ValueError, match="do not fill"):
        ring.fill(place, numbers(1, 5))


def test_what_lands_is_what_was_there_when_it_was_sent_for() -> None:
    device = SlowDevice()
    landing = Landing(CPU, device, num_stages=1)
    assert len(device.staged) == 1
    source = torch.arange(4)
    first = landing.receive(source)
    assert device.waits == 0
    device.queued.append(lambda: source.add_(10))
    second = landing.receive(source)
    assert len(device.staged) == 2
    assert first.wait().view(np.int64).tolist() == [0, 1, 2, 3]
    assert second.wait().view(np.int64).tolist() == [10, 11, 12, 13]
    # A stage that was read is taken again, one that was not is nobody else's.
    third, fourth = landing.receive(source), landing.receive(source)
    assert len(device.staged) == 2
    source += 1
    fifth = landing.receive(source)
    assert len(device.staged) == 3
    assert [a.wait().view(np.int64)[0] for a in (fifth, fourth, third)] == [11, 11, 11]
