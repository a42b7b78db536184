"""Nobody who turns up the log is told what is in a record."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from flask_idempotency.engine.model import RequestInfo, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, a_key, a_request, granted
from tests.stores.sql.conftest import MakeEngine
from tests.stores.sql.shops import OpenShop

TOKEN = b"canary-token-16b"
ABOUT = RequestInfo(tenant="canary-tenant", principal="canary-principal", method="POST", operation="pay")
PAYLOAD = StoredPayload(data=b"canary-answer", status=201, success=True, byte_size=13)

Bind = Callable[[str, MakeEngine], str | Engine]
BINDS: dict[str, Bind] = {
    "url": lambda url, make_engine: url,
    "engine": lambda url, make_engine: make_engine(hide_parameters=True),
    "engine that echoes": lambda url, make_engine: make_engine(hide_parameters=True, echo="debug"),
}


@pytest.mark.parametrize("bind", list(BINDS))
def test_no_row_is_logged(
    records_url: str, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, bind: str
) -> None:
    """By an engine that is made when the level is set already; what is sent is logged as ever."""
    key = a_key()
    with caplog.at_level(logging.DEBUG, logger="sqlalchemy"):
        store = SqlStore(Database(BINDS[bind](records_url, make_engine)))
        request = a_request(key, about=ABOUT)
        for quota in (Quota(records=9), None):
            granted(store.claim(request, token=TOKEN, lease=LEASE, quota=quota))
        store.complete(key, TOKEN, PAYLOAD, keep=KEEP)
        store.claim(request, token=TOKEN, lease=LEASE)
        store.read(key)
        store.responses.scan(limit=9)
        store.ledger.reconcile(key.tid)
        store.close()

    assert "idempotency_records" in caplog.text
    assert [] == [line for line in caplog.messages if "canary" in line]


def test_what_is_done_in_the_applications_transaction_is_not_logged(
    open_: OpenShop, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own engine logs what its views write, with parameters and rows, and nothing of ours beside it."""
    with caplog.at_level(logging.DEBUG, logger="sqlalchemy"):
        shop = open_()

        @shop.view()
        def pay() -> tuple[str, int]:
            shop.pay(4711)
            return "canary-answer", 201

        caplog.clear()
        assert 201 == shop.post().status_code
        logged = caplog.text

    assert "4711" in logged
    assert ("canary" in logged, repr(shop.record().token) in logged) == (False, False)
