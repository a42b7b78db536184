"""Which rows the store accepts as records, and how damaged rows and strange texts are handled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import CheckConstraint, MetaData, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import DropConstraint

from flask_idempotency.engine.errors import CorruptRecord, LeaseLost
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, Record, RequestInfo, Unknown
from flask_idempotency.engine.quota import Drift, Quota
from flask_idempotency.stores import bucket_edge_ms, bucket_width_ms
from flask_idempotency.stores.sql import schema, statements
from flask_idempotency.stores.sql.claiming import Move, claim_query, voiding_of
from flask_idempotency.stores.sql.dialects import POSTGRESQL
from flask_idempotency.stores.sql.rows import escape, row_of, unescape
from flask_idempotency.stores.sql.schema import QUARANTINED, records
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)
from tests.stores.sql.conftest import MakeEngine, OpenStore, on_postgresql, on_sqlite
from tests.stores.sql.shops import Shop, paying

Spoil: TypeAlias = Callable[[StorageKey, dict[str, Any]], None]
letters = st.characters() | st.sampled_from("\0\ud800\udfff␛0d")


@given(st.text(letters))
def test_an_escaped_text_comes_back(about: str) -> None:
    """Whatever a tenant or a principal contains; and what is stored contains nothing that a database refuses."""
    stored = escape(about)

    assert about == unescape(stored)
    assert b"\0" not in stored.encode()


@given(st.text(letters), st.text(letters))
def test_no_two_texts_become_one(one: str, other: str) -> None:
    """Somebody else's name must not be written as mine."""
    assert (one == other) == (escape(one) == escape(other))


def test_an_ordinary_text_is_stored_as_it_is() -> None:
    texts = ["", "acme", "größer", "日本語 🦊", "a\tb\r\n", "%s :now {x}"]

    assert texts == [escape(text) for text in texts]


def test_a_reason_may_hold_anything(open_store: OpenStore, clock: FrozenClock) -> None:
    """As texts about the request may."""
    store, key = open_store(), a_key()
    store.quarantine(key, stand(store, clock, key, "in flight"), "lost\0\udc80␛")

    assert "lost\0\udc80␛" == found(store, key).reason


SPOILT: dict[str, tuple[Standing, dict[str, Any]]] = {
    "unknown state": ("in flight", {"state": "paused"}),
    "no state": ("in flight", {"state": ""}),
    "unknown rule": ("in flight", {"on_expiry": "forget"}),
    "short token": ("in flight", {"token": b"short"}),
    "long token": ("completed", {"token": bytes(17)}),
    "no fingerprint": ("in flight", {"fingerprint": b""}),
    "no lease": ("in flight", {"lease_expires_at": None}),
    "no lease in quarantine": ("quarantined", {"lease_expires_at": None}),
    "no expiry": ("completed", {"expires_at": None}),
    "no answer": ("completed", {"response": None}),
    "no status": ("completed", {"status": None}),
    "no size": ("completed", {"response_size": None}),
    "no end": ("completed", {"completed_at": None}),
    "over before it began": ("completed", {"expires_at": 1}),
    "begun after it is over": ("completed", {"completed_at": 1 << 62}),
    "no number of its key": ("completed", {"wrapping_key_id": "2026-11"}),
    "no id of its key": ("completed", {"data_key_number": 1}),
}

READABLE_AFTERWARDS = {"no expiry", "over before it began", "begun after it is over"}
CORRUPT_FOR_ITS_OWNER = ("unknown state", "no state", "short token", "long token", "over before it began", "no end")


def is_corrupt(act: Callable[..., object], *arguments: Any, **options: Any) -> bool:
    try:
        act(*arguments, **options)
    except CorruptRecord:
        return True
    return False


