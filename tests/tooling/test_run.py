"""What run.py promises: one environment however many ask, and nothing left running however it ends."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from tests.tooling.processes import eventually, gone

ROOT = Path(__file__).parents[2]
# The interpreter behind our own environment, which has no pip itself.
HOST_PYTHON = str(Path(sys.executable).resolve())

# What `run.py demo` starts in a tree of ours: a process with a child that left the
# process group, as a daemon would. Both tell who they are once both are running.
FAMILY = """
import os, signal, subprocess, sys
CHILD = "import os, signal; os.setsid(); print(os.getpid(), flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
print(os.getpid(), child.stdout.readline().strip(), flush=True)
if "--leave" in sys.argv:
    os._exit(7)
child.wait()
"""

# Stands in for pip, which takes seconds to find that there is nothing to do.
QUICK_PIP = """
import sys
if "--version" in sys.argv:
    print("pip 99.0")
"""

FAILING_PIP = QUICK_PIP + "else: sys.exit(1)"

# Installs as little as a package can be: a folder.
FOLDER_PIP = (
    QUICK_PIP
    + """
if "--target" in sys.argv:
    from pathlib import Path
    Path(sys.argv[sys.argv.index("--target") + 1]).mkdir(parents=True)
"""
)

# Writes down which files of pins each installation was given.
NOTING_PIP = (
    QUICK_PIP
    + """
else:
    from pathlib import Path
    with (Path(__file__).parents[1] / "installed").open("a") as file:
        print(*[Path(name).name for name in sys.argv if name.endswith(".txt")], file=file)
"""
)

# An installation that is killed while it writes, and takes its time to end. The next one finds nothing to do.
SLOW_PIP = """
import signal, sys, time
from pathlib import Path
if "--version" in sys.argv:
    print("pip 99.0")
    sys.exit()
events = Path(__file__).parents[1] / "events"
def note(word):
    with events.open("a") as file:
        file.write(word + " ")
def slow_to_end(*_):
    time.sleep(0.3)
    note("ended")
    sys.exit(1)
first = not events.exists()
signal.signal(signal.SIGTERM, slow_to_end)
note("began")
if first:
    signal.pause()
note("ended")
"""


class Run(Protocol):
    def __call__(self, *arguments: str, **environment: str) -> subprocess.Popen[str]: ...


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with nothing to install, whose demo starts a small family of processes."""
    shutil.copy(ROOT / "run.py", tmp_path)
    (tmp_path / "requirements.txt").write_text("")
    (tmp_path / "example_app").mkdir()
    (tmp_path / "example_app" / "__init__.py").touch()
    (tmp_path / "example_app" / "demo.py").write_text(FAMILY)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(QUICK_PIP)
    return tmp_path


@pytest.fixture
def run(tree: Path) -> Iterator[Run]:
    """Starts `run.py` in the tree; whatever the test leaves behind is killed."""
    with ExitStack() as started:

        def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [HOST_PYTHON, "run.py", *arguments],
                cwd=tree,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start


def family(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL), ids=lambda n: n.name)
def test_whatever_ends_run_py_ends_all_that_it_started(run: Run, number: signal.Signals) -> None:
    """
    No server stays behind, not even one that left the process group.
    """
    process = run("demo")
    pids = family(process)

    process.send_signal(number)
    process.wait()

    assert [gone(pid) for pid in pids] == [True, True]


def test_a_command_that_ends_takes_its_children_along(run: Run) -> None:
    """
    Its exit code is passed on once nothing of it is left running.
    """
    process = run("demo", "--leave")
    pids = family(process)

    assert (process.wait(), [gone(pid) for pid in pids]) == (7, [True, True])


def test_a_guard_that_is_killed_leaves_nothing_either(run: Run) -> None:
    """
    Out of memory may hit the guard first; then run.py itself inherits what is left.
    """
    process = run("demo")
    pids = family(process)

    os.kill(parent_of(pids[0]), signal.SIGKILL)
    process.wait()

    assert [gone(pid) for pid in pids] == [True, True]


def test_only_run_py_hears_ctrl_c_from_the_terminal(run: Run) -> None:
    """
    It passes each on once; a guard that heard it from the terminal too would count two and end a debugger.
    """
    process = run("demo")
    pids = family(process)

    groups = {os.getpgid(pid) for pid in [*pids, parent_of(pids[0])]}

    assert os.getpgid(process.pid) not in groups


