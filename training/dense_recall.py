"""Recall with every position attended against recall through the indexer: what selection costs.

    python -m training.dense_recall --cases 40

The same weights are run twice, once with `index_topk` no smaller than the context. The prompts are
long, so that the indexer has to choose.
"""

import argparse
import json
import tempfile
from pathlib import Path

from millpond.config import PytorchEngineConfig
from millpond.evaluate import Dialect, Mode, TaskScore, run, score
from millpond.front.directory import locate

MODE = Mode(
    PytorchEngineConfig(
        device="cpu", dtype="float32", max_batch_size=8, enable_prefix_caching=False
    )
)


def without_selection(model: Path, directory: Path) -> Path:
    """A copy of a model whose indexer selects everything; its weights are links."""
    for path in model.iterdir():
        (directory / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text("utf-8"))
    text = config.get("text_config", config)
    text["index_topk"] = text["max_position_embeddings"]
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory


def recall(model: Path, count: int, scale: int) -> TaskScore:
    """Recall over long lists."""
    dialect = Dialect(model)
    cases = [dialect.case("recall", 9000 + i, scale=scale) for i in range(count)]
    (found,) = score(run(model, MODE, cases), dialect)
    return found


def main() -> None:
    """Print both numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    model = locate(args.model)
    print("| scale | attention | right | margin |\n|---|---|---|---|")
    for scale in args.scales:
        with tempfile.TemporaryDirectory() as directory:
            dense = without_selection(model, Path(directory))
            for name, path in (("every position", dense), ("64 selected", model)):
                found = recall(path, args.cases, scale)
                print(
                    f"| {scale} | {name} | {found.accuracy:.3f} | {found.margin:.2f} |", flush=True
                )


if __name__ == "__main__":
    main()
