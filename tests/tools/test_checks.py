"""The project's own checks find what they are for: each is shown one thing that is wrong."""

from __future__ import annotations

import changelog
import check_faults
import check_files
import check_links
import check_patterns
import pytest
import run_docs


def case(**changes):
    """A case of the faults index that is in order, but for `changes`."""
    good = {
        "id": "B01",
        "kinds": ["hit logic"],
        "seen": ["owner/name#1"],
        "what": "something",
        "tests": ["tests/tools/test_checks.py::test_a_case_in_order_is_accepted"],
    }
    return {k: v for k, v in {**good, **changes}.items() if v is not None}


def test_a_case_in_order_is_accepted():
    assert check_faults.case_problems(case()) == []
    assert check_faults.case_problems(case(tests=None, waits="for a store")) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"tests": ["tests/tools/test_checks.py::test_that_nobody_wrote"]},
        {"tests": ["tests/tools/test_nowhere.py::test_a_case_in_order_is_accepted"]},
        {"tests": ["tests/tools/test_checks.py::case"]},
        {"tests": None},
        {"tests": []},
        {"kinds": []},
        {"kinds": ["bad luck"]},
        {"seen": ["somewhere"]},
        {"what": ""},
        {"notes": "free text"},
    ],
)
def test_a_case_that_is_not_in_order_is_reported(changes):
    assert check_faults.case_problems(case(**changes))


def test_a_kind_without_a_case_or_a_description_is_reported():
    words = dict.fromkeys(check_faults.KINDS, "words")
    cases = [case(id=kind, kinds=[kind]) for kind in check_faults.KINDS]
    assert check_faults.problems({"kinds": words, "case": cases}) == []
    assert check_faults.problems({"kinds": words, "case": cases[1:]})
    assert check_faults.problems({"kinds": {**words, "hit logic": ""}, "case": cases})
    assert check_faults.problems({"kinds": words, "case": [*cases, cases[0]]})


@pytest.mark.parametrize(
    "line",
    [
        "# TO" + "DO: later",
        "# " + "-" * 40,
        "model = '/ho" + "me/ann/model'",
        "# as decided in this ses" + "sion",
        "--index-url https://py" + "pi.org/simple",
        "p = tl.make_block_" + "ptr(x)",
    ],
)
def test_a_banned_pattern_is_found(tmp_path, monkeypatch, line):
    monkeypatch.setattr(check_patterns, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(f"x = 1\n{line}\n", "utf-8")
    (found,) = check_patterns.violations(path)
    assert found.startswith("module.py:2: ")


@pytest.mark.parametrize("line", ["# TO" + "DO(#12): later", "url = 'x/home/y'", "session_len = 8"])
def test_what_only_resembles_a_banned_pattern_is_left_alone(tmp_path, line):
    path = tmp_path / "module.py"
    path.write_text(line + "\n", "utf-8")
    assert check_patterns.violations(path) == []


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("other.md", False),
        ("other.md#two-words-and-code", False),
        ("#here", False),
        ("https://example.org/none", False),
        ("none.md", True),
        ("other.md#none", True),
        ("#none", True),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path, monkeypatch, link, broken):
    monkeypatch.setattr(check_links, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# Two words, and `code`\n", "utf-8")
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n[words]({link}) `[not](a-link.md)`\n", "utf-8")
    assert bool(check_links.broken(page)) == broken


@pytest.mark.parametrize(
    ("content", "fine"),
    [(b"x\n", True), (b"", True), (b"x", False), (b"x\n\n", False), (b"x \n", False)],
)
def test_whitespace_is_checked(tmp_path, content, fine):
    path = tmp_path / "page.md"
    path.write_bytes(content)
    assert (check_files.problems(path) == []) == fine


def test_a_large_file_is_reported_unless_it_is_a_bundled_model(tmp_path):
    (tmp_path / "bundled").mkdir()
    for folder, problems in ((tmp_path, 1), (tmp_path / "bundled", 0)):
        path = folder / "weights.safetensors"
        path.write_bytes(b"\0" * (check_files.LARGEST + 1))
        assert len(check_files.problems(path)) == problems


def test_fragments_are_assembled_by_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(changelog, "ROOT", tmp_path)
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "one.fixed.md").write_text("Mended\na thing.\n", "utf-8")
    (tmp_path / "changes" / "two.added.md").write_text("A thing.\n", "utf-8")
    assert changelog.problems() == []
    added, fixed = "### Added\n\n- A thing.", "### Fixed\n\n- Mended a thing."
    assert changelog.section() == f"## Unreleased\n\n{added}\n\n{fixed}"
    (tmp_path / "changes" / "three.md").write_text("A thing.\n", "utf-8")
    assert changelog.problems()


def test_only_python_blocks_that_are_meant_to_run_are_run(tmp_path):
    page = tmp_path / "page.md"
    shown = [("python", "a = 1"), ("python no-run", "b"), ("bash", "c")]
    page.write_text("\n".join(f"```{kind}\n{code}\n```\n" for kind, code in shown), "utf-8")
    assert run_docs.blocks(page) == ["a = 1\n"]
