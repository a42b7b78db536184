#!/usr/bin/env python3
"""The commands of this project: demo, test, check, bench, mutants and lock.

    python3 run.py demo [--exit] [--port N]   the example payments service, with a tour
    python3 run.py test [pytest arguments]    the tests
    python3 run.py check                      lint, format, types and the direction of imports
    python3 run.py bench [arguments]          the benchmarks
    python3 run.py walk [stores] [--markdown] the functions of ours that one request crosses, in call order
    python3 run.py mutants [names]            faults seeded in our own code, each to be noticed by a named test
    python3 run.py lock                       write requirements/*.txt from the pins in requirements.txt
    python3 run.py setup                      only prepare .venv, for every command

A command makes .venv and installs the packages that it needs: demo those in requirements/demo.txt,
test, bench, walk and mutants those in requirements/test.txt, the others all of requirements.txt.
Needs Python 3.11 and pip (or ensurepip), nothing else: no make, no root, no activated environment.

FLASK_VERSION=3.0.3 in the environment runs demo, test, bench or mutants on that Flask instead,
SQLALCHEMY_VERSION=2.0.58 on that SQLAlchemy, and MARSHMALLOW_VERSION=3.20.2 on that marshmallow.
"""

import sys

# Everything below parses on much older Pythons, so that they can say this instead of SyntaxError.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("run.py needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Try: python3.11 run.py")

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import time
import traceback
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "made-by-run.py"
REQUIREMENTS = ROOT / "requirements.txt"
TYPED = ("flask_idempotency", "janitor", "example_app", "benchmarks", "tests", "requirements", "run.py", "setup.py")

# Raise this when the way .venv is made changes, so that old ones are made anew.
SCHEME = 1

# Ctrl-C stays first: it may be meant for a debugger, while the others always mean the end.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a demo or a test run may take to put its servers away before it is killed.
GRACE_SECONDS = 10.0
# The packages of which the environment may name another version than the pinned one, by its variable.
OF_CHOICE = {"FLASK_VERSION": "Flask", "SQLALCHEMY_VERSION": "SQLAlchemy", "MARSHMALLOW_VERSION": "marshmallow"}
# prctl(2): orphans below us become our children, so that nothing can slip out of the tree.
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    os.chdir(ROOT)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    modules = {"demo": "example_app.demo", "test": "pytest", "bench": "benchmarks", "walk": "benchmarks.walk"}
    modules["mutants"] = "tests.mutants"
    if command in modules:
        prepare(*needed_by(command))
        return guarded([str(PYTHON), "-m", modules[command], *rest], versions_of_choice())
    if command in ("check", "setup", "lock") and not rest:
        prepare(REQUIREMENTS)
        if command == "lock":
            return guarded([str(PYTHON), "-m", "requirements.lock"], dict(os.environ))
        return check() if command == "check" else 0
    sys.stderr.write(__doc__ or "")
    return 0 if command in ("help", "-h", "--help") else 2


def say(message: str) -> None:
    # Not on stdout, which belongs to the command.
    print(f"run.py: {message}", file=sys.stderr, flush=True)


def check() -> int:
    """Runs every check and fails if any did, so that one run shows all there is to mend."""
    typed = [name for name in TYPED if (ROOT / name).exists()]
    checks = {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "mypy": ["mypy", *typed],
        # A stale cache has reported a break that was not there.
        "lint-imports": ["lint-imports", "--no-logo", "--no-cache"],
    }
    failed = []
    for name, (tool, *arguments) in checks.items():
        print(f"--- {name}", flush=True)
        code = guarded([str(VENV / "bin" / tool), *arguments], dict(os.environ))
        if code > 128:  # ended by a signal: whoever sent it does not want the rest either
            return code
        if code:
            failed.append(name)
    print(f"--- failed: {', '.join(failed)}" if failed else "--- all checks passed")
    return 1 if failed else 0


def needed_by(command: str) -> list[Path]:
    """Return the files of pins that a command needs."""
    # Another version of a package may depend on what the pinned one does not.
    names = ["test" if command != "demo" or any(map(os.environ.get, OF_CHOICE)) else "demo"]
    if names == ["demo"] and os.environ.get("DATABASE_URL", "").startswith("postgres"):
        names.append("postgresql")
    files = [REQUIREMENTS.parent / "requirements" / f"{name}.txt" for name in names]
    return files if all(file.exists() for file in files) else [REQUIREMENTS]


