"""Work that was done stays done for its owner, whether or not anybody can read its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from flask_idempotency.engine.errors import CorruptRecord, LeaseLost
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import CORRUPT, Replayed, Unknown
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, found, stand
from flask_idempotency.testing.doubles import FrozenClock
from tests.stores.sql.conftest import MakeEngine, OpenStore
from tests.stores.sql.shops import Shop, paying
from tests.stores.sql.test_rows import row, spoil

ENDS: dict[str, Callable[[SqlStore, StorageKey, bytes], None]] = {
    "release": lambda store, key, token: store.release(key, token),
    "quarantine": lambda store, key, token: store.quarantine(key, token, "lost"),
    "mark_point_of_no_return": lambda store, key, token: store.mark_point_of_no_return(key, token),
}


@pytest.mark.parametrize("verb", list(ENDS))
@pytest.mark.parametrize(
    "spoilt", ({}, {"fingerprint": b""}, {"response": None}), ids=("condemned", "unreadable", "lost")
)
def test_its_owner_cannot_say_otherwise(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock, verb: str, spoilt: dict[str, Any]
) -> None:
    """A settlement that is repeated after a lost reply must not free a key whose answer was condemned in between."""
    store, key = open_store(), a_key()
    token = stand(store, clock, key, "completed")
    if spoilt:
        spoil(make_engine, key, spoilt)
        with pytest.raises(CorruptRecord):
            store.claim(a_request(key), token=a_token(), lease=LEASE)
    else:
        store.mark_corrupt(key, PAYLOAD)
    before = row(make_engine, key)

    with pytest.raises(LeaseLost):
        ENDS[verb](store, key, token)

    assert before == row(make_engine, key)


def test_its_owner_may_complete_it_again(open_store: OpenStore, clock: FrozenClock) -> None:
    """The same answer, as it should be: nobody else has it."""
    store, key = open_store(), a_key()
    token = stand(store, clock, key, "completed")
    store.mark_corrupt(key, PAYLOAD)
    assert Unknown(CORRUPT) == store.claim(a_request(key), token=a_token(), lease=LEASE)

    store.complete(key, token, PAYLOAD, keep=KEEP)

    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Replayed)
    assert "" == found(store, key).reason


def test_a_commit_whose_reply_is_lost_was_done_although_its_answer_is_condemned(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks the record what became of the commit must not be told that nothing did, and pay again."""
    paying(shop)
    condemned_with_its_commit(shop, monkeypatch)

    answer, again = shop.post(), shop.post()

    assert (201, 500) == (answer.status_code, again.status_code)
    assert (1, 1, CORRUPT) == (shop.payments(), len(shop.runs), shop.record().reason)


def test_a_condemned_record_is_no_ones_to_commit_with(shop: Shop) -> None:
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
