"""The project's parts agree with each other: pages with code, README with Makefile."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import run_docs

ROOT = Path(__file__).resolve().parent.parent
INVARIANTS = {"en": "## The invariants", "zh_cn": "## 不变量"}


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", read("Makefile"), re.MULTILINE))


@pytest.mark.parametrize("language", INVARIANTS)
def test_the_ownership_page_lists_every_invariant_of_the_audit(language):
    audit = importlib.import_module("millpond.state.audit")
    page = read(f"docs/{language}/explanation/ownership.md")
    section = page.split(INVARIANTS[language])[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert listed == [check.__name__ for check in audit.ALL]


def test_every_make_target_is_explained_to_contributors():
    explained = set(re.findall(r"^\| `make ([a-z-]+)", read("CONTRIBUTING.md"), re.MULTILINE))
    assert explained == make_targets() - {"help", "clean", "demo"}


@pytest.mark.parametrize("page", ["README.md", "docs/en/tutorial/quickstart.md", ".ci/run"])
def test_commands_that_a_page_names_exist(page):
    named = set(re.findall(r"^make ([a-z]+)", read(page), re.MULTILINE))
    assert named
    assert named <= make_targets()


def test_every_test_of_the_interpreter_lies_where_its_lane_looks():
    """That lane collects some folders only."""
    (folders,) = re.findall(r"^INTERPRETED := (.+)$", read("Makefile"), re.MULTILINE)
    marked = re.compile(r"mark\.interpreter|ops\.triton\.conftest")
    found = {
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("*.py")
        if marked.search(path.read_text("utf-8"))
    }
    assert len(found) > 5
    for path in found - {Path("tests/test_project.py")}:
        assert any(path.is_relative_to(folder) for folder in folders.split()), path


def test_the_public_names_are_there_and_every_error_is_one_of_them():
    millpond = importlib.import_module("millpond")
    errors = importlib.import_module("millpond.errors")
    promised = {"GenerationConfig", "PytorchEngineConfig", "SpeculativeConfig", "pipeline"}
    promised |= {name for name, item in vars(errors).items() if isinstance(item, type)}
    assert promised <= set(millpond.__all__)
    for name in millpond.__all__:
        assert getattr(millpond, name) is not None


def test_markers_of_the_lanes_are_declared_and_left_out_of_the_default_run():
    options = tomllib.loads(read("pyproject.toml"))["tool"]["pytest"]["ini_options"]
    declared = {marker.partition(":")[0] for marker in options["markers"]}
    left_out = set(re.findall(r"\w+", options["addopts"][-1])) - {"not", "or"}
    assert declared == left_out


def test_the_example_of_the_readme_runs_as_written():
    """As a reader would: in a fresh process, with the bundled model."""
    assert run_docs.blocks(ROOT / "README.md")
    assert run_docs.run(ROOT / "README.md")
