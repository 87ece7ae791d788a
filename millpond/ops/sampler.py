"""What the sampler remembers of each seat: parameters, and token counts where penalties need them.

Knows seats and the plain numbers of a request; chooses nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from millpond.ops.reference.sampling import SamplingRows


class Params(Protocol):
    """The sampling parameters this module reads; `SamplingParams` has them all."""

    @property
    def min_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def has_penalties(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Seat:
    params: Params
    sample_index: int
    prompt_len: int
    ending: tuple[int, ...]  # tokens forbidden until min_tokens are generated


class SamplerState:
    """Sampling data by seat, installed when a request takes the seat.

    Token counts, [num_seats, V] each, are allocated when the first request with penalties comes.
    """

    def __init__(
        self,
        num_seats: int,
        vocab_size: int,
        *,
        eos_token_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self.vocab_size = vocab_size
        self._num_seats = num_seats
        self._eos = tuple(eos_token_ids)
        self._device = device
        self._seats: dict[int, _Seat] = {}
        self._generated: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None

    def load(
        self,
        seat: int,
        params: Params,
        *,
        sample_index: int,
        tokens: Sequence[int],
        prompt_len: int,
    ) -> None:
        """Install a request: `tokens` are all that are known, the first `prompt_len` its prompt."""
        ending = tuple(sorted({*self._eos, *params.stop_token_ids})) if params.min_tokens else ()
        self._seats[seat] = _Seat(params, sample_index, prompt_len, ending)
        if not params.has_penalties:
            return
        if self._generated is None or self._in_prompt is None:
            shape = (self._num_seats, self.vocab_size)
            self._generated = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        known = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        self._generated[seat] = torch.bincount(known[prompt_len:], minlength=self.vocab_size)
        self._in_prompt[seat] = False
        self._in_prompt[seat, known[:prompt_len]] = True

    def observe(self, seats: Sequence[int], tokens: Sequence[int]) -> None:
        """Each seat has generated one more token; a seat may appear once."""
        counted = [i for i, s in enumerate(seats) if self._seats[s].params.has_penalties]
        if counted and self._generated is not None:
            at = tuple(self._ints([values[i] for i in counted]) for values in (seats, tokens))
            self._generated[at] += 1

    def rows(self, seats: Sequence[int], positions: Sequence[int]) -> SamplingRows:
        """How to draw the token at `positions[i]` for `seats[i]`."""
        held = [self._seats[s] for s in seats]
        params = [h.params for h in held]
        bias = [(r, t, v) for r, p in enumerate(params) for t, v in p.logit_bias]
        forbidden = [
            (row, token)
            for row, (h, position) in enumerate(zip(held, positions, strict=True))
            if position - h.prompt_len < h.params.min_tokens
            for token in h.ending
        ]
        any_penalty = any(p.has_penalties for p in params)
        generated = in_prompt = None
        repetition = [p.repetition_penalty for p in params]
        if any_penalty and self._generated is not None and self._in_prompt is not None:
            # A seat without penalties may have another request's counts: it must not read them.
            mine = torch.tensor([p.has_penalties for p in params], device=self._device)[:, None]
            index = self._ints(seats)
            generated = self._generated[index].masked_fill(~mine, 0)
            in_prompt = self._in_prompt[index] & mine
        return SamplingRows(
            temperature=self._floats([p.temperature for p in params]),
            top_k=self._ints([p.top_k for p in params]),
            top_p=self._floats([p.top_p for p in params]),
            min_p=self._floats([p.min_p for p in params]),
            seed=self._ints([_signed64(p.seed) for p in params]),
            sample_index=self._ints([h.sample_index for h in held]),
            position=self._ints(positions),
            repetition=self._floats(repetition),
            presence=self._floats([p.presence_penalty for p in params]),
            frequency=self._floats([p.frequency_penalty for p in params]),
            generated=generated,
            in_prompt=in_prompt,
            bias_row=self._ints([b[0] for b in bias]),
            bias_token=self._ints([b[1] for b in bias]),
            bias_value=self._floats([b[2] for b in bias]),
            forbidden_row=self._ints([f[0] for f in forbidden]),
            forbidden_token=self._ints([f[1] for f in forbidden]),
            any_filter=any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params),
            any_penalty=any_penalty,
            any_noise=any(p.temperature > 0.0 for p in params),
        )

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)


def _signed64(seed: int) -> int:
    """The low 64 bits of any seed as torch's int64 holds them."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >= 1 << 63 else low
