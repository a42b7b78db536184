#!/usr/bin/env python3
"""The commands of this project. They need Python 3.11 and pip (or ensurepip): no make, no root, no activated environment.

    python3 run.py demo [--exit] [--port N]   the example payments service, with a tour
    python3 run.py test                       the core tests, on all processors
    python3 run.py test --all                 every stage of the tests that CI and releases run
    python3 run.py test pytest arguments      the tests that these choose
    python3 run.py check                      lint, format, types, the direction of imports, luacheck, lines of each room
    python3 run.py docs [linkcheck]           the documentation site, into build/docs
    python3 run.py bench [arguments]          the benchmarks
    python3 run.py walk [stores] [--markdown] the functions of this package that one request crosses, in call order
    python3 run.py weight                     how heavy the package is: lines, imports, repetitions
    python3 run.py mutants [names] [--since C] faults seeded in the code; a named test must notice each
    python3 run.py lock                       write requirements/*.txt from the pins in requirements.txt
    python3 run.py setup                      only prepare .venv, for every command

A command makes .venv and installs the packages that it needs: demo those in requirements/demo.txt,
test, bench, walk and mutants those in requirements/test.txt, bench those in requirements/bench.txt too,
the others all of requirements.txt.

Set FLASK_VERSION=3.0.3 to run demo, test, bench, walk or mutants on that Flask,
SQLALCHEMY_VERSION=2.0.58 for that SQLAlchemy, MARSHMALLOW_VERSION=3.20.2 for that marshmallow.
"""

import sys

# Old Pythons parse the whole file before they reach this, so keep syntax that Python 3.6 knows.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("run.py needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Try: python3.11 run.py")

import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "made-by-run.py"
TYPED = (
    "flask_idempotency",
    "janitor",
    "example_app",
    "benchmarks",
    "tests",
    "docs",
    "requirements",
    "run.py",
    "setup.py",
)
# Each of these becomes the process of run.py, so signals, the terminal and the exit code are its own.
MODULES = {"demo": "example_app.demo", "test": "tests", "bench": "benchmarks", "walk": "benchmarks.walk"}
MODULES.update(
    {"mutants": "tests.mutants", "weight": "tests.tooling.weight", "lock": "requirements.lock", "docs": "docs"}
)
# The variables that name another version of a package than the pinned one.
OTHER_VERSIONS = {"FLASK_VERSION": "Flask", "SQLALCHEMY_VERSION": "SQLAlchemy", "MARSHMALLOW_VERSION": "marshmallow"}
# Raise this number to make every .venv again.
SCHEME = 1


def main(arguments: list[str]) -> int:
    os.chdir(ROOT)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    takes_no_arguments = ("check", "setup", "lock")
    if command not in (*MODULES, *takes_no_arguments) or (rest and command in takes_no_arguments):
        sys.stderr.write(__doc__ or "")
        return 0 if command in ("help", "-h", "--help") else 2
    prepare(needed_by(command))
    if command == "setup":
        return 0
    if command == "check":
        return check()
    return os.execve(PYTHON, [str(PYTHON), "-m", MODULES[command], *rest], environment())  # noqa: S606


def say(message: str) -> None:
    # Not on stdout, which belongs to the command.
    print(f"run.py: {message}", file=sys.stderr, flush=True)


def check() -> int:
    """Run all checks side by side, print the output of each in one piece, and fail if one failed."""
    checks = {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        # A stale cache has reported a break that was not there.
        "lint-imports": ["lint-imports", "--no-logo", "--no-cache"],
        "luacheck": ["python", "-m", "tests.lint_lua"],
        "weight": ["python", "-m", "tests.tooling.weight", "--check"],
        # The last to end: without its cache it takes ten times as long as the others together.
        "mypy": ["mypy", *filter(os.path.exists, TYPED)],
    }
    failed = []
    with ThreadPoolExecutor(len(checks)) as threads:
        started = {name: threads.submit(finished, *command) for name, command in checks.items()}
        for name, process in started.items():
            print(f"--- {name}\n{process.result().stdout}", end="", flush=True)
            if process.result().returncode:
                failed.append(name)
    print(f"--- failed: {', '.join(failed)}" if failed else "--- all checks passed")
    return 1 if failed else 0


