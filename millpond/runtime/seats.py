"""The sampling data of every seat, on the device, and the one way in which tokens are chosen.

Knows seats, their parameters and how often each token was generated; does not know which rows a
step holds. Noise, filters and penalties themselves are the bound op `sample`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import torch

from millpond.errors import Broken
from millpond.memory.host_ring import HostRing
from millpond.ops.batch import Sampled
from millpond.ops.bind import Bound
from millpond.ops.reference.sampling import SamplingRows
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import SeatLoad, VerifyRow

NOBODY = SamplingParams(max_tokens=1, temperature=0.0)
"""How a row of no seat draws; nothing is done with what it draws."""


class SeatSampling:
    """Installs what requests ask of the sampler, and draws with it.

    A negative seat means none: its row draws something, and nothing is remembered of it.
    `eos_token_ids` end a request that does not ignore them: like its stop tokens, they cannot be
    drawn before `min_tokens`.
    """

    def __init__(
        self,
        num_seats: int,
        vocab_size: int,
        device: torch.device,
        ops: Bound,
        eos_token_ids: Sequence[int] = (),
        ring: HostRing | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.ring = ring or HostRing(device)
        self._ops = ops
        self._eos = tuple(eos_token_ids)
        self._params: list[SamplingParams | None] = [None] * num_seats
        self._prompt_len = [0] * num_seats
        # From which position on each seat draws plainly; the last entry is that of no seat, -1.
        self._plain_from: list[float] = [inf] * num_seats + [0]
        # Rows: temperature, top_p, min_p, repetition, presence, frequency. Kernels want each one
        # contiguous by seat.
        self._floats = torch.zeros((6, num_seats), dtype=torch.float32, device=device)
        # Rows: top_k, seed, sample index.
        self._integers = torch.zeros((3, num_seats), dtype=torch.int64, device=device)
        self._no_integers = torch.zeros(0, dtype=torch.int64, device=device)
        self._no_floats = torch.zeros(0, dtype=torch.float32, device=device)
        # Made when the first request with penalties comes: most traffic has none.
        self._generated: torch.Tensor | None = None  # [seats, V] int32
        self._in_prompt: torch.Tensor | None = None  # [seats, V] bool

    def load(self, loads: Sequence[SeatLoad]) -> None:
        """Install the sampling data of requests that take a seat."""
        if not loads:
            return
        floats, integers = [], []
        for load in loads:
            p = load.params
            self._params[load.seat] = p
            self._prompt_len[load.seat] = load.prompt_len
            if p.has_penalties or p.logit_bias or p.logprobs is not None:
                self._plain_from[load.seat] = inf
            else:
                self._plain_from[load.seat] = load.prompt_len + p.min_tokens
            floats.append(
                (
                    p.temperature,
                    p.top_p,
                    p.min_p,
                    p.repetition_penalty,
                    p.presence_penalty,
                    p.frequency_penalty,
                )
            )
            integers.append((p.top_k, _signed(p.seed), load.sample_index))
        seats, of_float, of_integer = self.ring.send(
            (
                np.array([load.seat for load in loads], np.int64),
                np.array(floats, np.float32).T,
                np.array(integers, np.int64).T,
            )
        )
        self._floats[:, seats] = of_float
        self._integers[:, seats] = of_integer
        for load in loads:
            if load.params.has_penalties:
                self._count(load)

    def params(self, seat: int) -> SamplingParams:
        """What the seat's request asks for. Raises `LookupError` for a seat never loaded."""
        if seat < 0:
            return NOBODY
        params = self._params[seat]
        if params is None:
            raise LookupError(f"seat {seat} draws a token and was never loaded")
        return params

    def all_plain(self, rows: Sequence[VerifyRow]) -> bool:
        """Whether all that these rows draw needs no more than `plain_rows` says."""
        plain_from = self._plain_from
        return all(plain_from[row.seat] <= row.start + 1 for row in rows)

    def plain_rows(self, seat: torch.Tensor) -> SamplingRows:
        """How rows of seats [M] draw by noise and filters alone; the host need not know the seats.

        Positions are left zero.
        """
        at = seat.clamp(min=0)
        floats = self._floats.index_select(1, at).unbind()
        integers = self._integers.index_select(1, at).unbind()
        none = self._no_integers
        return SamplingRows(
            temperature=floats[0],
            top_p=floats[1],
            min_p=floats[2],
            repetition=floats[3],
            presence=floats[4],
            frequency=floats[5],
            top_k=integers[0],
            seed=integers[1],
            sample_index=integers[2],
            position=torch.zeros_like(at),
            generated=None,
            in_prompt=None,
            bias_row=none,
            bias_token=none,
            bias_value=self._no_floats,
            forbidden_row=none,
            forbidden_token=none,
            forbidden_until=none,
            any_filter=True,
            any_penalty=False,
            any_noise=True,
        )

    def rows(self, seats: Sequence[int], seat: torch.Tensor) -> SamplingRows:
        """How the rows of `seats` draw; `seat` [M] is the same on the device.

        Positions are left zero, and nothing is counted yet: `choose` is told both.
        """
        params = [self.params(s) for s in seats]
        any_penalty = any(p.has_penalties for p in params)
        rows = replace(
            self.plain_rows(seat),
            in_prompt=(
                self._in_prompt.index_select(0, seat.clamp(min=0))
                if any_penalty and self._in_prompt is not None
                else None
            ),
            any_filter=any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params),
            any_penalty=any_penalty,
            any_noise=any(p.temperature > 0.0 for p in params),
        )
        bias = [(i, t, v) for i, p in enumerate(params) for t, v in p.logit_bias]
        forbidden = [
            (i, token, self._prompt_len[s] + p.min_tokens)
            for i, (s, p) in enumerate(zip(seats, params, strict=True))
            if p.min_tokens > 0
            for token in self._ends(p)
        ]
        if not bias and not forbidden:
            return rows
        places, values, barred = self.ring.send(
            (
                np.array([(i, t) for i, t, _ in bias], np.int64).reshape(-1, 2),
                np.array([v for _, _, v in bias], np.float32),
                np.array(forbidden, np.int64).reshape(-1, 3),
            )
        )
        return replace(
            rows,
            bias_row=places[:, 0],
            bias_token=places[:, 1],
            bias_value=values,
            forbidden_row=barred[:, 0],
            forbidden_token=barred[:, 1],
            forbidden_until=barred[:, 2],
        )

    def choose(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        position: torch.Tensor,
        generated: torch.Tensor | None,
    ) -> Sampled:
        """Draw from logits [M, V] for `position` [M]; `generated` [M, V] as of that position."""
        return self._ops.sample(logits, replace(rows, position=position, generated=generated))

    def counting(self, seats: Sequence[int]) -> bool:
        """Whether any of these rows draws with penalties."""
        return any(self.params(s).has_penalties for s in seats)

    def generated(self, seat: torch.Tensor) -> torch.Tensor:
        """How often each seat [n] generated each token: a copy [n, V] int32. Some seat counts."""
        if self._generated is None:
            raise Broken("no seat counts its tokens")
        return self._generated.index_select(0, seat.clamp(min=0))

    def remember(
        self,
        seats: Sequence[int],
        seat: torch.Tensor,
        tokens: torch.Tensor,
        counted: torch.Tensor,
    ) -> None:
        """Count those of `tokens` [n] that `counted` [n] bool names; a seat may have several."""
        counting = [i for i, s in enumerate(seats) if self.params(s).has_penalties]
        if counting and self._generated is not None:
            at = self.ring.integers(counting)
            place = seat.index_select(0, at), tokens.index_select(0, at)
            self._generated.index_put_(place, counted.index_select(0, at).int(), accumulate=True)

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        ends = params.stop_token_ids + (() if params.ignore_eos else self._eos)
        return tuple(t for t in ends if 0 <= t < self.vocab_size)

    def _count(self, load: SeatLoad) -> None:
        """Tell prompt from generated tokens, and how often each was generated."""
        if self._generated is None or self._in_prompt is None:
            shape = (len(self._params), self.vocab_size)
            self._generated = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        prompt, text = np.split(np.array(load.tokens, np.int64), [load.prompt_len])
        generated, prompt_tokens = self.ring.send(
            (np.bincount(text, minlength=self.vocab_size).astype(np.int32), prompt)
        )
        self._generated[load.seat] = generated
        self._in_prompt[load.seat].zero_().index_fill_(0, prompt_tokens, True)


def _signed(seed: int) -> int:
    """The same 64 bits as a signed integer: a device has no other."""
    return (seed & (2**64 - 1)) - (2**64 if seed & 2**63 else 0)
