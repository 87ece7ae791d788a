"""Trains a bundled model: one process, one device, checkpoints every minute, resumable.

python -m training.train --smoke                      a few steps of a toy shape on the CPU
python -m training.train --family qwen --device cuda --minutes 9 --out DIR [--resume DIR]
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from millpond.tasks import VERSION
from training import checkpoint, data, evaluate
from training.batch import Batch
from training.family import FAMILIES, Family
from training.layers import Linear


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens when, as shares of the whole run (by time or by steps, whichever is given)."""

    rate: float = 3e-3
    warmup: int = 150
    decay_from: float = 0.45
    index_from: float = 0.25
    sparse_from: float = 0.55
    draft_weight: tuple[float, ...] = (0.25, 0.12, 0.08, 0.05)
    """Of draft depths 1 to 4; every other step stops at depth 2."""
    index_weight: float = 1.0
    bias_speed: float = 2e-3

    def learning_rate(self, step: int, progress: float) -> float:
        """Warm up, hold, then go down to 2 % along a straight line."""
        fall = 1.0 - max(0.0, progress - self.decay_from) / (1.0 - self.decay_from)
        return self.rate * min(1.0, (step + 1) / self.warmup) * max(0.02, fall)


def head_loss(hidden: Tensor, embedding: Tensor, goal: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean cross-entropy of the rows of `hidden`."""
    logits = F.linear(hidden.to(Linear.dtype), embedding.to(Linear.dtype)).float()
    each = F.cross_entropy(logits, goal, reduction="none")
    return (each * weight).sum() / (weight.sum() + 1e-6)


def losses(
    model: nn.Module, batch: Batch, plan: Plan, progress: float, depth: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The training loss and its parts; also moves the routers' biases toward even load."""
    queries = None
    if progress >= plan.index_from:
        queries = torch.randperm(batch.row, device=batch.ids.device)[: max(16, batch.row // 8)]
    out = model(batch, drafts=depth, sparse=progress >= plan.sparse_from, queries=queries)
    goal = batch.ids[batch.target]
    place = batch.pos[batch.target]
    rows = [out.hidden, *out.drafts]
    parts = {}
    for back, row in enumerate(rows, 1):
        weight = batch.weight * (place >= back)
        source = (batch.target - back).clamp(min=0)
        parts[f"ahead{back}"] = head_loss(
            row.index_select(0, source), model.embed_tokens, goal, weight
        )
    total = parts["ahead1"]
    for back, share in enumerate(plan.draft_weight[:depth], 2):
        total = total + share * parts[f"ahead{back}"]
    parts["index"] = out.index_loss.detach()
    total = total + plan.index_weight * out.index_loss
    for router, load in zip(model.routers(), out.loads, strict=True):
        gap = load.mean() - load
        router.e_score_correction_bias += plan.bias_speed * torch.sign(gap) * (1.0 - progress)
    return total, {k: v.detach() for k, v in parts.items()}


def optimizer(model: nn.Module, rate: float, device: str) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), eps=1e-9, fused=device == "cuda")


def save(out: Path, model: nn.Module, opt: torch.optim.AdamW, state: dict[str, object]) -> None:
    """Writes weights and both moments, each a file, then the numbers that resume them."""
    names = {p: n for n, p in model.named_parameters()}
    files = {"weights": {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}}
    for moment in ("exp_avg", "exp_avg_sq"):
        files[moment] = {names[p]: s[moment].cpu().contiguous() for p, s in opt.state.items()}
    for name, tensors in files.items():
        save_file(tensors, str(out / f"{name}.tmp"))
        os.replace(out / f"{name}.tmp", out / f"{name}.safetensors")
    (out / "state.json").write_text(json.dumps(state), encoding="utf-8")


def resume(source: Path, model: nn.Module, opt: torch.optim.AdamW) -> dict[str, float]:
    """Restores what `save` wrote; a folder with weights alone starts the moments afresh."""
    model.load_state_dict(load_file(str(source / "weights.safetensors")))
    state = json.loads((source / "state.json").read_text(encoding="utf-8"))
    if (source / "exp_avg.safetensors").exists():
        moments = {
            m: load_file(str(source / f"{m}.safetensors")) for m in ("exp_avg", "exp_avg_sq")
        }
        for name, p in model.named_parameters():
            if name in moments["exp_avg"]:
                opt.state[p] = {m: t[name].to(p.device, p.dtype) for m, t in moments.items()}
                opt.state[p]["step"] = torch.tensor(float(state["step"]), device=p.device)
    return state


@contextlib.contextmanager
def compiled(family: Family, wanted: bool) -> Iterator[None]:
    """Compiles the token-wise parts while it lasts; they see the same shapes in every batch."""
    plain = [getattr(owner, name) for owner, name in family.compiled]
    if wanted:
        for (owner, name), part in zip(family.compiled, plain, strict=True):
            setattr(owner, name, torch.compile(part, dynamic=False))
    yield
    for (owner, name), part in zip(family.compiled, plain, strict=True):
        setattr(owner, name, part)


class Log:
    """Lines to the terminal and to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, text: str) -> None:
        print(text, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


_WARM = 30
"""Steps before the clock of the schedule starts: compilation is not training."""


def run(
    args: argparse.Namespace, model: nn.Module, opt: torch.optim.AdamW, plan: Plan, say: Log
) -> None:
    """Trains until the schedule, the step count or the time for this part is over."""
    entered = time.monotonic()
    state: dict[str, float] = {"step": 0, "seconds": 0.0}
    if args.resume is not None:
        state |= resume(args.resume, model, opt)
        if args.fresh_schedule:
            state["seconds"] = 0.0
    begin = int(state["step"]) if args.fresh_schedule else 0
    first = step = int(state["step"])
    encoder = FAMILIES[args.family].encoder
    focus = (args.focus, args.focus_share) if args.focus else None
    source = data.batches(encoder, args.seed, step, args.tokens, args.workers, focus)
    began = saved = shown = entered
    progress = 0.0

    def keep() -> None:
        seconds = state["seconds"] + time.monotonic() - began
        save(args.out, model, opt, {"step": step, "seconds": seconds, "seed": args.seed})

    while step < args.steps:
        now = time.monotonic()
        if step - first <= _WARM and args.device == "cuda":
            began = now
        spent = state["seconds"] + now - began
        by_steps = (step - begin) / max(1, args.steps - begin)
        progress = spent / (args.minutes * 60) if args.minutes else by_steps
        if progress >= 1.0 or (args.stop_after and now - entered > args.stop_after):
            break
        for group in opt.param_groups:
            group["lr"] = plan.learning_rate(step - first, progress)
        row, arrays = next(source)
        batch = Batch.from_arrays(row, arrays, args.device)
        depth = 2 if step % 2 else len(plan.draft_weight)
        total, parts = losses(model, batch, plan, progress, depth)
        opt.zero_grad(set_to_none=True)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        step += 1
        if now - shown > args.log_every or step - first in (1, _WARM):
            shown = now
            if not math.isfinite(float(norm)):
                raise FloatingPointError(f"gradient norm {float(norm)} at step {step}")
            values = " ".join(f"{k} {float(v):.3f}" for k, v in parts.items())
            say(f"step {step} {now - entered:.0f}s progress {progress:.3f} row {row} "
                f"norm {float(norm):.2f} {values}")  # fmt: skip
        if now - saved > 60:
            saved = now
            keep()
    keep()
    say(f"steps {first} to {step}, {args.tokens} tokens each, progress {progress:.3f}")


def train(args: argparse.Namespace) -> nn.Module:
    """The run and, if asked for, the grades; returns the model."""
    torch.manual_seed(args.seed)
    family = FAMILIES[args.family]
    plan = Plan(args.rate, args.warmup, index_from=args.index_from, sparse_from=args.sparse_from)
    model = family.model(family.toy if args.smoke else family.shape).to(args.device)
    opt = optimizer(model, plan.rate, args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    say = Log(args.out / "log.txt")
    sizes = dataclasses.asdict(model.shape)
    say(f"seed {args.seed} generator {VERSION} torch {torch.__version__} {sizes}")
    fast = args.device == "cuda"
    Linear.dtype = torch.bfloat16 if fast else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = fast
    with compiled(family, fast and not args.no_compile):
        run(args, model, opt, plan, say)
    Linear.dtype = torch.float32
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.grade:
        tokens = min(args.tokens, 65536)
        grades = evaluate.grade_all(
            model, family.encoder(), args.grade, args.device, tokens=tokens, long=fast
        )
        say(evaluate.report(grades))
    return model


def main() -> None:
    """Parses the command line and trains."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--family", choices=tuple(FAMILIES), default="glm")
    parser.add_argument("--out", type=Path, default=Path("out/tiny"))
    parser.add_argument("--resume", type=Path, help="folder of an earlier run")
    parser.add_argument("--export", type=Path, help="bundle folder to write at the end")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--fresh-schedule", action="store_true", help="begin the schedule anew after --resume"
    )
    parser.add_argument("--warmup", type=int, default=Plan().warmup, help="steps, in every part")
    parser.add_argument("--index-from", type=float, default=Plan().index_from)
    parser.add_argument("--sparse-from", type=float, default=Plan().sparse_from)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=0.0, help="length of the whole schedule")
    parser.add_argument(
        "--stop-after", type=float, default=0.0, help="stop this part after so many seconds"
    )
    parser.add_argument("--tokens", type=int, default=65536, help="tokens in a batch")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--focus", help="a task of which more is to be learned")
    parser.add_argument("--focus-share", type=float, default=0.3)
    parser.add_argument("--grade", type=int, default=0, help="held-out dialogues a task at the end")
    parser.add_argument("--log-every", type=float, default=5.0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a toy shape and a few steps")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.tokens, args.workers = min(args.steps, 8), 2048, 0
    model = train(args)
    if args.export is not None:
        checkpoint.save(FAMILIES[args.family], model, args.export)


if __name__ == "__main__":
    main()
