"""One state machine over the whole host tower, on the symbolic executor.

Requests come, run, are cancelled, fail and repeat in any order, on pools of any size. The executor
asserts that whatever is read at position p is the reader's own first p tokens; the machine asserts
that texts equal a plain loop's, that what can be found is what it is filed under, that numbers add
up, and that in the end nothing is held.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millpond.engine.loop import RequestStream
from millpond.engine.types import Delta, EngineRequest, PrefixOutcome
from millpond.errors import Rejected
from millpond.plan.checkpoints import anchor_step
from millpond.plan.step import PAGE_SIZE, Row, StepPlan
from millpond.state.checkpoint import AnchorKind, prefix_salt
from tests.support.symbolic import VOCAB, as_state, as_tokens, logprob, step_failure
from tests.support.towers import Answer, Tower, take

BASES = [[random.Random(seed).randrange(VOCAB) for _ in range(800)] for seed in (1, 2)]
EOS = 7

lengths = st.one_of(
    st.sampled_from([63, 64, 65, 127, 128, 129, 130, 192, 193, 256, 257, 320, 512, 513, 576, 577]),
    st.integers(1, 600),
)


@dataclass(frozen=True)
class Prompt:
    """A beginning shared with others, and an end of its own, around the edges of pages."""

    shared: int
    own: int = 0
    variant: int = 0
    base: int = 0

    @property
    def tokens(self) -> list[int]:
        tail = [(self.variant * 7 + i * (self.variant + 1)) % VOCAB for i in range(self.own)]
        return BASES[self.base][: self.shared] + tail


prompts = st.builds(
    Prompt,
    shared=lengths,
    own=st.sampled_from([0, 0, 1, 3, 64, 70]),
    variant=st.integers(0, 2),
    base=st.sampled_from([0, 0, 0, 1]),
)
wishes = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 1, 1, 1, 2, 3]),
        "max_tokens": st.one_of(st.integers(1, 6), st.sampled_from([20, 66, 140])),
        "seed": st.integers(0, 3),
        "priority": st.sampled_from([0, 0, 0, 1]),
        "cache_salt": st.sampled_from(["", "", "", "", "other"]),
        "ignore_eos": st.booleans(),
        "min_tokens": st.sampled_from([0, 0, 5]),
        "prompt_logprobs": st.sampled_from([None] * 9 + [0]),
    }
)


@dataclass
class Asked:
    """A request under way, and what has been heard of it."""

    request: EngineRequest
    stream: RequestStream
    answer: Answer = field(default_factory=dict)
    outcome: PrefixOutcome | None = None
    aborted: bool = False
    may_fail: bool = False
    drafted: int = 0
    accepted: int = 0
    _texts: list[list[int]] = field(default_factory=list)

    def texts(self, tower: Tower) -> list[list[int]]:
        """The prompt with each of the answers it must get."""
        if not self._texts:
            prompt = list(self.request.tokens)
            self._texts = [prompt + tokens for tokens, _ in tower.naive(self.request).values()]
        return self._texts

    @property
    def over(self) -> bool:
        reasons = [reason for _, reason in self.answer.values()]
        return len(reasons) == self.request.params.n and None not in reasons


class HostTower(RuleBasedStateMachine):
    """See the module."""

    numbers: Mapping[str, Any] = MappingProxyType({})  # more of them, for the tower

    @initialize(
        num_slots=st.sampled_from([10, 6, 4, 3, 2, 1]),
        num_pages=st.sampled_from([40, 30, 20, 13, 9, 5]),
        batch=st.sampled_from([4, 3, 2, 1]),
        budget=st.sampled_from([300, 1000, 300, 1000, 192, 100, 64, 1]),
        mode=st.sampled_from(["interior", "interior", "interior", "interior", "split", "off"]),
        alignment=st.sampled_from([64, 64, 64, 64, 64, 128, 128, 512]),
        granularity=st.sampled_from([64, 64, 64, 128]),
        interval=st.sampled_from([64, 128, 64, 256, 0]),
        checkpoints=st.sampled_from([10, 4, 10, 4, 2, 1, 0]),
        caching=st.sampled_from([True] * 11 + [False]),
        num_drafts=st.sampled_from([3, 0, 1, 0, 5, 7]),
        along=st.sampled_from([64, 0, 64, 128, 0]),
        ahead=st.booleans(),
        luck=st.integers(0, 1 << 16),
        first=st.lists(prompts, min_size=1, max_size=3),
        wish=wishes,
    )
    def build(
        self,
        num_slots,
        num_pages,
        batch,
        budget,
        mode,
        alignment,
        granularity,
        interval,
        checkpoints,
        caching,
        num_drafts,
        along,
        ahead,
        luck,
        first,
        wish,
    ):
        self.tower = self.new_tower(
            num_slots=num_slots,
            num_pages=num_pages,
            num_seats=batch,
            export_granularity=granularity,
            max_batch_size=batch,
            max_prefill_tokens=budget,
            prefix_caching=caching,
            checkpoint_mode=mode,
            prefill_save_alignment=alignment,
            checkpoint_interval=interval,
            checkpoint_budget=checkpoints,
            num_draft_tokens=num_drafts,
            decode_checkpoint_interval=along,
            runs_ahead=ahead,
            eos_token_ids=(EOS,),
            **self.numbers,
        )
        self.engine, self.executor = self.tower.engine, self.tower.executor
        self.anchor_step = anchor_step(alignment, granularity)
        self.dice = random.Random(luck)
        self.accept = None
        self.late = 0.5
        self.executor.right = self._right
        self.executor.is_late = lambda plan: self.dice.random() < self.late
        self.asked: dict[str, Asked] = {}
        self.during: list = []  # to happen while the next forward runs
        self.executor.during = self._interfere
        self.executor.fail = self._fail
        self.executor.writes = lambda slot, end: (slot, end) not in self.unwritten
        self.executor.finite = self._finite
        self.fails = self.nonfinite_row = None
        self.unwritten: set[tuple[int, int]] = set()
        self.withhold: str | None = None
        self.flushes = 0
        self.submit(first, wish)

    def new_tower(self, **numbers: Any) -> Tower:
        """The tower under test."""
        return Tower(**numbers)

    # What a client does.

    @rule(
        prompts=st.lists(prompts, min_size=1, max_size=3),
        wish=wishes,
        in_flight=st.sampled_from([False, False, True]),
    )
    def submit(self, prompts, wish, in_flight=False):
        def do():
            for prompt in prompts:
                self._submit(self.tower.request(prompt.tokens, **self._fitting(wish)))

        if in_flight:
            self.during.append(do)
        else:
            do()

    @rule(prompt=prompts, first=wishes, second=wishes)
    def submit_the_same_prompt_twice(self, prompt, first, second):
        for wish in (first, second):
            self._submit(self.tower.request(prompt.tokens, **self._fitting(wish)))

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 50), wish=wishes, count=st.integers(1, 2))
    def submit_again(self, which, wish, count):
        old = self._pick(which).request
        for _ in range(count):
            self._submit(self.tower.request(old.tokens, **self._fitting(wish)))

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 50), wish=wishes, more=st.sampled_from([1, 5, 64, 100]))
    def submit_the_next_turn(self, which, wish, more):
        old = self._pick(which)
        said = [token for tokens, _ in old.answer.values() for token in tokens][:40]
        tokens = [*old.request.tokens, *said, *range(more)]
        self._submit(self.tower.request(tokens, **self._fitting(wish)))

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 50), in_flight=st.booleans(), again=st.booleans())
    def abort(self, which, in_flight, again):
        asked = self._pick(which)

        def do():
            asked.aborted = True
            asked.stream.abort()
            if again and not in_flight:
                asked.stream.abort()

        if in_flight:
            self.during.append(do)
        else:
            do()

    @rule(in_flight=st.sampled_from([True, True, False]))
    def flush(self, in_flight):
        def do():
            self.flushes += 1
            self.engine.flush_cache()

        if in_flight:
            self.during.append(do)
        else:
            do()

    # What a device does.

    @rule(accept=st.sampled_from([None, None, 0, 1, 7]))
    def draft_well_or_badly(self, accept):
        self.accept = accept

    @rule(late=st.sampled_from([0.0, 0.5, 1.0]))
    def run_plans_at_once_or_when_asked(self, late):
        self.late = late

    @rule(count=st.integers(1, 4))
    def steps(self, count):
        for _ in range(count):
            self._step()

    @rule(count=st.integers(10, 70))
    def many_steps(self, count):
        for _ in range(count):
            if not self._step():
                break

    @rule()
    def run_dry(self):
        # Even one after the other, with every answer recomputed now and then.
        limit = 500 + 200 * sum(asked.request.params.n for asked in self.asked.values())
        while self._step():
            limit -= 1
            assert limit, "no end in sight"

    @rule()
    def fail_the_next_step(self):
        self.fails = step_failure

    @rule(row=st.integers(0, 3))
    def give_nonfinite_logits_in_the_next_step(self, row):
        self.nonfinite_row = row

    @rule(what=st.sampled_from(["exports", "states", "anchors"]))
    def leave_something_unwritten_soon(self, what):
        self.withhold = what

    # What memory pressure does.

    @rule(pages=st.integers(0, 6))
    def evict(self, pages):
        if pages:
            self.engine._ledger.index.evict_pages(pages)
        else:
            self.engine._ledger.index.evict_slot()

    # What must always hold.

    @invariant()
    def what_can_be_found_is_what_it_is_filed_under(self):
        if not hasattr(self, "tower"):
            return
        for checkpoint in self.engine._ledger.index.checkpoints():
            node = self.engine._ledger.index.node_of(checkpoint)
            settings = self.tower.settings
            decoded = checkpoint.kind is AnchorKind.DECODE
            step = settings.decode_checkpoint_interval if decoded else self.anchor_step
            assert step > 0
            assert checkpoint.end % step == 0, "a save off the alignment"
            assert checkpoint.end == node.depth * PAGE_SIZE
            path = []
            while node.parent is not None:
                path.append(node)
                node = node.parent
            tokens = [
                int.from_bytes(part.tokens[i : i + 4], "little", signed=True)
                for part in reversed(path)
                for i in range(0, len(part.tokens), 4)
            ]
            asked = self._somebody_asked(tokens, path[-1].salt, with_answers=decoded)
            assert asked, "found under another's key"
            state = self.executor.slots[checkpoint.lease.slot]
            if settings.decode_anchor_step:  # a prompt may go on from an answer
                state = as_tokens(state or ())
            assert state == as_state(tokens, len(tokens)), "a checkpoint of other tokens"
            for depth, part in enumerate(reversed(path)):
                page = self.executor.pages[part.page.id]
                assert page == self.executor.page_content(tokens, depth), "another's page"

    @invariant()
    def numbers_add_up(self):
        if not hasattr(self, "tower"):
            return
        stats = self.engine.stats()
        assert stats.slots_free + stats.slots_running + stats.slots_checkpoint == stats.slots_total
        assert stats.slots_running >= 0
        assert stats.slots_checkpoint <= self.tower.settings.checkpoint_budget
        assert stats.accepted_tokens == sum(stats.accepted_per_position) <= stats.draft_tokens
        assert stats.drafts <= stats.draft_tokens <= stats.drafts * self.num_drafts
        heard = list(self.asked.values())
        assert stats.draft_tokens >= sum(asked.drafted for asked in heard)
        assert stats.accepted_tokens >= sum(asked.accepted for asked in heard)
        assert stats.generated_tokens == sum(
            len(tokens) for asked in heard for tokens, _ in asked.answer.values()
        )
        over = [asked for asked in heard if asked.over]
        assert sum(stats.finished.values()) == len(over)

    def teardown(self):
        if not hasattr(self, "tower") or not self.engine.healthy:
            return
        self.run_dry()
        for asked in self.asked.values():
            self._check_answer(asked)
        stats = self.engine.stats()
        outcomes = [asked.outcome for asked in self.asked.values() if asked.outcome is not None]
        cached = sum(outcome.cached_tokens for outcome in outcomes)
        assert stats.prefix_tokens.get("hit", 0) == cached
        assert stats.prompt_tokens == sum(outcome.prompt_tokens for outcome in outcomes)
        self.tower.assert_nothing_is_held()
        self.engine.close(drain=False)

    # Details.

    def _submit(self, request: EngineRequest) -> None:
        caps, settings = self.executor.capabilities, self.tower.settings
        copies = (request.params.n - 1) * bool(len(request.tokens) % PAGE_SIZE)
        fits = (
            len(request.tokens) + 1 <= self.tower.token_limit
            and request.params.n <= settings.max_batch_size
            and -(-len(request.tokens) // PAGE_SIZE) + copies <= caps.num_pages
        )
        if not fits:
            with pytest.raises(Rejected):
                self.engine.submit(request)
            return
        self.asked[request.request_id] = Asked(request, self.engine.submit(request))

    def _somebody_asked(self, tokens: list[int], salt: bytes, *, with_answers: bool) -> bool:
        """Whether a prompt, or it and its answer, begins so, asked with what `salt` names."""

        def begins(asked: Asked) -> bool:
            given = [list(asked.request.tokens)]
            texts = asked.texts(self.tower) if with_answers else given
            return any(text[: len(tokens)] == tokens for text in texts)

        return any(
            begins(asked)
            and salt
            == prefix_salt(
                epoch=self.flushes,
                model_identity=b"",
                adapter="",
                cache_salt=asked.request.cache_salt,
            )
            for asked in self.asked.values()
        )

    def _fitting(self, wish: dict) -> dict:
        return {**wish, "min_tokens": min(wish["min_tokens"], wish["max_tokens"])}

    def _pick(self, which: int) -> Asked:
        return list(self.asked.values())[which % len(self.asked)]

    def _step(self) -> bool:
        busy = self.tower.step()
        assert self.engine.healthy, self.engine.failure
        for asked in self.asked.values():
            while not asked.over:
                try:
                    delta = asked.stream.get(timeout=0)
                except TimeoutError:
                    break
                assert delta is not None
                self._hear(asked, delta)
        self.unwritten.clear()
        return busy

    def _hear(self, asked: Asked, delta: Delta) -> None:
        first = not asked.answer
        take(asked.answer, delta)
        assert delta.accepted <= min(delta.drafted, len(delta.tokens))
        asked.drafted += delta.drafted
        asked.accepted += delta.accepted
        assert (delta.outcome is None) or first, "the outcome comes first"
        if delta.outcome is not None:
            asked.outcome = delta.outcome
            assert delta.outcome.cached_tokens < len(asked.request.tokens)
        elif first:
            assert delta.finish_reason == "abort", "no outcome, though it ran"
        if delta.prompt_logprobs is not None and delta.tokens:
            prompt = asked.request.tokens
            assert [(e.position, e.token, e.logprob) for e in delta.prompt_logprobs] == [
                (at, prompt[at], logprob(prompt[:at], prompt[at])) for at in range(1, len(prompt))
            ]

    def _check_answer(self, asked: Asked) -> None:
        assert asked.over, f"{asked.request.request_id} never ended"
        for index, (tokens, reason) in self.tower.naive(asked.request).items():
            got, why = asked.answer[index]
            if why == "abort":
                assert asked.aborted
                assert got == tokens[: len(got)]
            elif why == "error":
                assert asked.may_fail, f"{asked.request.request_id} failed by itself"
                assert got == tokens[: len(got)]
            else:
                assert (got, why) == (tokens, reason)

    @property
    def num_drafts(self) -> int:
        return self.executor.capabilities.num_draft_tokens

    def _right(self) -> int:
        return self.dice.randint(0, self.num_drafts) if self.accept is None else self.accept

    def _interfere(self, plan: StepPlan) -> None:
        todo, self.during = self.during, []
        for do in todo:
            do()

    def _fail(self, plan: StepPlan):
        fails, self.fails = self.fails, None
        if fails is not None:
            for row in plan.prefill + plan.decode + plan.verify:
                self.asked[row.request].may_fail = True
            return fails(plan)
        exports = {
            "exports": [e for row in plan.prefill for e in row.exports],
            "anchors": [row.export for row in plan.verify if row.export is not None],
        }
        if self.withhold in exports:
            self.unwritten = {(e.slot, e.end) for e in exports[self.withhold]}
            self.withhold = None if self.unwritten else self.withhold
        elif self.withhold == "states":
            for row in (plan.verify + plan.prefill + plan.decode)[:1]:
                self.unwritten = {(row.state_out, row.end)}
                self.asked[row.request].may_fail = True
            self.withhold = None
        self._plan = plan
        return None

    def _finite(self, row: Row) -> bool:
        if self.nonfinite_row is None:
            return True
        rows = [r for r in self._plan.prefill + self._plan.decode if r.emit_seats]
        rows += self._plan.verify
        chosen = rows[self.nonfinite_row % len(rows)]
        if row is not chosen:
            return True
        self.nonfinite_row = None
        self.asked[row.request].may_fail = True
        return False


class LongAnswers(HostTower):
    """The same, where every answer passes anchors and drafts are accepted more often than not."""

    @initialize(
        num_slots=st.sampled_from([10, 6, 5]),
        num_pages=st.sampled_from([40, 20, 11]),
        batch=st.sampled_from([4, 3]),
        num_drafts=st.sampled_from([5, 3, 0]),
        ahead=st.booleans(),
        luck=st.integers(0, 1 << 16),
        first=st.lists(prompts, min_size=1, max_size=3),
        wish=wishes,
    )
    def build(self, num_slots, num_pages, batch, num_drafts, ahead, luck, first, wish):
        super().build(
            num_slots=num_slots,
            num_pages=num_pages,
            batch=batch,
            budget=1000,
            mode="interior",
            alignment=64,
            granularity=64,
            interval=64,
            checkpoints=10,
            caching=True,
            num_drafts=num_drafts,
            along=64,
            ahead=ahead,
            luck=luck,
            first=first,
            wish=wish,
        )
        self.withhold = "anchors"

    @rule(count=st.integers(10, 60))
    def flush_amid_answers(self, count):
        self.many_steps(count)
        self.flush(in_flight=False)

    def _fitting(self, wish: dict) -> dict:
        return super()._fitting({**wish, "max_tokens": 70 + wish["max_tokens"] // 2})


def explore(machine: type[RuleBasedStateMachine], seeds: Iterable[int]) -> None:
    """Run a machine on unlike histories; raises at the first that fails, unshrunk.

    Nine examples a seed: from the tenth on Hypothesis would try five mutants of each history, which
    find little here and cost most of the time.
    """
    for number in seeds:
        try:
            run_state_machine_as_test(
                seed(number)(lambda: machine()),
                settings=settings(
                    max_examples=9,
                    stateful_step_count=25,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                ),
                _min_steps=12,
            )
        except Exception as error:
            error.add_note(f"to repeat: explore({machine.__name__}, [{number}])")
            raise
