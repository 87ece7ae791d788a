"""The training script at toy size: losses fall, masks hold, an interrupted run goes on."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from millpond.tasks import make
from training import train
from training.batch import NEAR, Batch
from training.data import Packer, pack
from training.family import FAMILIES, GLM, Family

both = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """The command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["train", "--smoke", *words])
    train.main()


@both
def test_a_smoke_run_resumes_and_exports(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ("--family", family.name)
    run(monkeypatch, *name, "--steps", "2", "--out", str(tmp_path / "a"))
    assert json.loads((tmp_path / "a/state.json").read_text())["step"] == 2
    again = ("--steps", "3", "--out", str(tmp_path / "b"), "--resume", str(tmp_path / "a"))
    run(monkeypatch, *name, *again, "--export", str(tmp_path / "bundle"))
    assert json.loads((tmp_path / "b/state.json").read_text())["step"] == 3
    assert (tmp_path / "bundle/model.safetensors").exists()
    assert "seed 1" in (tmp_path / "b/log.txt").read_text()


def short_batch(seed: int = 0, family: Family = GLM) -> Batch:
    """1,024 tokens of the training mixture."""
    packed = Packer(family.encoder(), seed, "short", 1024)()
    return Batch.from_arrays(packed.row, packed.arrays, "cpu")


@both
def test_the_loss_of_one_batch_falls_in_every_phase(family: Family) -> None:
    torch.manual_seed(0)
    model = family.model(family.toy)
    batch, plan = short_batch(family=family), train.Plan()
    opt = train.optimizer(model, 2e-2, "cpu")
    seen: list[float] = []
    for step in range(14):
        total, parts = train.losses(model, batch, plan, progress=step / 14, depth=2)
        opt.zero_grad()
        total.backward()
        opt.step()
        seen.append(float(parts["ahead1"]))
    assert seen[-1] < 0.7 * seen[0]


def test_the_indexer_learns_only_from_its_own_loss() -> None:
    model, batch = GLM.model(GLM.toy), short_batch()
    for progress, moved in ((0.0, False), (1.0, True)):
        model.zero_grad()
        total, _ = train.losses(model, batch, train.Plan(), progress, depth=1)
        total.backward()
        grads = [p.grad for n, p in model.named_parameters() if ".indexer." in n]
        assert any(g is not None and bool(g.abs().sum() > 0) for g in grads) is moved


def test_the_index_loss_reaches_no_other_weight() -> None:
    model, batch = GLM.model(GLM.toy), short_batch()
    queries = torch.arange(64)
    model(batch, queries=queries).index_loss.backward()
    touched = {
        n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0
    }
    assert touched
    assert all(".indexer." in n for n in touched)


def test_ledger_queries_see_only_the_last_tokens() -> None:
    batch = short_batch()
    mask, near = batch.mask(), batch.near.view(-1, batch.row)
    seen = mask.sum(-1)
    assert near.any()
    assert (seen[near] <= NEAR).all()
    assert (seen[~near] > NEAR).any()


def test_documents_start_on_pools_and_cover_the_batch() -> None:
    batch = short_batch(5)
    starts = batch.starts.unique()
    assert (starts % 4 == 0).all()
    assert starts[0] == 0
    assert starts[-1] == len(batch.ids)
    assert (batch.pos[starts[:-1].long()] == 0).all()


@both
def test_a_wrong_thought_is_not_learned_and_the_answer_that_follows_it_is(family: Family) -> None:
    encoder = family.encoder()
    sample = encoder(make("misled", 5, split="train"))
    row = -(-len(sample.ids) // 4) * 4
    packed = pack([sample], row, 4 * row, random.Random(0), encoder.pad)  # so that all are targets
    weights = dict(zip(packed.arrays["target"], packed.arrays["weight"], strict=True))
    first, stop = sample.given
    thought = encoder.tokenizer.decode(sample.ids[first:stop], skip_special_tokens=False)
    said = encoder.tokenizer.decode(sample.ids[sample.learn], skip_special_tokens=False)
    assert thought.strip().endswith("</think>")
    assert thought.strip()[0].isdigit()
    assert said.strip()[0] == thought.strip()[0]
    assert not sample.learn[:stop].any()
    assert not any(weights.get(at, 0.0) for at in range(first, stop))
    assert all(weights[at] > 0.1 for at in np.flatnonzero(sample.learn))


def test_a_focus_adds_dialogues_of_one_task() -> None:
    shares = []
    for focus in (None, ("misled", 0.5)):
        samples = Packer(GLM.encoder(), 3, "short", 16384, focus)().samples
        shares.append(sum(s.task == "misled" for s in samples) / len(samples))
    assert shares[0] < 0.1
    assert 0.3 < shares[1] < 0.7
