"""The PgBouncer that tests start for themselves, and what its clients see of the server behind it."""

from __future__ import annotations

import psycopg

from tests.lab.pgbouncer import PgBouncer, StartPgBouncer
from tests.lab.postgres import PostgresServer


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
