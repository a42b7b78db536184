"""The PgBouncer that tests start for themselves, and what its clients see of the server behind it."""

from __future__ import annotations

import select
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from tests.lab import pgbouncer as poolers
from tests.lab.pgbouncer import PgBouncer, StartPgBouncer, require_pgbouncer
from tests.lab.postgres import PostgresServer, StartPostgres
from tests.tooling.processes import gone


def backends(bouncer: PgBouncer) -> list[object]:
    """Which server connection each of two clients finds behind the pooler, both of them connected throughout."""
    address = bouncer.conninfo("postgres")
    with psycopg.connect(address, autocommit=True) as one, psycopg.connect(address, autocommit=True) as other:
        found = [client.execute("SELECT pg_backend_pid()").fetchone() for client in (one, other)]
    return [row[0] for row in found if row]


def test_two_clients_share_a_server_connection(
    start_pgbouncer: StartPgBouncer, postgres_server: PostgresServer
) -> None:
    """Transaction pooling: whoever has committed has no claim to the connection, so session state leaks or is lost."""
    one, other = backends(start_pgbouncer(postgres_server, pool_size=1))

    assert one == other


def test_session_pooling_gives_each_client_its_own(
    start_pgbouncer: StartPgBouncer, postgres_server: PostgresServer
) -> None:
    """The mode is the one asked for, which shows that the other test sees pooling and not chance."""
    one, other = backends(start_pgbouncer(postgres_server, pool_mode="session"))

    assert one != other


def test_the_address_behind_a_bouncer_is_one_for_sqlalchemy(pgbouncer_url: str) -> None:
    """A database that was made a moment ago is reached through the pooler, whose databases nobody has to list."""
    engine = sa.create_engine(pgbouncer_url)

    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()


def test_a_client_that_waits_is_served_once_the_server_is_back(
    start_pgbouncer: StartPgBouncer, start_postgres: StartPostgres
) -> None:
    """To a client of a pooler, a server that is gone looks like a silent one: it hears nothing, not even a refusal."""
    server = start_postgres()
    bouncer = start_pgbouncer(server)
    with psycopg.connect(bouncer.conninfo("postgres"), autocommit=True) as client:
        server.kill()
        client.pgconn.send_query(b"SELECT 42")
        early, _, _ = select.select([client.fileno()], [], [], 0.1)
        server.restart()
        answer = client.pgconn.get_result()
        assert client.pgconn.get_result() is None

    assert (early, answer and answer.get_value(0, 0)) == ([], b"42")


def test_nothing_is_left_of_a_stopped_bouncer(start_pgbouncer: StartPgBouncer, postgres_server: PostgresServer) -> None:
    """Neither a process nor a folder."""
    bouncer = start_pgbouncer(postgres_server)

    bouncer.stop()

    assert (gone(bouncer.pid), bouncer.folder.exists()) == (True, False)


def test_a_missing_bouncer_fails_where_everything_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a laptop may lack, CI may not."""
    monkeypatch.setenv("CI", "1")
    monkeypatch.setattr(poolers, "PROGRAM", Path("/nowhere/pgbouncer"))

    with pytest.raises(pytest.fail.Exception, match="missing service: PgBouncer"):
        require_pgbouncer()
