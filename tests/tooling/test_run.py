"""run.py: it makes one environment however many runs ask, and becomes the command that it was asked to run."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
# The interpreter behind our environment. It has no packages of ours.
HOST_PYTHON = str(Path(sys.executable).resolve())

# Stands in for pip. It writes down what it installs, waits if it finds a pipe to read, and can fail.
PIP = """
import sys
from pathlib import Path
if "--version" in sys.argv:
    sys.exit()
here = Path(__file__).parents[1]
files = [Path(word).name for word in sys.argv if word.endswith(".txt")]
with (here / "installed").open("a") as file:
    print(*files or sys.argv[-1:], file=file)
if "--target" in sys.argv:
    Path(sys.argv[sys.argv.index("--target") + 1]).mkdir(parents=True)
if (here / "pipe").exists():
    (here / "pipe").read_text()
with (here / "ended").open("a") as file:
    print(*files, file=file)
sys.exit((here / "broken").exists())
"""
DEMO = """
import os, sys
print(os.getpid(), os.environ.get("PYTHONPATH"), flush=True)
sys.exit(sys.stdin.readline() and 7)
"""


class Run(Protocol):
    def __call__(self, *arguments: str, **environment: str) -> subprocess.Popen[str]: ...


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with pins for the demo, the tests and the checks, and a demo that says who it is."""
    shutil.copy(ROOT / "run.py", tmp_path)
    files = {
        "example_app/demo.py": DEMO,
        "pip/__init__.py": "",  # or the real one comes first
        "pip/__main__.py": PIP,
        "tests/__main__.py": "",
        "requirements/lock.py": "",
        "requirements/demo.txt": "flask==1.0\n",
        "requirements/postgresql.txt": "driver[c]==2.0\n",
        "requirements/test.txt": "flask==1.0\ntests==3.0\n",
        "requirements.txt": "flask==1.0\ndriver[c]==2.0\ntests==3.0  # quick\nlinter==4.0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def run(tree: Path) -> Iterator[Run]:
    """Start `run.py` in the tree. The end of the test kills it."""
    with ExitStack() as started:

        def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
            inherited = {name: value for name, value in os.environ.items() if not name.endswith("_VERSION")}
            process = subprocess.Popen(
                [HOST_PYTHON, "run.py", *arguments],
                cwd=tree,
                env={**inherited, "PYTHONPATH": "", "DATABASE_URL": "", **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start


def installations(tree: Path) -> list[str]:
    return (tree / "installed").read_text().splitlines()


def first_word(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().split()[0]


def test_a_command_is_the_process_that_was_started(run: Run) -> None:
    """So a signal reaches the command itself, and its exit code is that of run.py."""
    failing, ended = run("demo"), run("demo")
    pids = [first_word(failing), first_word(ended)]

    failing.communicate("\n")
    ended.send_signal(signal.SIGTERM)

    assert pids == [str(failing.pid), str(ended.pid)]
    assert (failing.returncode, ended.wait()) == (7, -signal.SIGTERM)


def test_two_first_runs_at_once_make_one_environment(run: Run, tree: Path) -> None:
    both = [run("setup"), run("setup")]

    messages = [process.communicate()[1] for process in both]

    assert [process.returncode for process in both] == [0, 0]
    assert sum("installing" in message for message in messages) == 1
    assert installations(tree) == ["requirements.txt"]


def test_each_command_installs_only_the_packages_that_it_lacks(run: Run, tree: Path) -> None:
    """The demo of a newcomer does not wait for the test tools."""
    postgresql = "postgresql://localhost/shop"
    for command, environment in (
        ("demo", {}),
        ("demo", {"DATABASE_URL": postgresql}),
        ("demo", {"MARSHMALLOW_VERSION": "3.20.2"}),
        ("test", {}),
        ("lock", {}),
        ("demo", {"DATABASE_URL": postgresql}),
        ("setup", {}),
    ):
        _, message = run(command, **environment).communicate()

    assert installations(tree) == [
        "demo.txt",
        "demo.txt postgresql.txt",
        "test.txt",
        "marshmallow==3.20.2",
        "requirements.txt",
    ]
    assert message == ""


def test_after_a_failed_installation_the_command_does_not_run(run: Run, tree: Path) -> None:
    """Neither at once nor the next time, and the message names the remedy."""
    (tree / "broken").touch()
    for _ in range(2):
        process = run("demo")
        output, message = process.communicate()

        assert (process.returncode, output, "PIP_INDEX_URL" in message) == (1, "", True)


def test_an_environment_without_a_stamp_is_made_again(run: Run, tree: Path) -> None:
    """A run that was killed while it installed left it so. One with a stamp stays: a demo may be running in it."""
    run("setup").communicate()
    leftover = tree / ".venv" / "half-written"
    leftover.touch()
    (tree / "requirements" / "demo.txt").write_text("flask==1.1\n")
    run("demo").communicate()
    assert leftover.exists()

    (tree / ".venv" / "made-by-run.py").unlink()
    run("setup").communicate()

    assert not leftover.exists()


def test_the_next_run_waits_until_the_pip_of_a_killed_run_has_ended(run: Run, tree: Path) -> None:
    """Otherwise it would remove the folder that this pip still writes to."""
    os.mkfifo(tree / "pipe")
    killed = run("setup")
    with (tree / "pipe").open("w"):  # opens as soon as pip reads
        killed.kill()
        killed.wait()
        waiting = run("setup")
        assert waiting.stderr is not None
        assert "waiting" in waiting.stderr.readline()
        assert not (tree / "ended").exists()
        (tree / "pipe").unlink()

    waiting.communicate()

    assert waiting.returncode == 0
    assert installations(tree) == ["requirements.txt"] * 2


@pytest.mark.parametrize("ensurepip", (True, False))
def test_without_a_new_pip_ensurepip_takes_its_place(run: Run, tree: Path, ensurepip: bool) -> None:
    """Some systems ship Python with only one of the two, or with a pip that cannot install into another environment."""
    (tree / "pip" / "__main__.py").write_text(f"import sys\nif '--python' in sys.argv: sys.exit(2)\n{PIP}")
    (tree / "ensurepip.py").write_text("open('ensured', 'w').close()" if ensurepip else "")
    if not ensurepip:
        hide = "import sys, runpy\nsys.modules['ensurepip'] = None\nrunpy.run_path('run.py', run_name='__main__')\n"
        (tree / "run.py").rename(tree / "launcher.py")
        (tree / "run.py").write_text(hide.replace("'run.py'", "'launcher.py'"))

    process = run("setup")
    _, message = process.communicate()

    assert (process.returncode, (tree / "ensured").exists()) == ((0, True) if ensurepip else (1, False))
    assert ("apt install python3-pip" in message) is not ensurepip


def test_versions_of_choice_come_before_the_pinned_ones(run: Run, tree: Path) -> None:
    """Each is installed in a folder apart, once, so that the pinned one stays as it is."""
    versions = {"FLASK_VERSION": "3.0.3", "SQLALCHEMY_VERSION": "2.0.58", "MARSHMALLOW_VERSION": "3.20.2"}
    for _ in range(2):
        output, _ = run("demo", **versions, PYTHONPATH="/theirs").communicate()

    folders = [f"{tree}/.compat/{name}" for name in ("marshmallow-3.20.2", "sqlalchemy-2.0.58", "flask-3.0.3")]
    assert output.split()[1].split(":") == [*folders, "/theirs"]
    assert installations(tree) == ["test.txt", "Flask==3.0.3", "SQLAlchemy==2.0.58", "marshmallow==3.20.2"]


def test_a_version_of_choice_must_be_a_version(run: Run) -> None:
    """It becomes part of a path and of a requirement."""
    refused = [run("demo", **{name: "../x"}) for name in ("FLASK_VERSION", "SQLALCHEMY_VERSION", "MARSHMALLOW_VERSION")]

    assert ["not a version" in process.communicate()[1] for process in refused] == [True] * 3
    assert [process.returncode for process in refused] == [1] * 3


def test_check_runs_every_check_and_names_those_that_failed(run: Run, tree: Path) -> None:
    run("setup").communicate()
    for tool, code in (("ruff", 1), ("mypy", 0), ("lint-imports", 1)):
        (tree / ".venv" / "bin" / tool).write_text(f"#!/bin/sh\necho {tool} found\necho faults >&2\nexit {code}\n")
        (tree / ".venv" / "bin" / tool).chmod(0o755)
    (tree / "tests").mkdir(exist_ok=True)
    (tree / "tests" / "tooling").mkdir()
    for name in ("lint_lua.py", "tooling/weight.py"):
        (tree / "tests" / name).write_text("raise SystemExit(1)\n")

    process = run("check")

    output = process.communicate()[0]
    ruff, imports, types = (f"{tool} found\nfaults" for tool in ("ruff", "lint-imports", "mypy"))
    assert output == (
        f"--- ruff check\n{ruff}\n--- ruff format\n{ruff}\n--- lint-imports\n{imports}\n--- luacheck\n--- weight\n"
        f"--- mypy\n{types}\n"
        "--- failed: ruff check, ruff format, lint-imports, luacheck, weight\n"
    )
    assert process.returncode == 1


def test_an_old_python_reads_which_version_it_needs() -> None:
    """It has to parse the whole file to run the first lines. `python3` is 3.6 on systems that are still in use."""
    tree = ast.parse((ROOT / "run.py").read_text(), feature_version=(3, 6))

    names = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert "annotations" not in names


def test_an_unknown_command_explains_the_known_ones(run: Run, tree: Path) -> None:
    """A typing error is an error for scripts, and prepares no environment."""
    process, asked = run("tests"), run("--help")
    messages = [process.communicate()[1], asked.communicate()[1]]

    assert ["run.py test" in message for message in messages] == [True, True]
    assert (process.returncode, asked.returncode, (tree / ".venv").exists()) == (2, 0, False)