def prepare(*files: Path) -> None:
    """Make .venv, or add to it what these files pin. Many processes may ask at the same time."""
    wanted = pins(*files)
    if is_installed(wanted):
        return
    with locked():
        if is_installed(wanted):
            return
        # Same interpreter, other pins: install over it, and do not pull it from under a running demo.
        reusable = stamp()[:1] == [interpreter()]
        installed = dict(map(named, stamp()[1:])) if reusable else {}
        missing = len(set(wanted) - set(installed.values()))
        STAMP.unlink(missing_ok=True)
        if not reusable:
            # No stamp means that the last attempt was killed half-way: nothing in there can be trusted.
            shutil.rmtree(VENV, ignore_errors=True)
        install(files, missing)
        site_packages = next(VENV.glob("lib/python*/site-packages"))
        (site_packages / "checkout.pth").write_text(f"{ROOT}\n")
        # The pins and not the name of a set: a set that is part of an installed one is installed too.
        installed.update(map(named, wanted))
        unfinished = STAMP.with_suffix(".unfinished")
        unfinished.write_text("\n".join([interpreter(), *sorted(installed.values())]))
        unfinished.replace(STAMP)


def pins(*files: Path) -> list[str]:
    lines = [line.partition("#")[0].strip() for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if "==" in line]


def named(pin: str) -> tuple[str, str]:
    """Return the name of the package, without its extras, and the pin."""
    return re.split(r"[\[=]", pin)[0].lower(), pin


def is_installed(wanted: list[str]) -> bool:
    return stamp()[:1] == [interpreter()] and set(wanted) <= set(stamp()[1:])


def stamp() -> list[str]:
    """Return the interpreter that .venv was made with, and the pins installed in it. Empty if .venv is not complete."""
    return STAMP.read_text().splitlines() if PYTHON.exists() and STAMP.exists() else []


def interpreter() -> str:
    # The path is part of it because scripts in a venv name their interpreter by its full path.
    version = f"{platform.python_implementation()} {sys.version_info[0]}.{sys.version_info[1]} {platform.machine()}"
    return f"{SCHEME} {version} {ROOT}"


@contextlib.contextmanager
def locked() -> Iterator[None]:
    # The guards forked below keep this file open, so the lock outlives a killed run.py until its pip is gone too.
    with (ROOT / ".venv.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is preparing .venv, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(files: Sequence[Path], missing: int) -> None:
    say(f"installing {missing} packages into .venv")
    if not PYTHON.exists():
        download, disk = (20, 100) if files[0].name == "demo.txt" else (100, 420)
        say(f"this happens once; about {download} MB to download and {disk} MB on disk")
        venv.EnvBuilder(symlinks=True).create(VENV)
    pip_install(*(argument for file in files for argument in ("--requirement", str(file))))


def host_has_pip() -> bool:
    """Whether this interpreter's own pip can install into another one (--python, pip 22.3)."""
    answer = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    version = re.match(r"pip (\d+)\.(\d+)", answer.stdout)
    return version is not None and (int(version[1]), int(version[2])) >= (22, 3)


def pip_of_our_own() -> list[str]:
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            f"run.py: {sys.executable} has neither pip 22.3 nor ensurepip. "
            "Install one, for instance with: apt install python3-pip (or python3-venv)"
        )
    subprocess.run([str(PYTHON), "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)
    return [str(PYTHON), "-m", "pip"]


def pip_install(*arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(PYTHON)] if host_has_pip() else pip_of_our_own()
    # A module is compiled when it is first imported: most never are.
    options = ["-qq", "--disable-pip-version-check", "--no-compile", "--only-binary", ":all:"]
    code = guarded([*pip, "install", *options, *arguments], dict(os.environ))
    if code > 128:
        sys.exit(code)
    if code:
        sys.exit(
            "run.py: pip could not install the packages, its message is above. This needs the network, "
            "or PIP_INDEX_URL or PIP_FIND_LINKS pointing to copies of the packages. Run it again when that is mended"
        )


def versions_of_choice() -> dict[str, str]:
    """The environment for a command, with the versions that it names itself in front of the pinned ones."""
    environment = dict(os.environ)
    for variable, package in OF_CHOICE.items():
        version = environment.get(variable, "")
        if version and not re.fullmatch(r"\d+(\.\d+)+", version):
            sys.exit(f"run.py: {variable}={version!r} is not a version such as 3.0.3")
        if version:
            folder = str(installed_apart(package, version))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, environment.get("PYTHONPATH")]))
    return environment


def installed_apart(package: str, version: str) -> Path:
    """A folder with this package alone: everything that it needs comes from the pins."""
    folder = ROOT / ".compat" / f"{package.lower()}-{version}"
    with locked():
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            pip_install("--no-deps", "--target", str(unfinished), f"{package}=={version}")
            unfinished.replace(folder)
    return folder


