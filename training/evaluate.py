"""Grades a training model on held-out dialogues: accuracy, answer margin, draft agreement.

A greedy reply is right exactly when every one of its tokens is the best one given the right
tokens before it, so one pass over the finished dialogue grades it.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from millpond.tasks import make, task_names
from training.batch import Batch
from training.data import pack
from training.render import Encoder, Sample


@dataclass(frozen=True, slots=True)
class Grade:
    """One task's numbers.

    accuracy: share of replies right in every token; margin: 5th percentile, over the answer
    tokens of right replies, of the best logit minus the second (nats); drafts[j]: share of reply
    tokens whose draft made j + 1 tokens earlier equals the model's own choice.
    """

    task: str
    replies: int
    accuracy: float
    margin: float
    drafts: tuple[float, ...]


def _spans(sample: Sample) -> list[tuple[int, int]]:
    """Half-open token ranges of the replies of a sample."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.learn.astype(int), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


@torch.no_grad()
def grade(
    model: nn.Module, encoder: Encoder, task: str, count: int, *, seed: int = 0, scale: int = 1,
    row: int = 1024, tokens: int = 65536, device: str = "cpu", sparse: bool = True, drafts: int = 3,
) -> Grade:  # fmt: skip
    """Grades `count` held-out dialogues of `task` with the state and attention unmasked."""
    samples = [encoder(make(task, seed + i, scale=scale)) for i in range(count)]
    used = 0
    right: list[bool] = []
    margins: list[np.ndarray] = []
    agreed: list[np.ndarray] = []
    while used < len(samples):
        packed = pack(samples[used:], row, tokens, None, encoder.pad)
        if not packed.samples:
            break
        used += len(packed.samples)
        batch = Batch.from_arrays(row, packed.arrays, device)
        out = model(batch, drafts=drafts, sparse=sparse)
        logits = model.logits(out.hidden)
        best, choice = logits.topk(2, -1)
        gap = (best[:, 0] - best[:, 1]).cpu().numpy()
        choice = choice[:, 0].cpu().numpy()
        guesses = [model.logits(d).argmax(-1).cpu().numpy() for d in out.drafts]
        for sample, offset in zip(packed.samples, packed.offsets, strict=True):
            for a, b in _spans(sample):
                at = np.arange(offset + a, offset + b)
                good = bool((choice[at - 1] == sample.ids[a:b]).all())
                right.append(good)
                if good:
                    margins.append(gap[at - 1])
                deep = at[at - offset >= drafts + 1]
                hits = np.stack(
                    [g[deep - 2 - j] == choice[deep - 1] for j, g in enumerate(guesses)]
                )
                agreed.append(hits)
    hits = np.concatenate(agreed, 1)
    return Grade(
        task,
        len(right),
        float(np.mean(right)),
        float(np.percentile(np.concatenate(margins), 5)) if margins else 0.0,
        tuple(float(x) for x in hits.mean(1)),
    )


def report(grades: list[Grade]) -> str:
    """A table of grades."""
    lines = [f"{'task':14} {'replies':>7} {'right':>6} {'margin':>6}  drafts"]
    for g in grades:
        drafts = " ".join(f"{x:.2f}" for x in g.drafts)
        lines.append(f"{g.task:14} {g.replies:7d} {g.accuracy:6.3f} {g.margin:6.2f}  {drafts}")
    return "\n".join(lines)


LONG = ("ledger", "ledger_turns", "recall", "long_text")
"""Tasks also graded at about 4,000 tokens."""


def grade_all(
    model: nn.Module,
    encoder: Encoder,
    count: int,
    device: str,
    *,
    tokens: int = 65536,
    long: bool = False,
) -> list[Grade]:
    """Every task at ordinary length and, if `long`, some at eight times that."""
    grades = [grade(model, encoder, t, count, tokens=tokens, device=device) for t in task_names()]
    if long:
        for task in LONG:
            made = grade(
                model, encoder, task, count, scale=8, row=4096, tokens=tokens, device=device
            )
            grades.append(dataclasses.replace(made, task=f"{task} x8"))
    return grades