@pytest.fixture
def spoil(make_engine: MakeEngine, records_url: str) -> Spoil:
    """Write what no release of ours writes, and what the tables themselves refuse with their constraints."""
    engine = make_engine()
    is_sqlite = engine.dialect.name == "sqlite"
    if not is_sqlite:
        with engine.begin() as connection:
            # SQLAlchemy creates no constraint any more that it has dropped, so not one of the store's own.
            schema.include_in(own := MetaData())
            for constraint in own.tables[schema.records.name].constraints:
                if isinstance(constraint, CheckConstraint):
                    connection.execute(DropConstraint(constraint))
            for column in ("token", "fingerprint"):
                connection.execute(text(f"ALTER TABLE idempotency_records ALTER COLUMN {column} DROP NOT NULL"))

    def write(key: StorageKey, columns: dict[str, Any]) -> None:
        with engine.begin() as connection:
            if is_sqlite:
                connection.execute(text("PRAGMA ignore_check_constraints = ON"))
            connection.execute(update(records).where(records.c.record_id == key.rid).values(**columns))

    return write


def test_a_row_that_cannot_be_ours_is_corrupt_and_never_absent(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock, spoil: Spoil
) -> None:
    """To a reader and to its owner it is corrupt, and both leave it as it is. A lost lease would name another worker.

    A claim that meets it leaves it where time does not end it, so every other claim is refused: a free key would run the
    payment again.
    """
    store = open_store()
    for spoilt, (standing, columns) in SPOILT.items():
        key = a_key()
        token = stand(store, clock, key, standing)
        spoil(key, columns)
        before = row(make_engine, key)

        assert (spoilt, True) == (spoilt, is_corrupt(store.read, key))
        if spoilt in CORRUPT_FOR_ITS_OWNER:
            writes: tuple[Callable[..., object], ...] = (*ENDS.values(), *OTHER_WRITES)
            assert (spoilt, [True] * 5) == (spoilt, [is_corrupt(write, store, key, token) for write in writes])
        assert (spoilt, before) == (spoilt, row(make_engine, key))

        assert (spoilt, True) == (spoilt, claim_is_corrupt(store, key))
        for seconds in (0, LEASE, KEEP * 1000):
            clock.advance(seconds)
            assert spoilt in READABLE_AFTERWARDS or claim_is_corrupt(store, key), spoilt
        left = row(make_engine, key)
        assert (spoilt, QUARANTINED, None) == (spoilt, left.state, left.expires_at)
        assert standing == "quarantined" or left.reason == CORRUPT, spoilt


def claim_is_corrupt(store: SqlStore, key: StorageKey) -> bool:
    return is_corrupt(store.claim, a_request(key), token=a_token(), lease=LEASE)


def test_a_response_without_expiry_is_reported_as_corrupt(
    open_store: OpenStore, clock: FrozenClock, spoil: Spoil
) -> None:
    """All else of it can be read, and in quarantine it needs no expiry."""
    store, key = open_store(), a_key()
    stand(store, clock, key, "completed")
    spoil(key, {"expires_at": None})
    assert claim_is_corrupt(store, key)

    assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)
    assert PAYLOAD == found(store, key).payload


@on_postgresql
def test_an_unreadable_row_that_cannot_be_changed_is_refused(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock, spoil: Spoil
) -> None:
    """A rule that the row breaks is in force for every write, also for one that would keep it."""
    store, key = open_store(), a_key()
    stand(store, clock, key, "completed")
    spoil(key, {"on_expiry": "forget"})
    with make_engine().begin() as connection:
        rule = "CHECK (on_expiry IN ('takeover', 'quarantine')) NOT VALID"
        connection.execute(text(f"ALTER TABLE idempotency_records ADD CONSTRAINT idempotency_on_expiry {rule}"))
    before = row(make_engine, key)

    for _ in range(2):
        with pytest.raises(CorruptRecord):
            store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert before == row(make_engine, key)


@on_sqlite
def test_a_column_of_another_type_is_corrupt(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock
) -> None:
    """SQLite takes any value in any column."""
    store = open_store()
    for column in ("fence", "attempt", "requested_at", "lease_expires_at", "token", "tenant"):
        key = a_key()
        stand(store, clock, key, "in flight")
        value = "CAST('x' AS BLOB)" if column == "tenant" else "'some text'"
        with make_engine().begin() as connection:
            connection.execute(text(f"UPDATE idempotency_records SET {column} = {value}"))  # noqa: S608

        assert (column, True, True) == (column, is_corrupt(store.read, key), claim_is_corrupt(store, key))


