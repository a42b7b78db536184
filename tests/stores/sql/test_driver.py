"""The driver's own cursor on the request path: it raises, rolls back and isolates as SQLAlchemy's `Connection` does."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import bindparam, delete, event, literal_column, select
from sqlalchemy.exc import DBAPIError, MultipleResultsFound, NoResultFound

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import Grant
from flask_idempotency.stores.sql.database import Database, transaction
from flask_idempotency.stores.sql.driver import DriverConnection, RecordConnection, Rows
from flask_idempotency.stores.sql.schema import meta
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import LEASE, a_key, a_request, a_token
from tests.stores.sql.conftest import MakeEngine, OpenStore, on_postgresql


def kind(connection: RecordConnection) -> type[Any]:
    return type(connection)


def test_the_request_path_uses_the_drivers_cursor(open_store: OpenStore) -> None:
    assert open_store().database.send(kind) is DriverConnection


def test_an_engine_with_a_listener_lets_it_hear_every_statement(open_store: OpenStore) -> None:
    store, heard = open_store(), []
    event.listen(store.database.engine, "before_cursor_execute", lambda *args: heard.append(args[2]))

    store.claim(a_request(a_key()), token=a_token(), lease=LEASE)

    assert any("idempotency_records" in statement for statement in heard)


def test_the_cursor_can_be_left_alone(records_url: str) -> None:
    database = Database(records_url, driver_cursor=False)

    assert database.send(kind) is not DriverConnection
    database.close()


def test_an_error_keeps_no_transaction_open(open_store: OpenStore) -> None:
    """On SQLite an open one would lock out every other writer."""
    store, other = open_store(), open_store()

    def fail(connection: RecordConnection) -> None:
        with transaction(connection):
            connection.execute(delete(meta).where(meta.c.name == literal_column("'x'")))
            raise KeyError("x")

    def fail_outside(connection: RecordConnection) -> None:
        assert isinstance(connection, DriverConnection)
        connection.command("BEGIN")
        raise KeyError("x")

    for failing in (fail, fail_outside):
        with pytest.raises(KeyError):
            store.database.send(failing)

        assert isinstance(other.claim(a_request(a_key()), token=a_token(), lease=LEASE), Grant)
        assert isinstance(store.claim(a_request(a_key()), token=a_token(), lease=LEASE), Grant)


def test_an_error_of_the_driver_becomes_one_of_sqlalchemy_without_parameters(open_store: OpenStore) -> None:
    # On PostgreSQL a division by zero, on SQLite a function that does not exist.
    broken: Any = select(literal_column("no_such_function(1/0)").label("found"), bindparam("my_token", type_=None))

    def fail(connection: RecordConnection) -> None:
        with pytest.raises(DBAPIError) as failed:
            connection.execute(broken, {"my_token": "hidden"})
        assert "hidden" not in str(failed.value)
        assert not failed.value.connection_invalidated

    open_store().database.send(fail)


def test_an_interrupted_statement_drops_its_connection(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer may still arrive, and the next statement would read it."""
    store = open_store()
    seen: list[Any] = []

    def interrupt(connection: RecordConnection) -> None:
        assert isinstance(connection, DriverConnection)
        seen.append(connection.held.dbapi_connection)

        class Interrupted:
            def execute(self, *_: object) -> None:
                raise KeyboardInterrupt

        connection._cursor = Interrupted()
        connection.command("SELECT 1")

    with pytest.raises(KeyboardInterrupt):
        store.database.send(interrupt)

    assert store.database.send(lambda connection: connection.held.dbapi_connection) is not seen[0]  # type: ignore[union-attr]


@on_postgresql
def test_a_connection_that_the_driver_closed_is_replaced(open_store: OpenStore) -> None:
    store = open_store()
    store.database.send(lambda connection: connection.held.dbapi_connection.close())  # type: ignore[union-attr]

    assert isinstance(store.claim(a_request(a_key()), token=a_token(), lease=LEASE), Grant)


@on_postgresql
def test_the_drivers_transactions_are_read_committed(make_engine: MakeEngine, records_url: str) -> None:
    store = SqlStore(Database(make_engine(isolation_level="SERIALIZABLE")))

    def ask(connection: RecordConnection) -> str:
        with transaction(connection):
            assert isinstance(connection, DriverConnection)
            connection.command("SHOW transaction_isolation")
            return str(connection._cursor.fetchone()[0])

    assert store.database.send(ask) == "read committed"
    store.close()


@on_postgresql
def test_a_server_that_is_gone_is_unavailable(make_engine: MakeEngine, records_url: str) -> None:
    engine = make_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")

    with pytest.raises(StoreUnavailable):
        Database(engine).send(kind)


def test_rows_refuse_what_sqlalchemy_refuses() -> None:
    none, one, two = Rows(), Rows([(1,)]), Rows([(1,), (2,)])

    assert [none.one_or_none(), one.one_or_none(), one.one()] == [None, (1,), (1,)]
    assert [none.scalar_one_or_none(), one.scalar_one_or_none(), one.scalar_one()] == [None, 1, 1]
    assert two.all() == [(1,), (2,)]
    for ask in (none.one, none.scalar_one, two.one, two.scalar_one):
        with pytest.raises((NoResultFound, MultipleResultsFound)):
            ask()
    for ask_few in (two.one_or_none, two.scalar_one_or_none):
        with pytest.raises(MultipleResultsFound):
            ask_few()
