"""Which statements the store sends, how many, and what they log. REWRITE_SNAPSHOTS=1 rewrites the snapshots."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from inspect import isfunction, signature
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
from sqlalchemy import Dialect as Driver
from sqlalchemy import Engine
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.sql.elements import CompilerElement

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import RequestInfo, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.sql import activity, completion, journal_statements, outbox, quota, statements, store
from flask_idempotency.stores.sql.admin import data_keys, janitor
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.dialects import DIALECTS, POSTGRESQL, SQLITE
from flask_idempotency.stores.sql.journal_statements import Form
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing import FrozenClock
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
    granted,
    stand,
)
from tests.stores.sql.conftest import MakeEngine, OpenStore, by_every_strategy, on_postgresql, on_sqlite
from tests.stores.sql.counting import sent
from tests.stores.sql.shops import OpenShop

SNAPSHOTS = Path(__file__).parent / "snapshots"


DRIVERS: dict[str, Callable[[], Driver]] = {POSTGRESQL: PGDialect_psycopg, SQLITE: SQLiteDialect_pysqlite}


BOTH, ONLY_POSTGRESQL, ONLY_SQLITE = (POSTGRESQL, SQLITE), (POSTGRESQL,), (SQLITE,)


MODULES = (statements, completion, data_keys, quota, janitor, store, outbox, journal_statements, activity)


PARTS = {
    "chosen",
    "cancelled",
    "ended_wait",
    "has_lapsed",
    "if_as_seen",
    "inserted",
    "is_absent",
    "is_answer",
    "may_be_sealed",
    "others_update",
    "owners",
    "regranted",
}


"""What several statements share."""


Made: TypeAlias = Callable[..., Any]


NOT_ON_BOTH: dict[Made, tuple[str, ...]] = {
    statements.claim_or_read: ONLY_POSTGRESQL,
    statements.read_locked: ONLY_POSTGRESQL,
    statements.advisory_lock: ONLY_POSTGRESQL,
    statements.wait_to_reclaim: ONLY_POSTGRESQL,
    statements.has_written: ONLY_POSTGRESQL,
    statements.end_wait_silently: ONLY_POSTGRESQL,
    statements.next_fence: ONLY_SQLITE,
    quota.insert_within: ONLY_POSTGRESQL,
    quota.reclaim_within: ONLY_POSTGRESQL,
    quota.tenant_lock: ONLY_POSTGRESQL,
    outbox.relay_lock: ONLY_POSTGRESQL,
    journal_statements.write: ONLY_POSTGRESQL,
}


FORMS = [form for number in range(4) for form in combinations(("sealed", "counted", "tells"), number)]


def public(module: ModuleType) -> Iterator[Made]:
    for name, made in vars(module).items():
        if not isfunction(made) or made.__module__ != module.__name__ or name.startswith("_") or name in PARTS:
            continue
        # Others than statements stand beside them.
        if next(iter(signature(made).parameters), None) in ("dialect", "_"):
            yield made


def named() -> dict[str, tuple[Made, tuple[str, ...]]]:
    """Every statement by the name of its snapshot, and where it is sent."""
    found: dict[str, tuple[Made, tuple[str, ...]]] = {}
    for module in MODULES:
        folder = "" if module is statements else f"{module.__name__.rpartition('.')[2].removesuffix('_statements')}_"
        for made in public(module):
            if made not in (completion.complete, completion.resolve):
                found[f"{folder}{made.__name__}"] = made, NOT_ON_BOTH.get(made, BOTH)
    for form in FORMS:
        options: dict[str, Any] = dict.fromkeys(form, True)
        found["_".join(("complete", *form))] = partial(completion.complete, **options), BOTH
        if "tells" not in form:
            found["_".join(("resolve", *form))] = partial(completion.resolve, **options), BOTH
            found["_".join(("complete_closes", *form))] = partial(completion.complete, closes=True, **options), BOTH
    begun, finished = Form(finished=False, has_payload=False), Form(finished=True, has_payload=True)
    found["journal_write_sealed"] = partial(journal_statements.write, sealed=True), ONLY_POSTGRESQL
    found["journal_write_begun"] = partial(journal_statements.write, forms=(begun,), opens=False), ONLY_POSTGRESQL
    found["journal_write_two"] = partial(journal_statements.write, forms=(finished, begun)), ONLY_POSTGRESQL
    found["journal_hold_in_doubt"] = partial(journal_statements.hold, opens=False), BOTH
    found["journal_enter_begun"] = partial(journal_statements.enter, form=begun), BOTH
    found["journal_replace_sealed"] = partial(journal_statements.replace, sealed=True), BOTH
    return found


STATEMENTS = named()


EVERY = [(name, database) for name, (_, databases) in STATEMENTS.items() for database in databases]


@pytest.mark.parametrize(("name", "database"), EVERY)
def test_a_statement_reads_as_it_did(name: str, database: str) -> None:
    """A change of what is sent is seen by whoever reviews it, on every SQLAlchemy that we work with."""
    made: CompilerElement = STATEMENTS[name][0](DIALECTS[database])
    text = f"{made.compile(dialect=DRIVERS[database]())}\n"
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    snapshot = SNAPSHOTS / database / f"{name}.sql"
    if os.environ.get("REWRITE_SNAPSHOTS") == "1":
        snapshot.write_text(text)

    assert snapshot.read_text() == text


def test_every_snapshot_is_of_a_statement() -> None:
    """No file is left of one that is gone."""
    kept = {path.relative_to(SNAPSHOTS).as_posix() for path in SNAPSHOTS.rglob("*.sql")}

    assert {f"{database}/{name}.sql" for name, database in EVERY} == kept


@pytest.mark.parametrize(("name", "database"), EVERY)
def test_a_statement_is_compiled_once(name: str, database: str) -> None:
    """What makes SQLAlchemy's cache recognise it is there."""
    assert STATEMENTS[name][0](DIALECTS[database])._generate_cache_key() is not None


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


