"""On three nodes of Galera: what two of them grant at once, what a node does not know yet, and a node that is cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pymysql
import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import Session

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.model import Grant, InFlight, OverQuota, Record
from flask_idempotency.engine.outbox import Message, OutboxNames, StoredMessage, Topics
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.sql import errors, mysql
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.driver import DriverConnection
from flask_idempotency.stores.sql.outbox import OutboxTable
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted
from tests.lab.galera import NODES, Balancer, GaleraCluster, GaleraNode
from tests.sql_backends import make_tables
from tests.tooling.processes import eventually

pytestmark = pytest.mark.slow

SHORTEST = 0.001
CONFLICT = 1213
CLIENTS = 3
KEYS = 40


@pytest.fixture
def name(galera: GaleraCluster) -> Iterator[str]:
    with galera.database() as name:
        make_tables(galera.nodes[0].url(name))
        yield name


@pytest.fixture
def open_at(name: str) -> Iterator[Callable[..., SqlStore]]:
    """Opens stores whose connections lead to this node."""
    with ExitStack() as stores:

        def open_one(node: GaleraNode | Balancer, *, driver_cursor: bool = True) -> SqlStore:
            store = SqlStore(Database(node.url(name), driver_cursor=driver_cursor))
            stores.callback(store.close)
            return store

        yield open_one


@pytest.fixture
def stores(galera: GaleraCluster, open_at: Callable[[GaleraNode | Balancer], SqlStore]) -> list[SqlStore]:
    """One store for each node."""
    found = [open_at(node) for node in galera.nodes]
    for store in found:
        granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    return found


def before_commit(database: Database, work: Callable[[], object]) -> list[int]:
    """Do this before the first COMMIT of a record's connection. Return what will hold the numbers of the errors."""
    done: list[bool] = []
    met: list[int] = []

    @event.listens_for(database.engine, "before_cursor_execute")
    def in_between(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement == "COMMIT" and not done:
            done.append(True)
            work()

    @event.listens_for(database.engine, "handle_error")
    def note(context: Any) -> None:
        met.append(errors.mysql_code(context.sqlalchemy_exception))

    return met


def test_of_two_nodes_that_grant_a_key_one_is_refused_at_its_commit_and_looks_again(stores: list[SqlStore]) -> None:
    here, there, _ = stores
    key, grants = a_key(), list[object]()
    met = before_commit(here.database, lambda: grants.append(there.claim(a_request(key), token=a_token(), lease=LEASE)))

    outcome = here.claim(a_request(key), token=a_token(), lease=LEASE)

    assert [CONFLICT] == met
    assert isinstance(grants[0], Grant)
    assert isinstance(outcome, InFlight)


def test_a_commit_that_is_refused_on_the_drivers_own_cursor_is_decided_again(
    stores: list[SqlStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above. A listener to statements, as there, lets them go through SQLAlchemy's `Connection`."""
    here, there, _ = stores
    key, grants, refused = a_key(), list[object](), list[int]()
    send = DriverConnection.command

    def command(connection: DriverConnection, sql: str) -> None:
        if sql == "COMMIT" and not grants:
            # Its own COMMIT is not refused.
            grants.append(here)
            grants.append(there.claim(a_request(key), token=a_token(), lease=LEASE))
        try:
            send(connection, sql)
        except DBAPIError as error:
            refused.append(errors.mysql_code(error))
            raise

    monkeypatch.setattr(DriverConnection, "command", command)

    assert isinstance(here.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)
    assert isinstance(grants[1], Grant)
    assert [CONFLICT] == refused


def test_two_nodes_never_give_one_fence_to_two_claims(stores: list[SqlStore]) -> None:
    """Both read the same last fence. The one that commits second gets a higher number than the first."""
    here, there, _ = stores
    grants = list[Grant]()
    met = before_commit(
        here.database, lambda: grants.append(granted(there.claim(a_request(a_key()), token=a_token(), lease=LEASE)))
    )

    mine = granted(here.claim(a_request(a_key()), token=a_token(), lease=LEASE))

    assert [CONFLICT] == met
    assert mine.fence > grants[0].fence


def test_a_limit_is_exact_although_two_nodes_count_at_once(stores: list[SqlStore]) -> None:
    """Both have room for one more key. The fence is a row of both, so the second one counts again."""
    here, there, _ = stores
    tenant, limit, grants = bytes(16), Quota(records=1), list[object]()
    one, other = (replace(a_key(), tid=tenant) for _ in range(2))
    met = before_commit(
        here.database,
        lambda: grants.append(there.claim(a_request(one), token=a_token(), lease=LEASE, quota=limit)),
    )

    refused = here.claim(a_request(other), token=a_token(), lease=LEASE, quota=limit)

    assert [CONFLICT] == met
    assert isinstance(grants[0], Grant)
    assert isinstance(refused, OverQuota)


def test_two_relays_on_two_nodes_never_hold_messages_of_one_key(galera: GaleraCluster, name: str) -> None:
    """Their lock is one of a node. Both choose the same first message, and one of them is refused at its commit."""
    with ExitStack() as ends:
        here, there = (
            OutboxTable(Database(node.url(name)), OutboxNames("shop", lambda text: sha256(text).digest()))
            for node in galera.nodes[:2]
        )
        ends.callback(here.close)
        ends.callback(there.close)
        here.upgrade()
        with Session(here._database.base) as session:
            for body in (b"1", b"2"):
                message = Message(body.hex(), "orders", body, key="a")
                connection = here.connection_of(session, here._database.base)
                here.publish(connection, message, delay=0, tenant_id=None, sealed=body, sealed_by=None)
            session.commit()
        first = list[Sequence[StoredMessage]]()
        met = before_commit(
            here._database, lambda: first.append(there.claim(b"t" * 16, topics=Topics("*"), limit=1, hold=LEASE))
        )

        second = here.claim(b"h" * 16, topics=Topics("*"), limit=9, hold=LEASE)

    assert [CONFLICT] == met
    assert ([b"1"], []) == ([each.message.body for each in first[0]], second)


def test_many_claims_on_all_nodes_are_granted_each_with_a_fence_of_its_own(stores: list[SqlStore]) -> None:
    """Each conflicts with those of the other nodes, and no client hears of it."""

    def claim(store: SqlStore) -> list[int]:
        return [granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE)).fence for _ in range(KEYS)]

    with ThreadPoolExecutor(NODES * CLIENTS) as clients:
        fences = [fence for found in clients.map(claim, stores * CLIENTS) for fence in found]

    assert NODES * CLIENTS * KEYS == len(set(fences))


def test_a_node_that_lags_waits_before_it_says_that_a_key_is_free(
    galera: GaleraCluster, stores: list[SqlStore]
) -> None:
    key, token = a_key(), a_token()
    behind = galera.nodes[1]
    held = pymysql.connect(host="127.0.0.1", port=behind.port, user="root")
    # It applies nothing of the others until this lock is gone.
    held.cursor().execute("FLUSH TABLES WITH READ LOCK")
    granted(stores[0].claim(a_request(key), token=token, lease=LEASE))
    stores[0].complete(key, token, PAYLOAD, keep=KEEP)
    read = list[Record | None]()
    reader = threading.Thread(target=lambda: read.append(stores[1].read(key)))
    reader.start()
    # It waits for its turn, or has answered.
    assert eventually(lambda: bool(read) or behind.waits())
    held.close()
    reader.join()

    assert [PAYLOAD] == [record and record.payload for record in read]


def test_a_commit_that_is_under_way_on_another_node_fails_once_its_outcome_was_asked_for(
    galera: GaleraCluster, name: str, stores: list[SqlStore]
) -> None:
    """
    A worker that lost its node asks the next one, which has no lock to wait for. What it answers must stay true.
    """
    key, token = a_key(), a_token()
    granted(stores[0].claim(a_request(key), token=token, lease=LEASE))
    with pymysql.connect(host="127.0.0.1", port=galera.nodes[0].port, user="root", database=name) as view:
        view.cursor().execute("UPDATE idempotency_records SET reason = 'marked' WHERE record_id = %s", (key.rid,))
        # As `final_record` does.
        stores[1].renew(key, token, lease=SHORTEST, later=1)
        found = stores[1].read(key)
        with pytest.raises(pymysql.OperationalError) as refused:
            view.commit()

    assert found is not None
    assert ("", CONFLICT) == (found.reason, refused.value.args[0])


def test_a_node_outside_the_majority_refuses_and_the_others_go_on(
    galera: GaleraCluster, stores: list[SqlStore]
) -> None:
    known, token = a_key(), a_token()
    granted(stores[1].claim(a_request(known), token=token, lease=LEASE))
    galera.nodes[1].isolate()

    for work in (
        lambda: stores[1].claim(a_request(a_key()), token=a_token(), lease=LEASE),
        lambda: stores[1].claim(a_request(known), token=token, lease=LEASE),
        lambda: stores[1].complete(known, token, PAYLOAD, keep=KEEP),
        lambda: stores[1].read(known),
        lambda: stores[1].ledger.usage(known.tid),
    ):
        with pytest.raises(StoreUnavailable, match="this node of the Galera cluster is not in its majority"):
            work()
    assert isinstance(stores[0].claim(a_request(known), token=a_token(), lease=LEASE), InFlight)
    granted(stores[2].claim(a_request(a_key()), token=a_token(), lease=LEASE))
    galera.mend()
    assert isinstance(stores[1].claim(a_request(known), token=a_token(), lease=LEASE), InFlight)


@pytest.mark.parametrize("driver_cursor", [True, False])
def test_a_connection_to_a_node_that_was_cut_off_is_replaced_by_one_to_the_next(
    galera: GaleraCluster, open_at: Callable[..., SqlStore], driver_cursor: bool
) -> None:
    """A balancer leaves connections open that lead to it, and they would be refused for ever."""
    with Balancer(galera.nodes) as balancer:
        balancer.turn_to(galera.nodes[1])
        store = open_at(balancer, driver_cursor=driver_cursor)
        granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
        galera.nodes[1].isolate()
        balancer.turn_to(galera.nodes[2])

        granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
        store.close()


@pytest.mark.parametrize("code", [1047, 1180])
def test_a_transaction_that_a_node_gave_up_may_be_tried_again(code: int) -> None:
    """Whether it was committed, only the record says: see `is_refusal`."""
    given = OperationalError("COMMIT", None, pymysql.OperationalError(code, ""))

    assert errors.is_retryable(given)
    assert not errors.is_refusal(given)


def test_a_connection_whose_writes_stay_on_its_node_is_refused_by_name(galera: GaleraCluster, name: str) -> None:
    store = SqlStore(Database(f"{galera.nodes[0].url(name)}?init_command=SET wsrep_on = OFF"))
    with pytest.raises(ConfigurationError, match="wsrep_on is OFF for this connection"):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    store.close()


def found_by(store: SqlStore) -> Finding:
    (found,) = (each for each in store.health.findings() if each.check == "galera")
    return found


def test_doctor_says_what_it_found(galera: GaleraCluster, name: str, stores: list[SqlStore]) -> None:
    as_it_is = found_by(stores[0])
    with pymysql.connect(host="127.0.0.1", port=galera.nodes[0].port, user="root", database=name) as connection:
        connection.cursor().execute("CREATE TABLE rows_of_mine (n INT)")
    galera.nodes[2].kill()
    assert eventually(lambda: galera.nodes[0].status("wsrep_cluster_size") == "2")
    of_two = found_by(stores[0])
    waiting = SqlStore(Database(f"{galera.nodes[0].url(name)}?init_command=SET wsrep_sync_wait = 7"))
    without_that = found_by(waiting)
    waiting.close()

    assert "a Galera cluster of 3, and its state is Synced: wsrep_sync_wait is 0 on your own" in as_it_is.text
    assert (Verdict.ADVICE, True) == (as_it_is.verdict, f"wsrep_sync_wait to {mysql.SYNC_WAIT}" in as_it_is.remedy)
    assert "a failure may leave no majority" in of_two.text
    assert "no primary key, and nodes may disagree about their rows: rows_of_mine" in of_two.text
    assert "wsrep_sync_wait" not in without_that.text