def test_an_exit_by_signal_is_reported_as_a_shell_does(run: Run) -> None:
    """
    128 plus the signal's number, so that scripts can tell a killed command from a failed one.
    """
    process = run("demo")
    family(process)

    process.send_signal(signal.SIGTERM)

    assert process.wait() == 128 + signal.SIGTERM


def test_two_first_runs_at_once_make_one_environment(run: Run) -> None:
    """
    The second waits for the first and finds the work done.
    """
    both = [run("setup"), run("setup")]

    messages = [process.communicate()[1] for process in both]

    assert [process.returncode for process in both] == [0, 0]
    assert sum("installing" in message for message in messages) == 1


def test_the_environment_is_not_made_twice(run: Run) -> None:
    """
    A second run starts at once and says nothing.
    """
    run("setup").communicate()

    assert run("setup").communicate() == ("", "")


def test_a_half_made_environment_is_made_anew(run: Run, tree: Path) -> None:
    """
    A run that was killed while it installed is not mistaken for a finished one.
    """
    run("setup").communicate()
    (tree / ".venv" / "made-by-run.py").unlink()
    leftover = tree / ".venv" / "half-written"
    leftover.touch()

    run("setup").communicate()

    assert not leftover.exists()


def test_changed_pins_are_installed(run: Run, tree: Path) -> None:
    """
    Whoever pulls a change of requirements.txt gets it with the next command, here with an honest failure.
    """
    run("setup").communicate()
    (tree / "requirements.txt").write_text("another==1.0\n")
    (tree / "pip" / "__main__.py").write_text(FAILING_PIP)

    process = run("setup")
    _, message = process.communicate()

    assert process.returncode == 1
    assert "PIP_INDEX_URL" in message


def test_after_a_failed_installation_nothing_runs(run: Run, tree: Path) -> None:
    """
    The next command tries again instead of running on half of the packages.
    """
    (tree / "requirements.txt").write_text("another==1.0\n")
    (tree / "pip" / "__main__.py").write_text(FAILING_PIP)
    run("setup").communicate()

    process = run("demo")
    output, _ = process.communicate()

    assert (process.returncode, output) == (1, "")


@pytest.fixture
def installations(tree: Path) -> Path:
    """What pip was given, a line for each time. The tree has pins for the demo, for tests and for the checks."""
    (tree / "pip" / "__main__.py").write_text(NOTING_PIP)
    (tree / "pytest.py").touch()
    (tree / "example_app" / "demo.py").write_text("")
    (tree / "requirements").mkdir()
    (tree / "requirements" / "demo.txt").write_text("flask==1.0\n")
    (tree / "requirements" / "postgresql.txt").write_text("driver[c]==2.0\n")
    (tree / "requirements" / "test.txt").write_text("flask==1.0\ntests==3.0\n")
    (tree / "requirements.txt").write_text("flask==1.0\ndriver[c]==2.0\ntests==3.0  # quick\nlinter==4.0\n")
    return tree / "installed"


def test_each_command_installs_only_what_it_needs(run: Run, installations: Path) -> None:
    """A newcomer's demo does not wait for the test tools."""
    for command in ("demo", "test", "lock"):
        run(command).communicate()

    assert installations.read_text().splitlines() == ["demo.txt", "test.txt", "requirements.txt"]


def test_a_command_after_a_larger_one_installs_nothing(run: Run, installations: Path) -> None:
    """The stamp holds the pins: the demo's are among those of the tests."""
    for command in ("test", "demo", "demo", "setup", "test", "demo"):
        run(command, DATABASE_URL="").communicate()

    assert installations.read_text().splitlines() == ["test.txt", "requirements.txt"]


def test_a_demo_on_postgresql_installs_the_driver_too(run: Run, installations: Path) -> None:
    run("demo", DATABASE_URL="postgresql://localhost/shop").communicate()

    assert installations.read_text().splitlines() == ["demo.txt postgresql.txt"]


def test_a_demo_on_another_version_has_whatever_that_one_depends_on(run: Run, installations: Path) -> None:
    run("demo", MARSHMALLOW_VERSION="3.20.2", DATABASE_URL="").communicate()

    assert installations.read_text().splitlines()[0] == "test.txt"


