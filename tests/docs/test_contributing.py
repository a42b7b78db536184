"""CONTRIBUTING.md, the Makefile, the hooks and the workflow name commands and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (
    "CONTRIBUTING.md",
    "README.md",
    "Makefile",
    ".ci/run",
    ".pre-commit-config.yaml",
    ".github/pull_request_template.md",
)
RUN = (ROOT / "run.py").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# Made by a command that the page names, or by git.
MADE = {".venv", "dist", "build"}


def test_every_command_of_run_py_is_explained_by_its_help() -> None:
    explained = set(re.findall(r"^    python3 run\.py (\w+)", RUN, re.MULTILINE))

    named = {
        name
        for file in FILES
        for name in re.findall(r"python3 run\.py ([a-z]+)", (ROOT / file).read_text(encoding="utf-8"))
    }

    assert explained >= {"demo", "test", "check", "walk", "mutants"}
    assert named - explained == set()


def test_every_target_of_make_exists() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert targets

    assert set(re.findall(r"`make (\w+)", CONTRIBUTING)) <= set(targets[1].split())


def test_every_file_that_is_named_exists() -> None:
    text = "\n".join(
        (ROOT / file).read_text(encoding="utf-8")
        for file in ("CONTRIBUTING.md", "Makefile", ".github/workflows/ci.yml")
    )
    named = set(re.findall(r"(?<![\w/.])(?:[\w.-]+/)+[\w.-]*|\b\w+\.(?:md|py|toml|txt)\b", text))

    paths = {name for name in named if not {*name.split("/")} & MADE and not re.match(r"actions/", name)}
    assert [name for name in sorted(paths) if not (ROOT / name.rstrip(".")).exists()] == []


def test_hooks_download_nothing() -> None:
    """A hook from a repository would run code that no pin names."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")

    assert set(re.findall(r"- repo: (\S+)", hooks)) == {"local"}
    assert set(re.findall(r"language: (\S+)", hooks)) == {"system"}


def test_the_workflow_takes_actions_by_their_commit() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    actions = re.findall(r"uses: \S+?@(\S+)", workflow)

    assert len(actions) == 2
    assert [action for action in actions if not re.fullmatch(r"[0-9a-f]{40}", action)] == []
    assert "- run: .ci/run" in workflow


def test_the_workflow_runs_on_every_python_that_the_package_supports() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)

    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', setup)
    assert supported[0] == "3.11"
    assert re.findall(r"\d+\.\d+", matrix) == supported