def finished(tool: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a tool of .venv, and return it with all that it wrote."""
    command = [str(VENV / "bin" / tool), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def needed_by(command: str) -> list[Path]:
    """Return the files of pins that a command needs."""
    if command in ("check", "setup", "lock", "docs", "weight"):
        return [ROOT / "requirements.txt"]
    names = ["demo"]
    if command != "demo" or any(map(os.environ.get, OTHER_VERSIONS)):
        # Another version of a package may depend on packages that the pinned one does not need.
        names = ["test", "bench"] if command == "bench" else ["test"]
    elif os.environ.get("DATABASE_URL", "").startswith("postgres"):
        names = ["demo", "postgresql"]
    return [ROOT / "requirements" / f"{name}.txt" for name in names]


def prepare(files: list[Path]) -> None:
    """Make .venv, or add to it the packages that these files pin. Many processes may do this at the same time."""
    lines = [line.partition("#")[0].strip() for file in files for line in file.read_text().splitlines()]
    wanted = {re.split(r"[\[=]", line)[0].lower(): line for line in lines if "==" in line}
    if installed(wanted):
        return
    with locked() as lock:
        if installed(wanted):
            return
        say(f"installing {len(set(wanted.values()) - set(stamp()))} packages into .venv")
        pins = {re.split(r"[\[=]", line)[0].lower(): line for line in stamp()[1:]}
        if not stamp():
            # Another interpreter made it, or a run was killed while it installed. Some files may be missing.
            shutil.rmtree(VENV, ignore_errors=True)
            download, disk = (20, 100) if files[0].name == "demo.txt" else (100, 420)
            say(f"this happens once; about {download} MB to download and {disk} MB on disk")
            venv.EnvBuilder(symlinks=True).create(VENV)
        STAMP.unlink(missing_ok=True)
        install(lock, *(word for file in files for word in ("--requirement", str(file))))
        next(VENV.glob("lib/python*/site-packages")).joinpath("checkout.pth").write_text(f"{ROOT}\n")
        unfinished = STAMP.with_suffix(".unfinished")
        unfinished.write_text("\n".join([interpreter(), *sorted({**pins, **wanted}.values())]))
        unfinished.replace(STAMP)


def installed(wanted: dict[str, str]) -> bool:
    return bool(stamp()) and set(wanted.values()) <= set(stamp())


def stamp() -> list[str]:
    """Return the interpreter of .venv and the pins installed in it. Empty if this interpreter cannot use it."""
    lines = STAMP.read_text().splitlines() if PYTHON.exists() and STAMP.exists() else []
    return lines if lines[:1] == [interpreter()] else []


def interpreter() -> str:
    # With the path, because scripts in a .venv name their interpreter by its full path.
    version = f"{platform.python_implementation()} {sys.version_info[0]}.{sys.version_info[1]} {platform.machine()}"
    return f"{SCHEME} {version} {ROOT}"


@contextlib.contextmanager
def locked() -> Iterator[int]:
    with (ROOT / ".venv.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is preparing .venv, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def install(lock: int, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(PYTHON)]
    # pip before 22.3 has no --python.
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
        if importlib.util.find_spec("ensurepip") is None:
            sys.exit(
                f"run.py: {sys.executable} has neither pip 22.3 nor ensurepip. "
                "Install one, for instance with: apt install python3-pip (or python3-venv)"
            )
        subprocess.run([str(PYTHON), "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)
        pip = [str(PYTHON), "-m", "pip"]
    # Python compiles a module when it first imports it, and most are never imported.
    options = ["-qq", "--disable-pip-version-check", "--no-compile", "--only-binary", ":all:"]
    # pip inherits the lock: if run.py is killed, the next run waits until this pip has ended.
    if subprocess.run([*pip, "install", *options, *arguments], pass_fds=[lock], check=False).returncode:
        sys.exit(
            "run.py: pip could not install the packages, its message is above. This needs the network, "
            "or PIP_INDEX_URL or PIP_FIND_LINKS pointing to copies of the packages. Run it again when that is mended"
        )


def environment() -> dict[str, str]:
    """Return the environment of a command, with the versions that it names in front of the pinned ones."""
    found = dict(os.environ)
    # Without bytecode, each process compiles this whole package, and each worker rewrites the assertions of 360 files.
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    for variable, package in OTHER_VERSIONS.items():
        version = os.environ.get(variable)
        if not version:
            continue
        if not re.fullmatch(r"\d+(\.\d+)+", version):
            sys.exit(f"run.py: {variable}={version!r} is not a version such as 3.0.3")
        folder = ROOT / ".compat" / f"{package.lower()}-{version}"
        with locked() as lock:
            if not folder.exists():
                unfinished = folder.with_suffix(".unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                # Alone: every package that it depends on comes from the pins.
                install(lock, "--no-deps", "--target", str(unfinished), f"{package}=={version}")
                unfinished.replace(folder)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), found.get("PYTHONPATH")]))
    return found


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