WRITES: dict[str, Callable[[SqlStore, StorageKey, bytes], object]] = {
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


def test_the_first_claim_of_a_process_checks_once_for_missing_parts(open_store: OpenStore) -> None:
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
        ("take-over", ["INSERT INTO", "UPDATE idempotency_records"]),
        ("quarantine", ["UPDATE idempotency_records"]),
    ),
)
def test_on_sqlite_a_grant_reads_again_under_its_lock(
    open_store: OpenStore, clock: FrozenClock, what: str, writes: list[str]
) -> None:
    """Begun as a writer: a reader that comes to write is refused at once when somebody else has written in between."""
    look, *rest = statements_of_a_claim(open_store(), clock, what)

    assert "SELECT idempotency_records.state," == look
    assert [*WITHIN_A_TRANSACTION, *writes, "COMMIT"] == rest


@on_sqlite
def test_on_sqlite_a_new_key_is_read_once(open_store: OpenStore, clock: FrozenClock) -> None:
    """The insert itself finds out whether another worker was faster."""
    look, *rest = statements_of_a_claim(open_store(), clock, "new")

    assert "SELECT idempotency_records.state," == look
    assert ["BEGIN IMMEDIATE", "INSERT INTO", "INSERT INTO", "COMMIT"] == rest


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


LOGGED_TOKEN = b"canary-token-16b"


LOGGED_ABOUT = RequestInfo(tenant="canary-tenant", principal="canary-principal", method="POST", operation="pay")


LOGGED = StoredPayload(data=b"canary-answer", status=201, success=True, byte_size=13)


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
        request = a_request(key, about=LOGGED_ABOUT)
        for quota in (Quota(records=9), None):
            granted(store.claim(request, token=LOGGED_TOKEN, lease=LEASE, quota=quota))
        store.complete(key, LOGGED_TOKEN, LOGGED, keep=KEEP)
        store.claim(request, token=LOGGED_TOKEN, lease=LEASE)
        store.read(key)
        store.responses.scan(limit=9)
        store.ledger.reconcile(key.tid)
        store.close()

    assert "idempotency_records" in caplog.text
    assert [] == [line for line in caplog.messages if "canary" in line]


def test_statements_in_the_applications_transaction_are_not_logged(
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
