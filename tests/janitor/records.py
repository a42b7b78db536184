"""Records that a janitor has to do with."""

from __future__ import annotations

from sqlalchemy import create_engine, text

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.store import Store
from flask_idempotency.testing.contract.support import PAYLOAD, a_key, a_request, a_token


def abandoned(store: Store) -> StorageKey:
    """A key whose owner has vanished a moment ago."""
    key = a_key()
    store.claim(a_request(key), token=a_token(), lease=0.001)
    return key


def over(store: Store) -> StorageKey:
    """A key whose answer has just come to the end of its life."""
    key, token = a_key(), a_token()
    store.claim(a_request(key), token=token, lease=30)
    store.complete(key, token, PAYLOAD, keep=0.001)
    return key


def rows(url: str) -> int:
    """How many records there are in this database, those included whose time is over: nobody else sees them."""
    engine = create_engine(url)
    with engine.connect() as connection:
        count: int = connection.execute(text("SELECT count(*) FROM idempotency_records")).scalar_one()
    engine.dispose()
    return count
