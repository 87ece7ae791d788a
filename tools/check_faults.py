"""Checks tests/faults/index.toml: every kind of fault is named, and every test it cites exists."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / "tests" / "faults" / "index.toml"

KINDS = (
    "publication order",
    "premature reuse",
    "uninitialised read",
    "rollback error",
    "row/owner mix-up",
    "padding alias",
    "address arithmetic",
    "kernel tail",
    "layout contract",
    "precision parity",
    "hit logic",
    "accounting",
    "admission atomicity",
    "partial transfer",
    "transfer contract",
    "invalidation",
    "lifecycle",
    "API/metric",
    "output reading",
    "liveness",
    "configuration guard",
    "validation gap",
)
REPORT = re.compile(r"^[\w.-]+/[\w.-]+#\d+$")


def defined(path: Path) -> set[str]:
    """Names of the tests in a file: `test_x` and `TestThing::test_x`; `TestThing` for machines."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {
                f"{node.name}::{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return {n for n in names if n.rpartition("::")[2].lower().startswith("test")}


def missing_test(citation: str) -> str | None:
    """Why `path::name` names no test, or None."""
    name, _, test = citation.partition("::")
    path = ROOT / name
    if not path.is_file():
        return f"no such file: {citation}"
    if test not in defined(path):
        return f"no such test: {citation}"
    return None


def case_problems(case: dict[str, Any]) -> list[str]:
    """What is wrong with one case of the index."""
    name = case.get("id", "a case without id")
    found = []
    if unknown := set(case) - {"id", "kinds", "seen", "what", "tests", "waits"}:
        found.append(f"unknown fields {sorted(unknown)}")
    if not case.get("what"):
        found.append("says not what went wrong")
    found += [f"unknown kind {k!r}" for k in case.get("kinds", []) if k not in KINDS]
    found += [f"not a public report: {r!r}" for r in case.get("seen", []) if not REPORT.match(r)]
    if not case.get("kinds"):
        found.append("has no kind")
    if not case.get("tests") and not case.get("waits"):
        found.append("has no test, and says not what it waits for")
    found += [reason for t in case.get("tests", []) if (reason := missing_test(t))]
    return [f"{name}: {problem}" for problem in found]


def problems(index: dict[str, Any]) -> list[str]:
    """Everything wrong with the index."""
    cases = index.get("case", [])
    found = [p for case in cases for p in case_problems(case)]
    ids = [case.get("id") for case in cases]
    found += [f"{i}: stands twice" for i in sorted({i for i in ids if ids.count(i) > 1})]
    words = index.get("kinds", {})
    for kind in KINDS:
        if not words.get(kind):
            found.append(f"kind {kind!r}: not described")
        if not any(kind in case.get("kinds", []) for case in cases):
            found.append(f"kind {kind!r}: no case")
    return found


def main() -> int:
    """Print the problems, or how far the index is covered."""
    index = tomllib.loads(INDEX.read_text("utf-8"))
    if found := problems(index):
        print("\n".join(found))
        return 1
    cases = index["case"]
    covered = sum(bool(case.get("tests")) for case in cases)
    print(f"{len(KINDS)} kinds, {len(cases)} cases: {covered} with tests, the others wait")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
