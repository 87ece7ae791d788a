"""Writes the checkpoint of a run, or of a place on the line between two runs of one family.

python -m training.blend --family glm --to g --since e --share 0.4 --export DIR
"""

import argparse
from pathlib import Path

from safetensors.torch import load_file

from training import checkpoint
from training.family import FAMILIES, Family


def blend(family: Family, to: Path, since: Path | None, share: float, export: Path) -> None:
    """Exports `to`, or `since` moved toward it by `share` (0 to 1); both are folders of runs."""
    weights = load_file(str(to / "weights.safetensors"))
    if since is not None:
        first = load_file(str(since / "weights.safetensors"))
        weights = {name: first[name] + share * (w - first[name]) for name, w in weights.items()}
    model = family.model(family.shape)
    model.load_state_dict(weights)
    checkpoint.save(family, model, export)


def main() -> None:
    """Parses the command line and exports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--family", choices=tuple(FAMILIES), default="glm")
    parser.add_argument("--to", type=Path, required=True, help="folder of a run")
    parser.add_argument("--since", type=Path, help="folder of an earlier run")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--export", type=Path, required=True, help="bundle folder to write")
    args = parser.parse_args()
    blend(FAMILIES[args.family], args.to, args.since, args.share, args.export)


if __name__ == "__main__":
    main()
