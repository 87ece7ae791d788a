"""The workloads A to G and I: what is asked, of an engine with which settings, in which variants.

Knows sizes and settings; runs nothing. Letters are those of docs/en/performance.md. All are greedy,
of token ids, with ends of texts ignored, so that lengths are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.engine.tower import Need
from bench.engine.traffic import (
    Ask,
    Conversations,
    Draw,
    Given,
    Traffic,
    at_once,
    some_cold,
)

BUDGET = 8192
"""Prompt tokens a step, unless a workload is about them."""

CHECKPOINTS = 256

CHANCE = 0.8
"""The chance that a draft is accepted, in workloads that do not vary it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Smaller than published: `work` cuts requests or answers, `prompt` all lengths of prompts."""

    work: float = 1.0
    prompt: float = 1.0

    def count(self, full: int, least: int = 2) -> int:
        """Requests, turns, or tokens of an answer."""
        return max(min(least, full), round(full * self.work))

    def length(self, full: int) -> int:
        """Tokens of a prompt, or of a part of one."""
        return max(1, round(full * self.prompt))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One row of results: a workload under one kind of engine.

    `traffic` makes a repetition; `primed` makes another kind of it: what is asked before the clock
    starts, and the repetition. `chance` is that of a forced draft.
    """

    workload: str
    name: str
    need: Need
    settings: dict[str, Any]
    traffic: Callable[[Draw], Traffic]
    primed: Callable[[Draw], tuple[Traffic, Traffic]] | None = None
    chance: float | None = None
    asked: dict[str, Any] = field(default_factory=dict)  # sizes, for the record

    @property
    def label(self) -> str:
        """Unique among all."""
        return f"{self.workload} {self.name}".strip()


def settings(need: Need, *, caching: bool, **changes: Any) -> dict[str, Any]:
    """Of an engine that may use all of its tower."""
    found = dict(
        max_batch_size=need.seats,
        max_prefill_tokens=BUDGET,
        session_len=need.session,
        prefix_caching=caching,
        checkpoint_mode="interior" if caching else "off",
        checkpoint_budget=need.checkpoints if caching else 0,
        decode_checkpoint_interval=64 if caching else 0,
    )
    return found | changes


def a_stream(scale: Scale) -> Iterator[Variant]:
    """A: one request alone."""
    prompt, out = scale.length(512), scale.count(256, 8)
    need = Need(seats=1, session=prompt + out + 8, tokens=prompt + out + 8, checkpoints=8)
    yield Variant(
        workload="A",
        name="",
        need=need,
        settings=settings(need, caching=False),
        traffic=lambda draw: at_once(draw, 1, prompt, out),
        asked=dict(requests=1, prompt=prompt, out=out),
    )


def _batch(
    workload: str, scale: Scale, drafts: int, chance: float | None, note: str = ""
) -> Variant:
    prompt, out, count = scale.length(1024), scale.count(512, 8), 64
    session = prompt + out + drafts + 8
    need = Need(seats=count, session=session, tokens=count * session, checkpoints=8, drafts=drafts)
    return Variant(
        workload=workload,
        name=note,
        need=need,
        settings=settings(need, caching=False),
        traffic=lambda draw: at_once(draw, count, prompt, out),
        chance=chance,
        asked=dict(requests=count, prompt=prompt, out=out, drafts=drafts, chance=chance),
    )


def b_batch(scale: Scale) -> Iterator[Variant]:
    """B: 64 at once, no caching."""
    yield _batch("B", scale, 0, None)


def _prefix(
    workload: str,
    name: str,
    scale: Scale,
    *,
    caching: bool,
    shared: int = 4096,
    warm: bool = False,
    drafts: int = 0,
    chance: float | None = None,
) -> Variant:
    count, prompt, out = scale.count(64, 4), scale.length(8192), 128
    out = max(8, round(out * min(1.0, 4 * scale.prompt)))
    common = scale.length(shared) if shared else 0
    session = prompt + out + drafts + 8
    need = Need(
        seats=64, session=session, tokens=count * session, checkpoints=CHECKPOINTS, drafts=drafts
    )

    def primed(draw: Draw) -> tuple[Traffic, Traffic]:
        prefix = draw.tokens(common)
        first = Given([Ask(prefix + draw.tokens(1), 1)])
        rest = Given([Ask(prefix + draw.tokens(prompt - common), out) for _ in range(count)])
        return first, rest

    return Variant(
        workload=workload,
        name=name,
        need=need,
        settings=settings(need, caching=caching),
        traffic=lambda draw: at_once(draw, count, prompt, out, shared=common),
        primed=primed if warm else None,
        chance=chance,
        asked=dict(
            requests=count, prompt=prompt, shared=common, out=out, drafts=drafts, chance=chance
        ),
    )


def c_prefix(scale: Scale) -> Iterator[Variant]:
    """C: 64 prompts, half of each the same; also with nothing shared, and with it known before."""
    yield _prefix("C", "off", scale, caching=False)
    yield _prefix("C", "on", scale, caching=True)
    yield _prefix("C", "on, no hits", scale, caching=True, shared=0)
    yield _prefix("C", "on, warm", scale, caching=True, warm=True)