def test_a_corrupt_row_holds_no_lock(open_store: OpenStore, clock: FrozenClock, spoil: Spoil) -> None:
    """The claim that stumbled over it leaves no transaction behind: other keys are granted."""
    store, key = open_store(), a_key()
    stand(store, clock, key, "in flight")
    spoil(key, {"on_expiry": "forget"})
    with pytest.raises(CorruptRecord):
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    granted(open_store().claim(a_request(a_key()), token=a_token(), lease=LEASE))


def test_a_released_row_keeps_its_history(open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock) -> None:
    """For a day, to whoever looks into the table; with no answer, and whom it was about."""
    store, key = open_store(), a_key()
    token = stand(store, clock, key, "quarantined")
    store.release(key, token)

    left = row(make_engine, key)

    assert ("released", token, None, None, None) == (
        left.state,
        left.token,
        left.lease_expires_at,
        left.response,
        left.reason,
    )
    assert round((clock.now + 86400) * 1_000_000) == left.expires_at
    assert ("acme", "alice") == (left.tenant, left.principal)


def test_a_reused_key_keeps_no_old_columns(open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock) -> None:
    store, key = open_store(), a_key()
    stand(store, clock, key, "completed")
    clock.advance(KEEP)
    store.claim(a_request(key, about=RequestInfo(operation="other")), token=a_token(), lease=LEASE)

    fresh = row(make_engine, key)

    assert (None,) * 5 == (fresh.response, fresh.status, fresh.response_size, fresh.completed_at, fresh.expires_at)
    assert ("", "", "other") == (fresh.tenant, fresh.principal, fresh.endpoint)
    assert round(clock.now * 1_000_000) == fresh.requested_at


def test_an_auditor_can_distinguish_success_from_failure(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock
) -> None:
    """Without opening the answer."""
    store = open_store()
    for success, state in ((True, "completed"), (False, "failed")):
        key = a_key()
        token = stand(store, clock, key, "in flight")
        store.complete(key, token, type(PAYLOAD)(data=b"x", status=402, success=success, byte_size=7), keep=KEEP)

        kept = row(make_engine, key)
        assert (state, 402, 7) == (kept.state, kept.status, kept.response_size)


def row(make_engine: MakeEngine, key: StorageKey) -> Any:
    with make_engine().connect() as connection:
        return connection.execute(records.select().where(records.c.record_id == key.rid)).one()


ROOM = Quota(records=1_000_000)
BACK = KEEP * 100


@pytest.mark.parametrize("quota", (None, ROOM), ids=("uncounted", "counted"))
def test_a_clock_set_back_shortens_no_lifetime(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock, quota: Quota | None
) -> None:
    """Between claim and completion: the answer's life begins when the key was first used, at the earliest."""
    store, key, token = open_store(), a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=quota))
    began = round(clock.now * 1_000_000)
    clock.advance(-BACK)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    edge = bucket_edge_ms(began, round(KEEP * 1_000_000), width_ms=bucket_width_ms(KEEP)) * 1000

    kept = row(make_engine, key)
    assert (began, began + round(KEEP * 1_000_000) if quota is None else edge) == (kept.completed_at, kept.expires_at)
    clock.advance(BACK + KEEP - 1)
    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)
    assert Drift() == store.ledger.reconcile(key.tid)


@pytest.mark.parametrize("quota", (None, ROOM), ids=("uncounted", "counted"))
def test_a_record_that_expired_before_completion_is_not_taken_over(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock, spoil: Spoil, quota: Quota | None
) -> None:
    """Nor by a statement that compares what was seen before the bit was flipped."""
    store, key = open_store(), a_key()
    stand(store, clock, key, "completed")
    clock.advance(KEEP)
    asked = claim_query(a_request(key), a_token(), lease=1_000_000, now=store.now(), quota=quota)
    dialect = store.database.dialect
    with store.database.engine.connect() as connection:
        seen = row_of(connection.execute(statements.read(dialect), asked.parameters).one())
    spoil(key, {"expires_at": 1})
    before = row(make_engine, key)

    with store.database.engine.connect() as connection:
        fence = None if dialect.name == POSTGRESQL else seen.fence + 1
        assert voiding_of(dialect).write(connection, Move.RECLAIM, seen, asked, fence=fence) is None

    assert before == row(make_engine, key)


