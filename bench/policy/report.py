"""What a comparison leaves behind: one table, one plot, one file of numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.policy.replay import Result


def table(results: Sequence[Result]) -> str:
    """Markdown: by slots and policy, hit and recomputed tokens, and requests per second."""
    lines = [
        "| slots | policy | hit tokens | of all | recomputed tokens | replay |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for one in results:
        lines.append(
            f"| {one.budget} | {one.policy} | {one.hit_tokens:,} |"
            f" {one.hit_tokens / one.prompt_tokens:.1%} | {one.recomputed_tokens:,} |"
            f" {one.requests / one.replay_s:,.0f} requests/s |"
        )
    return "\n".join(lines)


def write(results: Sequence[Result], header: dict[str, str], folder: Path) -> list[Path]:
    """`policy.json`, `policy.md` and, where matplotlib is installed, `policy.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {"header": header, "results": [asdict(one) for one in results]}
    text = "".join(f"{name}: {value}  \n" for name, value in header.items())
    files = {"policy.json": json.dumps(numbers, indent=1) + "\n"}
    files["policy.md"] = f"{text}\n{table(results)}\n"
    for name, content in files.items():
        (folder / name).write_text(content, "utf-8")
    written = [folder / name for name in files]
    return written + plot(results, header, folder / "policy.png")


def plot(results: Sequence[Result], header: dict[str, str], path: Path) -> list[Path]:
    """Hit and recomputed tokens against the slots, a line for each policy."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed; pip install 'millpond[bench]'")
        return []
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in dict.fromkeys(one.policy for one in results):
        own = [one for one in results if one.policy == name]
        slots = [one.budget for one in own]
        axes[0].plot(slots, [one.hit_tokens / 1e6 for one in own], marker="o", label=name)
        axes[1].plot(slots, [one.recomputed_tokens / 1e6 for one in own], marker="o", label=name)
    for side, title in zip(axes, ("hit tokens", "recomputed tokens"), strict=True):
        side.set(title=title, xlabel="slots for checkpoints", ylabel="millions", xscale="log")
        side.set_ylim(bottom=0)
        side.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(header["trace"])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return [path]
