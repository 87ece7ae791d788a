"""From logits to tokens: each seat's sampling data, the draw after a step, and prompt scores.

Knows seats and their sampling parameters; does not know requests, nor when one is finished. Noise,
filters and penalties themselves are `ops.reference.sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millpond.ops.reference.sampling import SamplingRows, sample, token_logprobs
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import Emitted, Row, RowLogprobs, SeatLoad, StepPlan, TokenLogprob
from millpond.state.lease import Seat

SCORE_BLOCK = 256
"""Prompt positions whose logits are held at once: bounds memory at large vocabularies."""

Logits = Callable[[torch.Tensor], torch.Tensor]
Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn: by which seat, from which of the drawn rows, for which position."""

    seat: Seat
    row: int
    position: int


@dataclass(frozen=True, slots=True)
class Scored:
    """A row whose own tokens are scored: `count` positions from packed token `first` on."""

    row: Row
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which logits a plan needs. `at` are packed tokens: the drawn from, then the scored."""

    at: tuple[int, ...]
    num_drawn: int
    draws: tuple[Draw, ...]
    scored: tuple[Scored, ...]


def wanted(plan: StepPlan) -> Wanted:
    """Nothing else of a forward ever becomes logits."""
    drawn: list[int] = []
    draws: list[Draw] = []
    scored: list[Scored] = []
    first = 0
    for row in plan.prefill + plan.decode:
        length = len(row.tokens)
        if row.emit_seats:
            draws += [Draw(seat, len(drawn), row.end) for seat in row.emit_seats]
            drawn.append(first + length - 1)
        if row.prompt_logprobs is not None:
            scored.append(Scored(row, first, length - (row.next_token is None)))
        first += length
    at = (*drawn, *(s.first + i for s in scored for i in range(s.count)))
    return Wanted(at, len(drawn), tuple(draws), tuple(scored))


class Verifier:
    """The sampling data of every seat, on the device; draws tokens and counts them for penalties.

    `eos_token_ids` end a request that does not ignore them: like its stop tokens, they cannot be
    drawn before `min_tokens`.
    """

    def __init__(
        self,
        num_seats: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._eos = tuple(eos_token_ids)
        self._params: list[SamplingParams | None] = [None] * num_seats
        self._prompt_len = [0] * num_seats
        # Columns: temperature, top_p, min_p, repetition, presence, frequency.
        self._floats = torch.zeros((num_seats, 6), dtype=torch.float32, device=device)
        # Columns: top_k, seed, sample index.
        self._integers = torch.zeros((num_seats, 3), dtype=torch.int64, device=device)
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
        seats = self._tensor([load.seat for load in loads])
        self._floats[seats] = torch.tensor(floats, dtype=torch.float32, device=self.device)
        self._integers[seats] = self._tensor(integers)
        for load in loads:
            if load.params.has_penalties:
                self._count(load)

    def draw(self, draws: Sequence[Draw], logits: torch.Tensor) -> tuple[Emitted, ...]:
        """Draw one token for each of `draws` from its row of `logits` [rows, V] fp32."""
        if not draws:
            return ()
        if len(draws) > logits.shape[0]:  # a fan-out: several seats draw from one row
            logits = logits.index_select(0, self._tensor([d.row for d in draws]))
        rows = self._rows(draws)
        drawn = sample(logits, rows)
        self._remember(draws, drawn.token)
        tokens, finite = drawn.token.tolist(), drawn.finite.tolist()
        extras = self._logprobs(draws, logits, drawn.token)
        emitted = []
        for i, d in enumerate(draws):
            logprob, top = extras.get(i, (None, ()))
            emitted.append(
                Emitted(seat=d.seat, token=tokens[i], finite=finite[i], logprob=logprob, top=top)
            )
        return tuple(emitted)

    def score_prompts(
        self, scored: Sequence[Scored], hidden: torch.Tensor, logits: Logits
    ) -> tuple[RowLogprobs, ...]:
        """Log probabilities of known tokens; `hidden` holds the scored positions, row after row."""
        found, at = [], 0
        for s in scored:
            after = () if s.row.next_token is None else (s.row.next_token,)
            known = (*s.row.tokens[1:], *after)
            entries: list[TokenLogprob] = []
            for begin in range(0, s.count, SCORE_BLOCK):
                end = min(begin + SCORE_BLOCK, s.count)
                tokens = self._tensor(known[begin:end])
                table = _table(logits(hidden[at + begin : at + end]), tokens, s.row.prompt_logprobs)
                entries += [
                    TokenLogprob(
                        position=s.row.start + begin + i + 1,
                        token=known[begin + i],
                        logprob=logprob,
                        top=top,
                    )
                    for i, (logprob, top) in enumerate(table)
                ]
            found.append(RowLogprobs(request=s.row.request, entries=tuple(entries)))
            at += s.count
        return tuple(found)

    def _rows(self, draws: Sequence[Draw]) -> SamplingRows:
        params = [self._of(d) for d in draws]
        seats = self._tensor([(d.seat, d.position) for d in draws])
        seat, position = seats.unbind(1)
        floats = self._floats.index_select(0, seat).unbind(1)
        integers = self._integers.index_select(0, seat).unbind(1)
        any_penalty = any(p.has_penalties for p in params)
        bias = [(i, t, v) for i, p in enumerate(params) for t, v in p.logit_bias]
        forbidden = [
            (i, token)
            for i, (d, p) in enumerate(zip(draws, params, strict=True))
            if d.position - self._prompt_len[d.seat] < p.min_tokens
            for token in self._ends(p)
        ]
        places = self._tensor([(i, t) for i, t, _ in bias]).reshape(-1, 2)
        barred = self._tensor(forbidden).reshape(-1, 2)
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
            position=position,
            generated=self._seats_of(self._generated, seat) if any_penalty else None,
            in_prompt=self._seats_of(self._in_prompt, seat) if any_penalty else None,
            bias_row=places[:, 0],
            bias_token=places[:, 1],
            bias_value=torch.tensor(
                [v for _, _, v in bias], dtype=torch.float32, device=self.device
            ),
            forbidden_row=barred[:, 0],
            forbidden_token=barred[:, 1],
            any_filter=any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params),
            any_penalty=any_penalty,
            any_noise=any(p.temperature > 0.0 for p in params),
        )

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        ends = params.stop_token_ids + (() if params.ignore_eos else self._eos)
        return tuple(t for t in ends if 0 <= t < self.vocab_size)

    def _of(self, draw: Draw) -> SamplingParams:
        params = self._params[draw.seat]
        if params is None:
            raise LookupError(f"seat {draw.seat} draws a token and was never loaded")
        return params

    def _logprobs(
        self, draws: Sequence[Draw], logits: torch.Tensor, tokens: torch.Tensor
    ) -> dict[int, tuple[float, Top]]:
        """Log probability and likeliest tokens of the draws that ask for them, by index."""
        asking = [i for i, d in enumerate(draws) if self._of(d).logprobs is not None]
        if not asking:
            return {}
        at = self._tensor(asking)
        counts = [self._of(draws[i]).logprobs or 0 for i in asking]
        table = _table(logits[at], tokens[at], max(counts))
        return {
            i: (logprob, top[:count])
            for i, count, (logprob, top) in zip(asking, counts, table, strict=True)
        }

    def _count(self, load: SeatLoad) -> None:
        """Tell prompt from generated tokens, and how often each was generated."""
        if self._generated is None or self._in_prompt is None:
            shape = (len(self._params), self.vocab_size)
            self._generated = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        generated = np.bincount(
            np.array(load.tokens[load.prompt_len :], np.int64), minlength=self.vocab_size
        )
        self._generated[load.seat] = torch.from_numpy(generated).to(self._generated)
        self._in_prompt[load.seat] = False
        self._in_prompt[load.seat, self._tensor(load.tokens[: load.prompt_len])] = True

    def _remember(self, draws: Sequence[Draw], tokens: torch.Tensor) -> None:
        counting = [i for i, d in enumerate(draws) if self._of(d).has_penalties]
        if counting and self._generated is not None:
            seats = self._tensor([draws[i].seat for i in counting])
            one = torch.ones((), dtype=torch.int32, device=self.device)
            self._generated.index_put_((seats, tokens[counting]), one, accumulate=True)

    def _seats_of(self, table: torch.Tensor | None, seats: torch.Tensor) -> torch.Tensor | None:
        return None if table is None else table.index_select(0, seats)

    def _tensor(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _signed(seed: int) -> int:
    """The same 64 bits as a signed integer: a device has no other."""
    return (seed & (2**64 - 1)) - (2**64 if seed & 2**63 else 0)


def _table(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int | None
) -> list[tuple[float, Top]]:
    """Per row of `logits`: the log probability of its token, and the likeliest (id, value)."""
    chosen, ids, values = token_logprobs(logits, tokens, num_top or 0)
    return [
        (logprob, tuple(zip(row_ids, row_values, strict=True)))
        for logprob, row_ids, row_values in zip(
            chosen.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    ]
