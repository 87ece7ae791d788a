"""Prints how long the package's modules are; growth is shown, not forbidden."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILING = 400
KERNEL_CEILING = 600
SHOWN = 8


def ceiling(path: Path) -> int:
    """Lines a module should stay under."""
    return KERNEL_CEILING if "triton" in path.parts else CEILING


def main() -> int:
    """Print the longest modules, and mark those over their ceiling."""
    modules = sorted((ROOT / "millpond").rglob("*.py"))
    sizes = {m: len(m.read_text("utf-8").splitlines()) for m in modules}
    longest = sorted(modules, key=lambda m: -sizes[m])
    print(f"{len(modules)} modules, {sum(sizes.values())} lines; the longest:")
    for rank, module in enumerate(longest):
        over = sizes[module] > ceiling(module)
        if rank < SHOWN or over:
            mark = f"  over {ceiling(module)}" if over else ""
            print(f"{sizes[module]:7d}  {module.relative_to(ROOT)}{mark}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
