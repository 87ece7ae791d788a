"""A row's bytes depend on nothing but its own past: not on how many other rows a forward holds."""

from __future__ import annotations

import torch

from tests.support.oracle import Tiny, random_ids


def test_decoding_rows_do_not_depend_on_their_number(tiny: Tiny) -> None:
    bench = tiny.bench(num_slots=33, num_pages=80, num_seats=33)
    texts = [random_ids(20 + seat, seat) for seat in range(33)]
    bench.hidden([bench.row(s, 0, ids[:-1], None, s) for s, ids in enumerate(texts)])

    def rows(seats: range) -> torch.Tensor:
        """One token of these rows; no state is written."""
        decode = [bench.row(s, len(texts[s]) - 1, texts[s][-1:], s, -1) for s in seats]
        return torch.cat(bench.logits(decode=decode))

    whole = rows(range(33))
    for seats in (range(1), range(1, 3), range(3, 9), range(32, 33), range(15), range(17)):
        assert torch.equal(rows(seats), whole[seats.start : seats.stop]), seats


def test_prompts_do_not_depend_on_what_is_packed_with_them(tiny: Tiny) -> None:
    texts = [random_ids(n, n) for n in (1, 17, 63, 64, 65, 130)]
    together = tiny.bench(num_seats=6)
    packed = together.logits([together.row(s, 0, ids, None, s) for s, ids in enumerate(texts)])
    for seat, ids in enumerate(texts):
        bench = tiny.bench()
        (alone,) = bench.logits([bench.row(0, 0, ids, None, 0)])
        assert torch.equal(alone, packed[seat]), len(ids)
        assert torch.equal(bench.arenas.slots.storage[0], together.arenas.slots.storage[seat]), len(
            ids
        )