ENDS: dict[str, Callable[[SqlStore, StorageKey, bytes], object]] = {
    "release": lambda store, key, token: store.release(key, token),
    "quarantine": lambda store, key, token: store.quarantine(key, token, "lost"),
    "mark_point_of_no_return": lambda store, key, token: store.mark_point_of_no_return(key, token),
}


OTHER_WRITES: tuple[Callable[[SqlStore, StorageKey, bytes], object], ...] = (
    lambda store, key, token: store.renew(key, token, lease=LEASE),
    lambda store, key, token: store.complete(key, token, PAYLOAD, keep=KEEP),
)


def test_an_owner_cannot_free_a_corrupt_record(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock, spoil: Spoil
) -> None:
    """A settlement that is repeated after a lost reply must not free a key whose answer was condemned in between."""
    store = open_store()
    for spoilt in (None, {"fingerprint": b""}, {"response": None}):
        key = a_key()
        token = stand(store, clock, key, "completed")
        if spoilt is None:
            store.mark_corrupt(key, PAYLOAD)
        else:
            spoil(key, spoilt)
            assert claim_is_corrupt(store, key)
        before = row(make_engine, key)

        for end in ENDS.values():
            with pytest.raises(LeaseLost):
                end(store, key, token)
        assert (spoilt, before) == (spoilt, row(make_engine, key))


def test_an_owner_may_complete_a_corrupt_record_again(open_store: OpenStore, clock: FrozenClock) -> None:
    """The same answer, as it should be: nobody else has it."""
    store, key = open_store(), a_key()
    token = stand(store, clock, key, "completed")
    store.mark_corrupt(key, PAYLOAD)
    assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)

    store.complete(key, token, PAYLOAD, keep=KEEP)

    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)
    assert "" == found(store, key).reason


def test_a_commit_with_a_lost_reply_and_a_corrupt_response_does_not_run_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks the record what became of the commit must not be told that nothing did, and pay again."""
    paying(shop)
    condemned_with_its_commit(shop, monkeypatch)

    answer, again = shop.post(), shop.post()

    assert (201, 500) == (answer.status_code, again.status_code)
    assert (1, 1, CORRUPT) == (shop.payments(), len(shop.runs), shop.record().reason)


def test_no_worker_commits_with_a_corrupt_record(shop: Shop) -> None:
    """A view that commits by itself, after somebody has settled its claim and a third has found that unreadable."""

    @shop.view()
    def pay() -> tuple[str, int]:
        kept = shop.record()
        settled(shop, kept)
        shop.pay()
        shop.db.session.commit()
        return "paid", 201

    assert 400 <= shop.post().status_code
    assert 0 == shop.payments()


def settled(shop: Shop, kept: Any) -> None:
    key = StorageKey(kept.record_id, kept.tenant_id)
    shop.store.complete(key, kept.token, PAYLOAD, keep=KEEP)
    shop.store.mark_corrupt(key, PAYLOAD)


def condemned_with_its_commit(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's next COMMIT is done, its reply is lost, and somebody condemns what it has stored."""
    dialect = shop.db_engine.dialect
    original = dialect.do_commit
    failures = [OperationalError("COMMIT", {}, ConnectionError("broken"), connection_invalidated=True)]

    def do_commit(connection: Any) -> None:
        original(connection)
        if failures:
            failure = failures.pop()
            kept = shop.record()
            key = StorageKey(kept.record_id, kept.tenant_id)
            shop.store.mark_corrupt(key, shop.store.read(key).payload)
            raise failure

    monkeypatch.setattr(dialect, "do_commit", do_commit)
