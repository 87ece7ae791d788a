"""Sampling data by seat, and which logits a plan needs at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millpond.ops.batch import VerifyRows
from millpond.ops.bind import bind
from millpond.ops.reference.sampling import SamplingRows, log_probabilities
from millpond.plan.sampling import SamplingParams
from millpond.plan.step import Emitted, Row, SeatLoad, StepPlan, Verified, VerifyRow
from millpond.runtime.outcome import Outcome, Scored, prompt_scores
from millpond.runtime.outcome import outcome as read_outcome
from millpond.runtime.report import Layout, pack
from millpond.runtime.seats import SeatSampling
from millpond.runtime.verify import Drafted, Draw, Drawn, Verifier, wanted
from millpond.state.lease import Seat, SlotId

VOCAB = 50
EOS = 7
CPU = torch.device("cpu")


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **given})


OPS = bind(CPU)


def seated(*loads: SeatLoad) -> Verifier:
    verifier = Verifier(SeatSampling(6, VOCAB, CPU, OPS, eos_token_ids=(EOS,)), OPS)
    verifier.load(loads)
    return verifier


def drawn(verifier: Verifier, draws: list[Draw], logits: torch.Tensor) -> tuple[Emitted, ...]:
    return read(verifier.draw(draws, logits, None)).emitted


def load(
    seat: int, *, tokens: tuple[int, ...] = (1, 2, 3), index: int = 0, **given: Any
) -> SeatLoad:
    prompt_len = given.pop("prompt_len", len(tokens))
    return SeatLoad(
        seat=Seat(seat),
        request=f"r{seat}",
        sample_index=index,
        params=params(**given),
        tokens=tokens,
        prompt_len=prompt_len,
    )


def logits_with(*best: tuple[int, float]) -> torch.Tensor:
    row = torch.zeros(1, VOCAB)
    for token, value in best:
        row[0, token] = value
    return row


def draw(verifier: Verifier, seat: int, logits: torch.Tensor, position: int = 3) -> Emitted:
    return drawn(verifier, [Draw(Seat(seat), 0, position)], logits)[0]


def drafted(
    *rows: tuple[int, tuple[int, ...]], width: int, pending: int = 0, most: int | None = None
) -> Drafted:
    """Verify rows, each (seat, its first token and drafts); the first tokens stand at 3."""
    count = torch.tensor([len(tokens) - 1 for _, tokens in rows])
    same = torch.zeros_like(count)
    verify = VerifyRows(
        width=width,
        state_in=same,
        state_out=same,
        base=same + 3 - pending,
        pending=same + pending,
        num_drafts=count if most is None else count.clamp(max=most),
        parity=same,
        seats=torch.tensor([seat for seat, _ in rows]),
        export_end=same - 1,
        export_slot=same - 1,
    )
    padded = [(*tokens, *(0,) * (width - len(tokens))) for _, tokens in rows]
    return Drafted(tuple(seat for seat, _ in rows), verify, torch.tensor(padded))


def on_host(parts: tuple[torch.Tensor, ...]) -> tuple[np.ndarray, ...]:
    """The parts of a report, packed and read again."""
    return Layout.of(parts).read(pack(parts).numpy().view(np.uint8))


def read(drawn: Drawn) -> Outcome:
    return read_outcome(drawn.asked, on_host(drawn.parts))


def outcome(verifier: Verifier, logits: torch.Tensor, rows: Drafted) -> Outcome:
    return read(verifier.draw((), logits, rows))


def row(seat: int, tokens: tuple[int, ...], start: int = 0, **given: Any) -> Row:
    return Row(
        request=f"r{seat}",
        seat=Seat(seat),
        start=start,
        tokens=tokens,
        state_in=SlotId(0) if start else None,
        state_out=SlotId(1),
        **given,
    )


def test_only_rows_that_emit_or_are_scored_become_logits() -> None:
    plan = StepPlan(
        step=1,
        prefill=(
            row(0, (1, 2, 3)),
            row(1, (4, 5, 6, 7), prompt_logprobs=0, next_token=8),
            row(2, (4, 5), emit_seats=(Seat(2), Seat(4)), prompt_logprobs=1),
        ),
        decode=(row(3, (9,), start=5, emit_seats=(Seat(3),)),),
    )
    want = wanted(plan, width=1)
    assert want.at == (8, 9, 3, 4, 5, 6, 7)
    assert want.num_drawn == 2
    assert [(d.seat, d.row, d.position) for d in want.draws] == [(2, 0, 2), (4, 0, 2), (3, 1, 6)]
    assert [(s.first, s.count) for s in want.scored] == [(3, 4), (7, 1)]


def test_every_place_of_a_verify_row_becomes_logits_after_what_known_rows_draw_from() -> None:
    live = VerifyRow(
        request="r4",
        seat=Seat(4),
        start=9,
        pending=2,
        num_drafts=1,
        state_in=SlotId(3),
        state_out=SlotId(3),
    )
    plan = StepPlan(
        step=1,
        prefill=(row(0, (1, 2, 3), emit_seats=(Seat(0),), prompt_logprobs=0),),
        decode=(row(3, (9,), start=5, emit_seats=(Seat(3),)),),
        verify=(live, live),
    )
    want = wanted(plan, width=3)
    assert want.at == (2, 3, 4, 5, 6, 7, 8, 9, 0, 1)
    assert want.num_drawn == 8
    assert [d.seat for d in want.draws] == [0, 3]


def test_every_seat_keeps_its_own_parameters_whatever_the_order_of_the_batch() -> None:
    verifier = seated(
        load(0, temperature=1.0, seed=5),
        load(3, temperature=1.0, seed=6, index=1),
        load(4, temperature=0.7, top_k=3, seed=2**64 - 1),
    )
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)).repeat(2, 1)[:3]
    draws = [Draw(Seat(0), 0, 11), Draw(Seat(3), 1, 4), Draw(Seat(4), 2, 9)]
    together = {e.seat: e.token for e in drawn(verifier, draws, logits)}
    for order in ([2, 0, 1], [1], [0, 2]):
        some = [Draw(draws[i].seat, n, draws[i].position) for n, i in enumerate(order)]
        alone = drawn(verifier, some, logits[order])
        assert {e.seat: e.token for e in alone} == {
            draws[i].seat: together[draws[i].seat] for i in order
        }


def test_samples_of_a_fan_out_draw_differently_from_the_same_logits() -> None:
    verifier = seated(*(load(i, temperature=1.0, seed=3, index=i) for i in range(6)))
    emitted = drawn(verifier, [Draw(Seat(i), 0, 3) for i in range(6)], torch.zeros(1, VOCAB))
    assert len({e.token for e in emitted}) > 1


def test_a_generated_token_is_penalised_from_then_on_and_after_a_reload() -> None:
    logits = logits_with((5, 4.0), (6, 3.5))
    verifier = seated(load(1, frequency_penalty=1.0))
    assert [draw(verifier, 1, logits, p).token for p in (3, 4)] == [5, 6]
    reloaded = seated(load(1, frequency_penalty=1.0, tokens=(1, 2, 3, 5), prompt_len=3))
    assert draw(reloaded, 1, logits).token == 6
    # A prompt's tokens count for the repetition penalty only.
    prompt = seated(load(1, frequency_penalty=1.0, tokens=(5, 5), prompt_len=2))
    assert draw(prompt, 1, logits).token == 5
    repeated = seated(load(1, repetition_penalty=2.0, tokens=(5,), prompt_len=1))
    assert draw(repeated, 1, logits).token == 6


def test_a_seat_loaded_anew_forgets_its_former_tenant() -> None:
    logits = logits_with((5, 4.0), (6, 3.5))
    verifier = seated(load(1, frequency_penalty=1.0, logit_bias=((9, 50.0),)))
    assert draw(verifier, 1, logits).token == 9
    verifier.load([load(1, frequency_penalty=1.0)])
    assert draw(verifier, 1, logits).token == 5
    verifier.load([load(1)])
    assert [draw(verifier, 1, logits).token for _ in range(2)] == [5, 5]


def test_no_stop_token_is_drawn_before_min_tokens() -> None:
    logits = logits_with((EOS, 9.0), (8, 8.0), (6, 7.0))
    verifier = seated(load(1, min_tokens=2, stop_token_ids=(8,)))
    assert [draw(verifier, 1, logits, position).token for position in (3, 4, 5)] == [6, 6, EOS]
    ignoring = seated(load(1, min_tokens=2, ignore_eos=True))
    assert draw(ignoring, 1, logits).token == EOS


def test_log_probabilities_come_only_when_asked_for_and_are_the_models_own() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    verifier = seated(load(0), load(1, logprobs=0), load(2, logprobs=3, logit_bias=((4, 90.0),)))
    emitted = drawn(verifier, [Draw(Seat(i), i, 3) for i in range(3)], logits)
    expect = log_probabilities(logits)
    assert (emitted[0].logprob, emitted[0].top) == (None, ())
    assert emitted[1].logprob == pytest.approx(float(expect[1, emitted[1].token]))
    assert emitted[1].top == ()
    assert emitted[2].token == 4
    assert emitted[2].logprob == pytest.approx(float(expect[2, 4]))
    assert [i for i, _ in emitted[2].top] == expect[2].topk(3).indices.tolist()


def test_a_row_with_a_nan_is_not_finite_and_leaves_the_others_alone() -> None:
    verifier = seated(load(0), load(1))
    logits = torch.cat((logits_with((5, float("nan"))), logits_with((6, 2.0))))
    emitted = drawn(verifier, [Draw(Seat(0), 0, 3), Draw(Seat(1), 1, 3)], logits)
    assert [e.finite for e in emitted] == [False, True]
    assert emitted[1].token == 6


def test_prompt_scores_are_those_of_each_known_successor_across_blocks() -> None:
    tokens = tuple(i % VOCAB for i in range(300))
    hidden = torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(2))
    scored = Scored(row(0, tokens, start=64, prompt_logprobs=2, next_token=41), 0, 300)
    parts = seated(load(0)).score_prompts([scored], hidden, lambda h: h)
    (result,) = prompt_scores([scored], on_host(parts))
    expect = log_probabilities(hidden)
    assert [e.position for e in result.entries] == list(range(65, 365))
    assert [e.token for e in result.entries] == [*tokens[1:], 41]
    assert [e.logprob for e in result.entries] == pytest.approx(
        expect.gather(1, torch.tensor([*tokens[1:], 41])[:, None]).squeeze(1).tolist()
    )
    assert all(len(e.top) == 2 for e in result.entries)


def test_drafts_are_accepted_up_to_the_first_that_was_not_drawn() -> None:
    logits = torch.cat([logits_with((t, 5.0)) for t in (11, 12, 13, 14)])
    cases = {
        (9, 11, 12, 13): [11, 12, 13, 14],
        (9, 11, 12, 30): [11, 12, 13],
        (9, 30, 12, 13): [11],  # what stands after a wrong draft is wrong, whatever it is
        (9, 11): [11, 12],
        (9,): [11],
    }
    for tokens, run in cases.items():
        for pending in (0, 2):
            got = outcome(seated(load(1)), logits, drafted((1, tokens), width=4, pending=pending))
            assert [e.token for e in got.emitted] == run
            assert got.verified == (Verified(Seat(1), len(tokens) - 1, len(run) - 1),)
            assert got.bases == (3 - pending,)


def test_a_draft_that_is_not_to_be_verified_is_not_accepted() -> None:
    logits = torch.cat([logits_with((t, 5.0)) for t in (11, 12, 13)])
    got = outcome(seated(load(1)), logits, drafted((1, (9, 11, 12)), width=3, most=1))
    assert [e.token for e in got.emitted] == [11, 12]
    assert got.verified == (Verified(Seat(1), 1, 1),)


def test_verify_rows_draw_beside_known_ones_each_with_its_seats_parameters() -> None:
    verifier = seated(*(load(i, temperature=1.0, seed=i, index=i % 2) for i in range(4)))
    noise = torch.Generator().manual_seed(1)
    logits = torch.randn(6, VOCAB, generator=noise)
    expect = {}
    for seat, rows in ((0, logits[2:4]), (3, logits[4:6])):
        expect[seat] = [draw(verifier, seat, rows[i : i + 1], 4 + i).token for i in range(2)]
    expect[1] = [draw(verifier, 1, logits[0:1], 8).token]
    expect[2] = [draw(verifier, 2, logits[1:2], 5).token]
    rows = drafted((3, (9, expect[3][0])), (0, (9, VOCAB - 1)), width=2)
    mixed = torch.cat((logits[:2], logits[4:6], logits[2:4]))
    got = read(verifier.draw([Draw(Seat(1), 0, 8), Draw(Seat(2), 1, 5)], mixed, rows))
    assert [(e.seat, e.token) for e in got.emitted] == [
        (1, expect[1][0]),
        (2, expect[2][0]),
        (3, expect[3][0]),
        (3, expect[3][1]),
        (0, expect[0][0]),
    ]


def test_a_fan_out_beside_verify_rows_shares_its_own_logits_alone() -> None:
    verifier = seated(*(load(i) for i in range(4)))
    logits = torch.cat([logits_with((t, 5.0)) for t in (21, 22, 11, 12)])
    draws = [Draw(Seat(s), r, 3) for s, r in ((0, 0), (1, 0), (2, 1))]
    got = read(verifier.draw(draws, logits, drafted((3, (9, 11)), width=2)))
    assert [(e.seat, e.token) for e in got.emitted] == [(0, 21), (1, 21), (2, 22), (3, 11), (3, 12)]


def test_penalties_count_the_drafts_before_a_place_and_then_what_was_emitted() -> None:
    logits = logits_with((5, 4.0), (6, 3.5), (7, 3.2)).expand(3, -1)
    verifier = seated(load(1, frequency_penalty=1.0), load(2))
    rows = drafted((2, (9, 5, 5)), (1, (9, 5, 6)), width=3)
    got = outcome(verifier, torch.cat((logits, logits)), rows)
    assert [(e.seat, e.token) for e in got.emitted] == [
        *((2, 5), (2, 5), (2, 5)),
        *((1, 5), (1, 6), (1, 7)),
    ]
    # Now 5, 6 and 7 were generated once each: as plain draws would have it.
    assert draw(verifier, 1, logits[:1], 6).token == 5
    # A wrong draft is not counted as generated, nor is what was drawn after it.
    verifier = seated(load(1, frequency_penalty=1.0))
    got = outcome(verifier, logits, drafted((1, (9, 6, 7)), width=3))
    assert [e.token for e in got.emitted] == [5]
    assert [draw(verifier, 1, logits[:1], p).token for p in (4, 5)] == [6, 7]


def test_a_stop_token_may_be_drawn_from_its_position_on_within_a_row() -> None:
    logits = logits_with((EOS, 9.0), (6, 7.0)).expand(3, -1)
    verifier = seated(load(1, min_tokens=2))  # after a prompt of 3 tokens: from position 5 on
    for pending in (0, 1):
        got = outcome(verifier, logits, drafted((1, (9, 6, EOS)), width=3, pending=pending))
        assert [e.token for e in got.emitted] == [6, EOS, EOS]


def test_every_emitted_position_has_the_models_own_log_probabilities() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    best = logits.argmax(-1).tolist()
    verifier = seated(load(1, logprobs=2), load(2))
    rows = drafted((2, (9, best[0], best[1])), (1, (9, best[0], 0)), width=3)
    got = outcome(verifier, torch.cat((logits, logits)), rows).emitted
    expect = log_probabilities(logits)
    assert [e.logprob for e in got[:3]] == [None] * 3
    assert [e.token for e in got[3:]] == best[:2]
    for place, emitted in enumerate(got[3:]):
        assert emitted.logprob == pytest.approx(float(expect[place, emitted.token]))
        assert [t for t, _ in emitted.top] == expect[place].topk(2).indices.tolist()


def test_a_run_ends_with_the_first_token_whose_logits_are_not_finite() -> None:
    sound = [logits_with((t, 5.0)) for t in (11, 12, 13)]
    nan = torch.full((1, VOCAB), float("nan"))
    for at in range(3):
        logits = torch.cat((*sound[:at], nan, *sound[at + 1 :]))
        got = outcome(seated(load(1)), logits, drafted((1, (9, 11, 12)), width=3))
        assert [e.finite for e in got.emitted] == [True] * at + [False]
    # Nor is a draft accepted that happens to be what was drawn from no numbers.
    got = outcome(seated(load(1)), nan.expand(3, -1), drafted((1, (9, 0, 0)), width=3))
    assert [e.finite for e in got.emitted] == [False]
    # One that no accepted draft leads to is nobody's business.
    logits = torch.cat((sound[0], nan, nan))
    got = outcome(seated(load(1)), logits, drafted((1, (9, 30, 12)), width=3))
    assert [(e.token, e.finite) for e in got.emitted] == [(11, True)]


def test_a_row_of_no_seat_draws_nothing_and_counts_nothing() -> None:
    verifier = seated(load(0, frequency_penalty=1.0))
    logits = logits_with((5, 4.0), (6, 3.5)).expand(4, -1)
    got = outcome(verifier, logits, drafted((-1, (5, 5)), (0, (9, 5)), width=2))
    assert [(e.seat, e.token) for e in got.emitted] == [(0, 5), (0, 6)]
    assert got.verified == (Verified(Seat(0), 1, 1),)
    counts = verifier.seats.generated(torch.tensor([0]))
    assert counts[0].nonzero().flatten().tolist() == [5, 6]


def test_what_kernels_read_of_a_seats_parameters_is_contiguous() -> None:
    seats = seated(*(load(i, temperature=0.5 + i, seed=i, top_k=i) for i in range(3))).seats
    at = torch.tensor([2, 0, 1, -1])
    plain, asked = seats.plain_rows(at), seats.rows((2, 0, 1, -1), at)
    for rows in (plain, asked):
        assert rows.temperature[:3].tolist() == [2.5, 0.5, 1.5]
        assert rows.top_k[:3].tolist() == [2, 0, 1]
        for name in ("temperature", "top_p", "min_p", "top_k", "seed", "sample_index", "position"):
            assert getattr(rows, name).is_contiguous(), name
    seen: list[SamplingRows] = []
    ops = replace(OPS, sample=lambda logits, rows: seen.append(rows) or OPS.sample(logits, rows))
    verifier = Verifier(SeatSampling(6, VOCAB, CPU, ops), ops)
    verifier.load([load(0), load(1)])
    draws = [Draw(Seat(0), 0, 3), Draw(Seat(1), 1, 9)]
    verifier.draw(draws, torch.zeros(2, VOCAB), None)
    assert seen[0].position.tolist() == [3, 9]
    assert seen[0].position.is_contiguous()
