"""What a SQL store adds to the contract of journals: statements, lives, orphans, data keys and quotas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import Engine, text

from flask_idempotency.engine.capabilities import DataKey
from flask_idempotency.engine.errors import CorruptRecord, DataKeyMissing
from flask_idempotency.engine.journal import Entry, JournalWrite, StepState
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ERASED, Grant, OnExpiry, OverQuota, SealedBy, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store
from flask_idempotency.stores.sql.journals import parameters_of
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract import JournalsContract
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, found, granted
from tests.backends import BACKENDS
from tests.sql_backends import maria_database, sql_databases, sql_stores
from tests.stores.sql.conftest import OpenStore, on_postgresql
from tests.stores.sql.counting import sent
from tests.tooling.processes import eventually

__all__ = ["maria_database", "sql_databases", "sql_stores"]
BEGUN, FINISHED = StepState.BEGUN, StepState.FINISHED
RESULT = StoredPayload(b"result", 0, success=True, byte_size=100)
SEALED = replace(RESULT, sealed_by=SealedBy("main", 1))


class TestContract(JournalsContract):
    """Every way in which a SQL store sends its statements keeps the shipped contract."""

    @pytest.fixture(
        params=(
            "sqlite",
            "sqlite-core",
            "postgres-insert",
            "postgres-core",
            "pgbouncer-insert",
            "postgres-serializable",
            "mariadb-insert",
        )
    )
    def store(
        self, request: pytest.FixtureRequest, clock: FrozenClock, sql_databases: object, sql_stores: object
    ) -> Iterator[Store]:
        with ExitStack() as ends:
            yield BACKENDS[request.param](request, ends)(clock)


def a_step(name: str = "charge", *, state: StepState = FINISHED, payload: StoredPayload | None = RESULT) -> Entry:
    kept = payload if state is FINISHED else None
    return Entry(name.encode().ljust(12), name, "plain", state, in_line=True, payload=kept)


def claimed(store: SqlStore, key: StorageKey, quota: Quota | None = None) -> Grant:
    request = a_request(key, on_expiry=OnExpiry.TAKEOVER)
    return granted(store.claim(request, token=a_token(), lease=LEASE, quota=quota))


def wrote(store: SqlStore, key: StorageKey, grant: Grant, number: int, *enter: Entry, **more: Any) -> None:
    writing = JournalWrite(number, enter, **{"steps": 1, **more})
    store.journals.write(key, grant.token, fence=grant.fence, writing=writing, lease=LEASE)


def names(store: SqlStore, key: StorageKey) -> list[str]:
    return [entry.name for entry in store.journals.read(key).entries]


def rows(store: SqlStore) -> int:
    with store.database.engine.connect() as connection:
        return int(connection.scalar(text("SELECT count(*) FROM idempotency_steps")) or 0)


def execute(store: SqlStore, statement: str) -> None:
    with store.database.engine.connect() as connection:
        connection.execute(text(statement))


@on_postgresql
@pytest.mark.parametrize("entries", (1, 2, 3))
def test_a_write_is_one_statement(open_store: OpenStore, entries: int) -> None:
    store, key = open_store(), a_key()
    grant = claimed(store, key)

    with sent(store) as statements:
        wrote(store, key, grant, 1, *(a_step(f"step-{number}") for number in range(entries)))

    assert ["WITH held"] == statements


def test_a_write_of_many_steps_enters_all_in_order(open_store: OpenStore) -> None:
    store, key = open_store(), a_key()
    steps = [f"step-{number}" for number in (9, 5, 7, 1, 3)]

    wrote(store, key, claimed(store, key), 1, *map(a_step, steps))

    assert steps == names(store, key)


def test_a_step_that_finishes_keeps_its_place(open_store: OpenStore, clock: FrozenClock) -> None:
    store, key = open_store(clock=clock), a_key()
    grant = claimed(store, key)
    for number, name in enumerate(("charge", "mail"), 1):
        wrote(store, key, grant, number, a_step(name, state=BEGUN))
    began = [entry.began_at for entry in store.journals.read(key).entries]
    clock.advance(1)

    wrote(store, key, grant, 3, a_step("charge"))

    entries = store.journals.read(key).entries
    assert (["charge", "mail"], began) == (names(store, key), [entry.began_at for entry in entries])


def test_steps_of_a_later_attempt_come_last(open_store: OpenStore) -> None:
    """Also if all began in the same microsecond: numbers of writes begin at 1 again."""
    store, key = open_store(), a_key()
    first = claimed(store, key)
    for number in range(1, 4):
        wrote(store, key, first, number, a_step(f"first-{number}"))
    store.release(key, first.token)
    wrote(store, key, claimed(store, key), 1, a_step("second"))

    assert ["first-1", "first-2", "first-3", "second"] == names(store, key)


def test_a_release_without_steps_is_one_statement(open_store: OpenStore) -> None:
    """An endpoint without steps does not pay for those that have some."""
    store, key = open_store(), a_key()
    grant = claimed(store, key)

    with sent(store) as statements:
        store.release(key, grant.token)
        store.release(key, grant.token)

    assert [
        "UPDATE idempotency_records",
        "UPDATE idempotency_records",
        "SELECT idempotency_records.state,",
    ] == statements


def test_a_completion_leaves_no_row(open_store: OpenStore) -> None:
    store, key = open_store(), a_key()
    grant = claimed(store, key)
    wrote(store, key, grant, 1, a_step())

    store.journals.complete(key, grant.token, PAYLOAD, keep=KEEP)

    assert 0 == rows(store)


def test_rows_of_another_life_are_not_read_and_swept(open_store: OpenStore, clock: FrozenClock) -> None:
    """A late write may enter a step while another worker completes the request."""
    store, key, other = open_store(), a_key(), a_key()
    for each in (key, other):
        wrote(store, each, claimed(store, each), 1, a_step())
    execute(store, "UPDATE idempotency_steps SET requested_at = requested_at - 1")
    wrote(store, key, replace_grant(store, key), 2, a_step("ship"))

    assert (["ship"], []) == (names(store, key), names(store, other))
    swept = store.journals.sweep(limit=9)
    assert (2, None) == (swept.removed, swept.after)
    assert (1, ["ship"]) == (rows(store), names(store, key))


def replace_grant(store: SqlStore, key: StorageKey) -> Grant:
    record = found(store, key)
    return Grant(record.token, record.fence, record.attempt, LEASE)


def test_a_finished_step_of_another_life_is_replaced(open_store: OpenStore) -> None:
    store, key = open_store(), a_key()
    grant = claimed(store, key)
    wrote(store, key, grant, 1, a_step())
    execute(store, "UPDATE idempotency_steps SET requested_at = requested_at - 1")

    wrote(store, key, grant, 2, a_step(state=BEGUN), in_doubt=True)

    (entry,) = store.journals.read(key).entries
    assert (BEGUN, None, None) == (entry.state, entry.payload, entry.finished_at)


def test_a_sweep_goes_on_where_the_last_one_ended(open_store: OpenStore) -> None:
    store, keys = open_store(), [a_key() for _ in range(5)]
    for key in keys:
        wrote(store, key, claimed(store, key), 1, a_step())
    execute(store, "UPDATE idempotency_records SET requested_at = requested_at + 1")

    after: bytes | None = b""
    removed = []
    while after is not None:
        swept = store.journals.sweep(after=after, limit=2)
        removed.append(swept.removed)
        after = swept.after

    assert ([2, 2, 1], 0) == (removed, rows(store))


def writing_of(grant: Grant, writing: JournalWrite) -> dict[str, Any]:
    return {"fence": grant.fence, "writing": writing, "lease": LEASE}


@on_postgresql
def test_a_removal_sees_a_step_that_was_entered_while_it_waited(open_store: OpenStore, engine: Engine) -> None:
    """A copy of the begin holds the record. The withdrawal waits for it, and then must find the step."""
    store, key = open_store(), a_key()
    grant = claimed(store, key)
    begin, withdrawal = JournalWrite(1, [a_step(state=BEGUN)], steps=1), JournalWrite(2, withdraw=[a_step().id])
    parameters = parameters_of(key, grant.token, fence=grant.fence, writing=begin, lease=LEASE, now=None)
    thread = Thread(target=store.journals.write, args=(key, grant.token), kwargs=writing_of(grant, withdrawal))
    with engine.connect() as connection:
        assert store.journals.write_on(connection, parameters, begin)
        thread.start()
        eventually(lambda: is_waiting(store))
        connection.commit()
    thread.join()

    assert [] == names(store, key)


def is_waiting(store: SqlStore) -> bool:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with store.database.engine.connect() as connection:
        return bool(connection.scalar(text(waiting)))


class TestDataKeys:
    """A result is stored only while the key that opens it exists."""

    def sealing(self, store: SqlStore) -> tuple[StorageKey, Grant]:
        key = a_key()
        keys = store.data_keys.read_keys(key.tid)
        assert store.data_keys.add(key.tid, DataKey(1, "main", b"wrapped"), store=keys.store, after=keys.last)
        return key, claimed(store, key)

    @pytest.mark.parametrize("several", (False, True))
    def test_a_sealed_result_is_kept(self, open_store: OpenStore, several: bool) -> None:
        store = open_store()
        key, grant = self.sealing(store)
        more = [a_step(f"step-{number}") for number in range(4 if several else 0)]

        wrote(store, key, grant, 1, a_step(payload=SEALED), *more)

        assert SEALED == store.journals.read(key).entries[0].payload
        assert {"main": 1, **({"": 4} if several else {})} == store.journals.count()

    @pytest.mark.parametrize("several", (False, True))
    @pytest.mark.parametrize("erased", (False, True))
    def test_without_its_key_nothing_changes(self, open_store: OpenStore, erased: bool, several: bool) -> None:
        store = open_store()
        key, grant = self.sealing(store)
        if erased:
            store.data_keys.shred(key.tid)
        else:
            store.data_keys.disable(key.tid, 1)
        before = found(store, key)
        more = [a_step(f"step-{number}") for number in range(4 if several else 0)]

        with pytest.raises(DataKeyMissing) as missing:
            wrote(store, key, grant, 1, a_step(payload=SEALED), *more)

        assert (erased, before, []) == (missing.value.erased, found(store, key), names(store, key))
        wrote(store, key, grant, 1, a_step(payload=replace(RESULT, data=b"", sealed_by=ERASED)))
        assert erased == store.journals.read(key).erased

    def test_a_shredded_result_is_erased(self, open_store: OpenStore) -> None:
        store = open_store()
        key, grant = self.sealing(store)
        wrote(store, key, grant, 1, a_step(payload=SEALED))
        assert not store.journals.recall(key, grant.token, fence=grant.fence).erased

        store.data_keys.shred(key.tid)

        assert store.journals.recall(key, grant.token, fence=grant.fence).erased
        (answer,) = store.journals.walk(limit=9, tid=key.tid).answers
        assert answer.erased

    def test_a_replacement_needs_its_key(self, open_store: OpenStore) -> None:
        store = open_store()
        key, grant = self.sealing(store)
        wrote(store, key, grant, 1, a_step())
        assert store.journals.replace(key, a_step().id, RESULT, SEALED)

        with pytest.raises(DataKeyMissing):
            store.journals.replace(key, a_step().id, SEALED, replace(SEALED, sealed_by=SealedBy("main", 2)))

        assert ([], 1) == (
            list(store.journals.walk(limit=9, tid=key.tid, other_than="main").answers),
            len(store.journals.walk(limit=9, tid=key.tid, other_than="next").answers),
        )


def test_bytes_in_journals_count_until_the_completion(open_store: OpenStore) -> None:
    store, key, quota = open_store(), a_key(), Quota(bytes=100)
    grant = claimed(store, key, quota)
    wrote(store, key, grant, 1, a_step())

    assert 100 == store.ledger.usage(key.tid).bytes
    another = a_request(a_key(tid=key.tid), on_expiry=OnExpiry.TAKEOVER)
    assert isinstance(store.claim(another, token=a_token(), lease=LEASE, quota=quota), OverQuota)
    store.journals.complete(key, grant.token, PAYLOAD, keep=KEEP)
    assert PAYLOAD.byte_size == store.ledger.usage(key.tid).bytes


def test_journals_of_records_that_do_not_count_are_free(open_store: OpenStore) -> None:
    """While secrets rotate, a claim has a second record, and its tenant pays for one."""
    store, key = open_store(), a_key()
    wrote(store, key, claimed(store, key), 1, a_step())

    assert 0 == store.ledger.usage(key.tid).bytes


@pytest.mark.parametrize("damage", ("took = -1", "name = name, finished_at = NULL", "data_key_number = 1"))
def test_a_damaged_step_is_corrupt(open_store: OpenStore, damage: str) -> None:
    store, key = open_store(), a_key()
    wrote(store, key, claimed(store, key), 1, a_step())
    execute(store, f"UPDATE idempotency_steps SET {damage}")  # noqa: S608 - our own words

    with pytest.raises(CorruptRecord):
        store.journals.read(key)
    assert () == store.journals.walk(limit=9).answers