def d_turns(scale: Scale) -> Iterator[Variant]:
    """D: 16 conversations, all of whose turns begin together."""
    count, turns, more, out = 16, scale.count(6, 2), scale.length(1024), 64
    out = max(8, round(out * min(1.0, 4 * scale.prompt)))
    session = turns * (more + out) + 8
    need = Need(seats=16, session=session, tokens=count * session, checkpoints=CHECKPOINTS)
    for name, caching in (("off", False), ("on", True)):
        yield Variant(
            workload="D",
            name=name,
            need=need,
            settings=settings(need, caching=caching),
            traffic=lambda draw: Conversations(draw, count, turns, more, out),
            asked=dict(conversations=count, turns=turns, more=more, out=out),
        )


def e_long(scale: Scale) -> Iterator[Variant]:
    """E: one long prompt; the forward that saves its end, against a forward more."""
    prompts = (
        (32320, 32770) if scale.prompt == 1.0 else tuple(scale.length(32320) + i for i in (0, 450))
    )
    session = max(prompts) + 32
    need = Need(seats=2, session=session, tokens=2 * session, checkpoints=32)
    for prompt in prompts:
        for budget in (4096, 16384):
            step = max(64, scale.length(budget))
            for mode in ("off", "split", "interior"):
                yield Variant(
                    workload="E",
                    name=f"{prompt}, budget {step}, {mode}",
                    need=need,
                    settings=settings(
                        need,
                        caching=mode != "off",
                        checkpoint_mode=mode,
                        max_prefill_tokens=step,
                        prefill_save_alignment=512 if scale.prompt == 1.0 else 64,
                        checkpoint_interval=0,
                        decode_checkpoint_interval=0,
                    ),
                    traffic=lambda draw, prompt=prompt: at_once(draw, 1, prompt, 2),
                    asked=dict(prompt=prompt, budget=step, mode=mode),
                )


def f_drafts(scale: Scale) -> Iterator[Variant]:
    """F: B, and C with caching, with drafts that are accepted as often as said."""
    for drafts in (0, 1, 3, 5):
        for chance in (1.0, 0.8, 0.5, 0.0) if drafts else (None,):
            note = f"{drafts} drafts" + (f", {chance:g}" if drafts else "")
            yield _batch("F", scale, drafts, chance, f"B, {note}")
            if chance in (None, CHANCE):
                yield _prefix(
                    "F", f"C on, {note}", scale, caching=True, drafts=drafts, chance=chance
                )


def g_burst(scale: Scale) -> Iterator[Variant]:
    """G: 256 prompts at once, half of each the same; then 16 samples of one prompt."""
    count, prompt, out = scale.count(256, 8), scale.length(2048), scale.count(64, 8)
    session = prompt + out + 8
    need = Need(seats=256, session=2 * session, tokens=count * session, checkpoints=CHECKPOINTS)
    for name, caching in (("off", False), ("on", True)):
        yield Variant(
            workload="G",
            name=f"burst, {name}",
            need=need,
            settings=settings(need, caching=caching),
            traffic=lambda draw: at_once(draw, count, prompt, out, shared=prompt // 2),
            asked=dict(requests=count, prompt=prompt, shared=prompt // 2, out=out),
        )
    for samples in (1, 16):
        yield Variant(
            workload="G",
            name=f"n = {samples}",
            need=need,
            settings=settings(need, caching=True),
            traffic=lambda draw, n=samples: Given([Ask(draw.tokens(2 * prompt), out, n=n)]),
            asked=dict(requests=1, n=samples, prompt=2 * prompt, out=out),
        )


def i_matrix(scale: Scale) -> Iterator[Variant]:
    """I: long in or long out, with 5 drafts in a batch of 64 or none in one of 256.

    Three of four prompts share their first half, the fourth nothing. Caching on and off are asked
    the same.
    """
    for shape, prompt, out in (("long in", 16384, 2048), ("long out", 2048, 16384)):
        long, answer = scale.length(prompt), scale.count(out, 8)
        for seats, drafts in ((64, 5), (256, 0)):
            session = long + answer + drafts + 8
            need = Need(
                seats=seats,
                session=session,
                tokens=seats * session,
                checkpoints=CHECKPOINTS,
                drafts=drafts,
            )
            for name, caching in (("off", False), ("on", True)):
                yield Variant(
                    workload="I",
                    name=f"{shape}, batch {seats}, {drafts} drafts, {name}",
                    need=need,
                    settings=settings(need, caching=caching),
                    traffic=lambda draw, n=seats, i=long, o=answer: some_cold(
                        draw, n, i, o, shared=i // 2
                    ),
                    chance=CHANCE if drafts else None,
                    asked=dict(
                        requests=seats,
                        prompt=long,
                        shared=long // 2,
                        out=answer,
                        drafts=drafts,
                        chance=CHANCE if drafts else None,
                    ),
                )


WORKLOADS: dict[str, Callable[[Scale], Iterator[Variant]]] = {
    "A": a_stream,
    "B": b_batch,
    "C": c_prefix,
    "D": d_turns,
    "E": e_long,
    "F": f_drafts,
    "G": g_burst,
    "I": i_matrix,
}


def groups(variants: list[Variant]) -> list[tuple[Need, list[Variant]]]:
    """Variants that can share a tower, with what all of them need, in their order.

    Those with other drafts cannot, nor do long sequences join short ones: a seat's table is as long
    as its longest sequence may be.
    """
    found: dict[tuple[int, bool, bool], tuple[Need, list[Variant]]] = {}
    for one in variants:
        key = (one.need.drafts, one.chance is not None, one.need.session > 16384)
        need, others = found.get(key, (one.need, []))
        found[key] = (need.with_(one.need), [*others, one])
    return list(found.values())