def test_another_pin_of_an_installed_package_is_installed(run: Run, installations: Path, tree: Path) -> None:
    """One version of a package is installed at a time, and the stamp says which."""
    run("setup").communicate()
    pins = tree / "requirements" / "demo.txt"
    for version in ("1.1", "1.0"):
        pins.write_text(f"flask=={version}\n")
        run("demo", DATABASE_URL="").communicate()

    assert installations.read_text().splitlines() == ["requirements.txt", "demo.txt", "demo.txt"]


def test_an_environment_of_an_earlier_run_py_is_added_to(run: Run, installations: Path, tree: Path) -> None:
    """Its stamp held a digest in place of the pins. A demo may be running there, so it is not removed."""
    run("setup").communicate()
    stamp = tree / ".venv" / "made-by-run.py"
    stamp.write_text(f"{stamp.read_text().splitlines()[0]}\n{'0' * 64}")
    kept = tree / ".venv" / "kept"
    kept.touch()

    run("setup").communicate()

    assert (len(installations.read_text().splitlines()), kept.exists()) == (2, True)


@pytest.mark.slow
def test_without_pip_ensurepip_takes_its_place(tree: Path) -> None:
    """
    Some systems ship Python with one of the two only.
    """
    pytest.importorskip("ensurepip")
    shutil.rmtree(tree / "pip")
    # One without pip for certain: ours may have been given it by whatever else uses it.
    venv.EnvBuilder(symlinks=True).create(tree / "host")

    subprocess.run([tree / "host" / "bin" / "python", "run.py", "setup"], cwd=tree, check=True)

    subprocess.run([tree / ".venv" / "bin" / "python", "-m", "pip", "--version"], check=True)


def test_a_killed_installation_keeps_the_lock_until_its_pip_is_gone(run: Run, tree: Path) -> None:
    """
    Otherwise the next run would remove the folder that pip is still writing to.
    """
    (tree / "pip" / "__main__.py").write_text(SLOW_PIP)
    first = run("setup")
    assert eventually((tree / "events").exists)
    second = run("setup")
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()

    first.kill()
    second.communicate()

    assert (tree / "events").read_text().split() == ["began", "ended", "began", "ended"]


def test_versions_of_choice_come_before_the_pinned_ones(run: Run, tree: Path) -> None:
    """
    Each is installed apart, so that the next command without a choice finds the pinned one as it was.
    """
    (tree / "pip" / "__main__.py").write_text(FOLDER_PIP)
    (tree / "example_app" / "demo.py").write_text("import os; print(os.environ.get('PYTHONPATH'))")

    versions = {"FLASK_VERSION": "3.0.3", "SQLALCHEMY_VERSION": "2.0.58", "MARSHMALLOW_VERSION": "3.20.2"}
    chosen, _ = run("demo", **versions, PYTHONPATH="/theirs").communicate()

    folders = [f"{tree}/.compat/{name}" for name in ("marshmallow-3.20.2", "sqlalchemy-2.0.58", "flask-3.0.3")]
    assert chosen.strip().split(":") == [*folders, "/theirs"]


@pytest.mark.parametrize("variable", ("FLASK_VERSION", "SQLALCHEMY_VERSION", "MARSHMALLOW_VERSION"))
def test_a_version_of_choice_must_be_a_version(run: Run, variable: str) -> None:
    """
    It becomes part of a path and of a requirement, so nothing else is let in.
    """
    process = run("demo", **{variable: "../../elsewhere"})
    _, message = process.communicate()

    assert (process.returncode, "not a version" in message) == (1, True)


def test_an_old_python_is_told_so_and_not_shown_a_syntax_error() -> None:
    """
    `python3` is 3.6 on systems that are still about, and run.py must at least parse there to say what it needs.
    """
    source = (ROOT / "run.py").read_text()

    tree = ast.parse(source, feature_version=(3, 6))

    names = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert "annotations" not in names


def test_an_unknown_command_explains_the_known_ones(run: Run, tree: Path) -> None:
    """
    A typing error prepares nothing and is an error for scripts.
    """
    process = run("tests")
    _, message = process.communicate()

    assert (process.returncode, "run.py test" in message, (tree / ".venv").exists()) == (2, True, False)


def parent_of(pid: int) -> int:
    stat = (Path("/proc") / str(pid) / "stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])
