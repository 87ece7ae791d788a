"""Long mixed traffic with aborts, in every mode: no NaN in a saved state, no leak, exact lengths.

python -m bench.engine.soak [--model q4 g8] [--requests 2000] [--drafts 0 3] [--limit 300]
    [--longest TOKENS] [--out out/soak.jsonl]

Modes are drafts or none, times caching off, checkpoints inside a forward (interior) and in
forwards cut for them (split); each gets an equal share of the requests, and of the time that those
before it left. Freed slots and pages are filled with NaN, so that what was never written shows.
Every checkpoint is read when it is published, and again at the end. Every mode is on the disk when
it ends; started again with the same file, only what is missing is asked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.engine.models import CONFIGS
from bench.engine.tower import Need, Tower, build, give_back
from bench.engine.traffic import Draw, Tokens
from bench.engine.trials import Lines
from bench.header import header
from millpond.engine.loop import Engine
from millpond.engine.types import Delta, EngineRequest
from millpond.memory.arena import Arena
from millpond.plan.sampling import SamplingParams
from millpond.state.checkpoint import Checkpoint

SEATS = 48
CHECKPOINTS = 32
"""Few enough that they are evicted all the time."""

ABORTED, IN_A_STEP = 0.1, 0.02
"""With every request, and in every step, the chance that one of the live ones is broken off."""

MODES = ("off", "interior", "split")


@dataclass(slots=True)
class Mixed:
    """Requests of mixed lengths and manners, half of which begin like others."""

    draw: Draw
    chance: random.Random
    longest: int
    known: list[Tokens] = field(default_factory=list)

    def tokens(self) -> Tokens:
        """A prompt: lengths are spread over all magnitudes up to `longest`."""
        length = max(1, int(self.longest ** self.chance.random()))
        if self.known and self.chance.random() < 0.5:
            other = self.chance.choice(self.known)
            shared = other[: self.chance.randint(1, len(other))]
            return (shared + self.draw.tokens(length))[: self.longest]
        prompt = self.draw.tokens(length)
        if len(self.known) < 12:
            self.known.append(prompt)
        return prompt

    def params(self, most: int) -> SamplingParams:
        """Mostly greedy; also noise, filters, penalties, log probabilities and several samples."""
        chance = self.chance
        kind = chance.random()
        more: dict[str, Any] = {"temperature": 0.0}
        if kind > 0.6:
            more = {"temperature": 0.8, "seed": chance.randrange(1 << 30)}
        if kind > 0.85:
            more |= {"top_p": 0.9, "top_k": 40}
        if kind > 0.9:
            more |= {"repetition_penalty": 1.1, "presence_penalty": 0.5}
        if kind > 0.95:
            more |= {"logprobs": 2}
        samples = 3 if chance.random() < 0.05 else 1
        out = max(1, int(most ** chance.random()))
        return SamplingParams(max_tokens=out, ignore_eos=True, n=samples, **more)


class Watch:
    """The sink of an engine, and the reader of what it publishes."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.asked: dict[str, SamplingParams] = {}
        self.lengths: Counter[tuple[str, int]] = Counter()
        self.live: list[str] = []
        self.aborted: set[str] = set()
        self.finished: Counter[str] = Counter()
        self.published = 0
        self.wrong: Counter[str] = Counter()

    def __call__(self, deltas: list[Delta]) -> None:
        """Count what came, and compare lengths where a sample ends."""
        for delta in deltas:
            name = delta.request_id
            key = (name, delta.sample_index)
            self.lengths[key] += len(delta.tokens)
            if delta.finish_reason is None:
                continue
            self.finished[delta.finish_reason] += 1
            wanted = self.asked[name].max_tokens
            if delta.finish_reason == "length" and self.lengths[key] != wanted:
                self.wrong["an answer of another length"] += 1
            if delta.finish_reason == "error":
                self.wrong[f"error: {delta.error}"] += 1
            if delta.finish_reason == "abort" and name not in self.aborted:
                self.wrong["an abort that nobody asked for"] += 1
            if name in self.live:
                self.live.remove(name)

    def saved(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was published: nobody writes it any more."""
        self.published += 1
        self.read(checkpoint.lease.slot, "when published")

    def read(self, slot: int, when: str) -> None:
        """Count a slot in which a tensor of some layer is not finite."""
        tensors = [self.arena.view(t.layer, t.name)[slot] for t in self.arena.spec.tensors]
        finite = torch.stack([torch.isfinite(tensor).all() for tensor in tensors])
        if not bool(finite.all()):
            self.wrong[f"a state that is not finite {when}"] += 1


def soak(
    tower: Tower, mode: str, requests: int, *, longest: int, limit: float, seed: int = 0
) -> dict[str, Any]:
    """One mode. `wrong` in what it returns is empty when all is well."""
    caching = mode != "off"
    watch = Watch(tower.worker.runner.arenas.slots)
    engine = tower.engine(
        watch,
        max_batch_size=SEATS,
        max_prefill_tokens=max(256, longest // 2),
        session_len=tower.worker.capabilities.max_position,
        prefix_caching=caching,
        checkpoint_mode=mode,
        checkpoint_budget=CHECKPOINTS if caching else 0,
        checkpoint_interval=max(64, longest // 8 // 64 * 64),
        decode_checkpoint_interval=64 if caching else 0,
        debug_poison=True,
    ).engine
    engine._ledger.on_publish = watch.saved
    chance = random.Random(seed)
    mixed = Mixed(Draw(seed, tower.worker.capabilities.vocab_size), chance, longest)
    answers = max(8, longest // 8)
    began, sent = time.perf_counter(), 0

    def abort() -> None:
        gone = chance.choice(watch.live)
        watch.aborted.add(gone)
        engine.abort(gone)

    while True:
        late = time.perf_counter() - began > limit
        while sent < requests and len(watch.live) < 2 * SEATS and not late:
            name, params = f"r{sent}", mixed.params(answers)
            watch.asked[name] = params
            watch.live.append(name)
            engine.submit(EngineRequest(request_id=name, tokens=mixed.tokens(), params=params))
            sent += 1
            if chance.random() < ABORTED:
                abort()
        if watch.live and chance.random() < IN_A_STEP:
            abort()
        if not engine.step() and (sent == requests or late):
            break
    seconds = time.perf_counter() - began
    watch.wrong += balance(engine, watch)
    stats = engine.stats()
    engine.close()
    return {
        "model": tower.facts["model"],
        "drafts": tower.facts["drafts"],
        "mode": mode,
        "requests": sent,
        "of": requests,
        "seconds": seconds,
        "finished": dict(watch.finished),
        "published": watch.published,
        "evicted": stats.checkpoints_evicted,
        "preemptions": stats.preemptions,
        "steps": stats.steps,
        "generated_tokens": stats.generated_tokens,
        "cached_tokens": stats.prefix_tokens.get("hit", 0),
        "accepted_tokens": stats.accepted_tokens,
        "wrong": dict(watch.wrong),
    }


def balance(engine: Engine, watch: Watch) -> Counter[str]:
    """What is missing once nobody runs: slots and pages are free or in the index, seats free."""
    wrong: Counter[str] = Counter()
    stats, ledger = engine.stats(), engine._ledger
    if watch.live or stats.requests_running or stats.requests_waiting:
        wrong["requests that did not end"] += max(1, len(watch.live))
    wrong["slots lost"] = stats.slots_total - stats.slots_free - stats.slots_checkpoint
    wrong["pages lost"] = stats.pages_used - stats.pages_indexed
    wrong["seats lost"] = engine.settings.max_batch_size - len(ledger.seats)
    wrong["steps failed"] = stats.steps_failed
    wrong["tokens from logits that are not finite"] = stats.nonfinite
    for checkpoint in ledger.index.checkpoints():
        watch.read(checkpoint.lease.slot, "at the end")
    engine.flush_cache()
    after = engine.stats()
    wrong["slots lost with the cache"] = after.slots_total - after.slots_free - wrong["slots lost"]
    wrong["pages lost with the cache"] = after.pages_used - wrong["pages lost"]
    return Counter({what: count for what, count in wrong.items() if count})


def to_ask(
    file: Path, model: str, kinds: tuple[tuple[int, str], ...], requests: int
) -> dict[tuple[int, str], tuple[int, int]]:
    """How many requests are left and how many runs `file` has, by number of drafts and mode."""
    told = (
        [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    )
    found = {}
    for kind in kinds:
        before = [
            record["requests"]
            for record in told
            if record["kind"] == "soak"
            and (record["model"], record["drafts"], record["mode"]) == (model, *kind)
        ]
        count = -(-requests // len(kinds)) - sum(before)
        if count > 0:
            found[kind] = (count, len(before))
    return found


def main(arguments: list[str]) -> int:
    """Exit 1 when something was wrong in any mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    large = torch.cuda.is_available()
    parser.add_argument(
        "--model", nargs="+", default=["q4", "g8"] if large else ["tiny-q4", "tiny-g8"],
        help=f"of {', '.join(CONFIGS)}; the tiny ones where there is no GPU",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, default=2000, help="of a model")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a model")
    parser.add_argument("--longest", type=int, default=2048 if large else 512, help="prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/soak.jsonl"))
    given = parser.parse_args(arguments)
    lines, bad = Lines(given.out), 0
    kinds = tuple(itertools.product(given.drafts, MODES))
    for model in given.model:
        until = time.perf_counter() + given.limit
        missing = to_ask(given.out, model, kinds, given.requests)
        for drafts in dict.fromkeys(drafts for drafts, _ in missing):
            session = given.longest + given.longest // 8 + 64
            need = Need(
                seats=SEATS,
                session=session,
                tokens=SEATS * session // 16,  # pages are short at times
                checkpoints=CHECKPOINTS,
                drafts=drafts,
            )
            tower = build(model, need, device=given.device, debug_poison=True)
            lines.add("tower", **header(), **tower.facts)
            for mode in MODES:
                count, again = missing.pop((drafts, mode), (0, 0))
                if not count:
                    continue
                found = soak(
                    tower,
                    mode,
                    count,
                    longest=given.longest,
                    limit=(until - time.perf_counter()) / (1 + len(missing)),
                    seed=given.seed + again,
                )
                lines.add("soak", **found)
                bad += bool(found["wrong"])
                print(", ".join(f"{k} {v}" for k, v in found.items()), flush=True)
            del tower
            give_back()
    print("soak: " + (f"{bad} modes with something wrong" if bad else "nothing wrong"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
