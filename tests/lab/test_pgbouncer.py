"""The PgBouncer that tests start for themselves, and what its clients see of the server behind it."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from tests.lab import pgbouncer as poolers
from tests.lab.pgbouncer import PgBouncer, StartPgBouncer, require_pgbouncer
from tests.lab.postgres import PostgresServer
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
