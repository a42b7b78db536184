"""How many statements each answer takes: a promise to whoever pays for round trips."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import (
    FINGERPRINT,
    KEEP,
    LEASE,
    OTHER_FINGERPRINT,
    PAYLOAD,
    Standing,
    a_key,
    a_request,
    a_token,
    stand,
)
from flask_idempotency.testing.doubles import FrozenClock
from tests.stores.sql.conftest import OpenStore, by_every_strategy, on_postgresql, on_sqlite
from tests.stores.sql.counting import sent

WITHIN_A_TRANSACTION = ["BEGIN IMMEDIATE", "SELECT idempotency_records.state,"]

CLAIMS: dict[str, tuple[Standing | None, bytes]] = {
    "new": (None, FINGERPRINT),
    "replay": ("completed", FINGERPRINT),
    "mismatch": ("completed", OTHER_FINGERPRINT),
    "conflict": ("in flight", FINGERPRINT),
    "unknown": ("quarantined", FINGERPRINT),
    "take-over": ("lapsed, takeover", FINGERPRINT),
    "quarantine": ("lapsed, quarantine", FINGERPRINT),
}

WRITES: dict[str, Callable[[SqlStore, StorageKey, bytes], None]] = {
    "renew": lambda store, key, token: store.renew(key, token, lease=LEASE),
    "mark_point_of_no_return": lambda store, key, token: store.mark_point_of_no_return(key, token),
    "complete": lambda store, key, token: store.complete(key, token, PAYLOAD, keep=KEEP),
    "release": lambda store, key, token: store.release(key, token),
    "quarantine": lambda store, key, token: store.quarantine(key, token, "lost"),
}


def statements_of_a_claim(store: SqlStore, clock: FrozenClock, what: str) -> list[str]:
    standing, fingerprint = CLAIMS[what]
    key = a_key()
    # What a new pool asks its server at first is not the claim's; nor what a process asks at its first claim.
    store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    if standing is not None:
        stand(store, clock, key, standing)
    with sent(store) as statements:
        store.claim(a_request(key, fingerprint=fingerprint), token=a_token(), lease=LEASE)
    return statements


@on_postgresql
@pytest.mark.parametrize("what", ("new", "replay", "mismatch", "conflict", "unknown"))
def test_a_claim_is_one_statement(open_store: OpenStore, clock: FrozenClock, what: str) -> None:
    """Whether the key is free or not, on a connection that commits by itself."""
    assert ["WITH granted"] == statements_of_a_claim(open_store(), clock, what)


def test_the_first_claim_of_a_process_looks_once_for_what_is_missing(open_store: OpenStore) -> None:
    """One statement more, and never again."""
    store = open_store()
    store.read(a_key())
    looks = []
    for _ in range(2):
        with sent(store) as statements:
            store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
        looks.append(statements.count("SELECT NOT"))

    assert [1, 0] == looks


@on_postgresql
@pytest.mark.parametrize("what", ("take-over", "quarantine"))
def test_a_row_that_must_change_takes_a_second_statement(open_store: OpenStore, clock: FrozenClock, what: str) -> None:
    """Which compares what the first has seen."""
    assert ["WITH granted", "UPDATE idempotency_records"] == statements_of_a_claim(open_store(), clock, what)


@on_sqlite
@pytest.mark.parametrize("what", ("replay", "mismatch", "conflict", "unknown"))
def test_on_sqlite_a_refusal_takes_no_lock(open_store: OpenStore, clock: FrozenClock, what: str) -> None:
    """There is one lock for all writers, and a replay must not wait for it."""
    assert ["SELECT idempotency_records.state,"] == statements_of_a_claim(open_store(), clock, what)


@on_sqlite
@pytest.mark.parametrize(
    ("what", "writes"),
    (
        ("new", ["INSERT INTO", "INSERT INTO"]),
        ("take-over", ["INSERT INTO", "UPDATE idempotency_records"]),
        ("quarantine", ["UPDATE idempotency_records"]),
    ),
)
def test_on_sqlite_a_grant_looks_again_under_its_lock(
    open_store: OpenStore, clock: FrozenClock, what: str, writes: list[str]
) -> None:
    """Begun as a writer: a reader that comes to write is refused at once when somebody else has written in between."""
    look, *rest = statements_of_a_claim(open_store(), clock, what)

    assert "SELECT idempotency_records.state," == look
    assert [*WITHIN_A_TRANSACTION, *writes, "COMMIT"] == rest


@on_postgresql
@pytest.mark.parametrize(
    ("strategy", "statements"),
    (
        ("row_lock", ["SELECT idempotency_records.state,"]),
        ("advisory", ["SELECT pg_advisory_xact_lock(%(my_number)s::BIGINT)", "SELECT idempotency_records.state,"]),
    ),
)
def test_a_replay_by_the_other_strategies(
    open_store: OpenStore, clock: FrozenClock, strategy: str, statements: list[str]
) -> None:
    """Inside a transaction, whose beginning and end come on top."""
    assert statements == statements_of_a_claim(open_store(strategy=strategy), clock, "replay")


@by_every_strategy
@pytest.mark.parametrize("verb", list(WRITES))
def test_an_owners_write_is_one_statement(open_store: OpenStore, clock: FrozenClock, strategy: str, verb: str) -> None:
    """When it changes something. Why it did not, a second one asks."""
    store, key = open_store(strategy=strategy), a_key()
    token = stand(store, clock, key, "in flight")

    with sent(store) as statements:
        WRITES[verb](store, key, token)

    assert ["UPDATE idempotency_records"] == statements