def guarded(command: list[str], environment: dict[str, str]) -> int:
    """Runs a command and returns its exit code; whatever ends run.py ends all that the command started.

    A forked guard owns the command. It hears of our death because its end of a
    pipe closes, which even SIGKILL cannot prevent, and it adopts orphans, so that
    a server which left its process group is ended all the same.
    """
    lifeline, our_end = os.pipe()
    with wake_ups() as signals:
        adopt_orphans()
        guard = os.fork()
        if guard == 0:
            os.close(our_end)
            os._exit(guard_main(command, environment, lifeline))
        os.close(lifeline)
        code = None
        while code is None:
            for number in wait_for(signals):
                if number in PASSED_ON:
                    os.kill(guard, number)
            code = reap(guard)
        os.close(our_end)
        # Only a guard that was itself killed leaves anything to do here.
        end_tree(signals)
    return code


def guard_main(command: list[str], environment: dict[str, str], lifeline: int) -> int:
    try:
        # Away from the terminal's process group: Ctrl-C comes through run.py, once.
        os.setsid()
        adopt_orphans()
        with wake_ups() as signals:
            defaults = [signal.SIGPIPE, signal.SIGXFSZ]  # Python ignores these and children would inherit that
            leader = os.posix_spawnp(command[0], command, environment, setpgroup=0, setsigdef=defaults)
            code = watch(leader, signals, lifeline)
            end_tree(signals)
        return code
    except FileNotFoundError:
        say(f"{command[0]} is missing. Remove .venv and run again")
        return 127
    except BaseException:  # noqa: BLE001  (a fork must never return into its parent's code)
        traceback.print_exc()
        return 70


def watch(leader: int, signals: int, lifeline: int) -> int:
    sources, deadline, interrupts = [signals, lifeline], None, 0
    while True:
        code = reap(leader)
        if code is not None:
            return code
        if deadline is not None and time.monotonic() > deadline:
            os.killpg(leader, signal.SIGKILL)
        for number in wait_for(*sources, timeout=None if deadline is None else 0.1):
            if number in PASSED_ON:
                # The whole group, as a terminal and systemd do: the workers of pytest-xdist stop only when told.
                os.killpg(leader, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            if number == signal.SIGINT:
                interrupts += 1  # one may be meant for a debugger, two are meant
            elif number in PASSED_ON:
                sources = [signals]  # a cut lifeline stays readable, and once told is enough
            if deadline is None and (number in PASSED_ON[1:] or interrupts > 1):
                deadline = time.monotonic() + GRACE_SECONDS


def end_tree(signals: int) -> None:
    """Ends every descendant of this process: asks first, and insists after the grace."""
    asked: set[int] = set()
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        reap()
        remaining = descendants()
        if not remaining:
            return
        late = time.monotonic() > deadline
        for pid in remaining if late else remaining - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked |= remaining
        wait_for(signals, timeout=0.05)


def descendants() -> set[int]:
    """Every process below this one. Empty where there is no /proc: there only the command itself is ended."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may itself hold spaces and parentheses, so split behind the last one.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    unseen = [os.getpid()]
    while unseen:
        below = children.get(unseen.pop(), [])
        unseen += below
        found.update(below)
    return found


def reap(wanted: int = -1) -> int | None:
    """Collects whoever has ended, and returns the exit code of the wanted one once it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        while pid:
            if pid == wanted:
                code = os.waitstatus_to_exitcode(status)
            pid, status = os.waitpid(-1, os.WNOHANG)
    # As a shell puts it: 128 plus the signal that ended it.
    return code if code is None or code >= 0 else 128 - code


def adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def wake_ups() -> Iterator[int]:
    """A file descriptor that yields the number of every signal that arrives, so that none is lost in a race.

    A signal for a guard that has no pipe of its own yet lands in run.py's, which passes it on.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A signal that is ignored on entry (nohup, a background job) stays ignored.
    heard = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in [signal.SIGCHLD, *heard]}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(reader)
        os.close(writer)


def wait_for(signals: int, lifeline: int | None = None, *, timeout: float | None = None) -> list[int]:
    """The signals that arrived; a cut lifeline counts as SIGTERM."""
    sources = [signals] if lifeline is None else [signals, lifeline]
    ready, _, _ = select.select(sources, [], [], timeout)
    numbers = list(os.read(signals, 512)) if signals in ready else []
    if lifeline in ready:
        numbers.append(signal.SIGTERM)
    return numbers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
