"""A run shows how far it is, and each failure comes with the command that repeats it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.parametrize("word", ["a", "b c"])
def test_word(word):
    assert word == "a"

def test_skipped():
    pytest.skip("so")
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", ("0", "1"))
def test_counts_and_the_command_that_repeats_a_failure(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_words.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--progress", "-p", "tests.progress", "-p", "xdist"]
    command += ["-p", "pytest_randomly", "-n", processes, "--randomly-seed=7"]
    command += ["--rootdir", str(tmp_path), "-c", "/dev/null", "."]

    # The other plugins take two seconds to load.
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    lines = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
    ).stdout.splitlines()

    assert any(line.startswith("3 of 3 tests, 1 failed, ") for line in lines)
    assert not any(line.startswith((".", "s")) for line in lines)
    assert any(line.startswith("FAILED test_words.py::test_word[b c] - ") for line in lines)
    repeated = [shlex.split(line) for line in lines if line.startswith("python3 run.py test")]
    assert repeated == [["python3", "run.py", "test", "--randomly-seed=7", "test_words.py::test_word[b c]"]]
