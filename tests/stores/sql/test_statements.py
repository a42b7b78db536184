"""Which statements the store sends, how many, and what they log. REWRITE_SNAPSHOTS=1 rewrites the snapshots."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from inspect import isfunction, signature
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
from sqlalchemy import Dialect as Driver
from sqlalchemy import Update
from sqlalchemy.dialects.mysql.pymysql import MySQLDialect_pymysql
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import RequestInfo, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.stores.sql import (
    activity,
    completion,
    journal_statements,
    outbox_statements,
    quota,
    schema,
    statements,
    store,
)
from flask_idempotency.stores.sql.admin import data_keys, janitor
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.dialects import DIALECTS, MYSQL, POSTGRESQL, SQLITE
from flask_idempotency.stores.sql.journal_statements import Form
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.stores.sql.writes import Write
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
from tests.stores.sql.conftest import MakeEngine, OpenStore, on_postgresql, on_sqlite
from tests.stores.sql.counting import sent
from tests.stores.sql.shops import OpenShop

SNAPSHOTS = Path(__file__).parent / "snapshots"
DRIVERS: dict[str, Callable[[], Driver]] = {
    POSTGRESQL: PGDialect_psycopg,
    SQLITE: SQLiteDialect_pysqlite,
    MYSQL: lambda: MySQLDialect_pymysql(paramstyle="pyformat"),
}
ALL, ONLY_POSTGRESQL, NOT_POSTGRESQL, ONLY_MYSQL = (POSTGRESQL, SQLITE, MYSQL), (POSTGRESQL,), (SQLITE, MYSQL), (MYSQL,)
MODULES = (statements, completion, data_keys, quota, janitor, store, outbox_statements, journal_statements, activity)

PARTS = {
    "booked",
    "ended_wait",
    "has_lapsed",
    "if_as_seen",
    "is_absent",
    "is_answer",
    "is_in",
    "lapsed_as_met",
    "may_be_sealed",
    "others_update",
    "owners",
    "quarantined",
    "regranted",
}
"""What several statements share."""
Made: TypeAlias = Callable[..., Any]

NOT_ON_ALL: dict[Made, tuple[str, ...]] = {
    statements.claim_or_read: ONLY_POSTGRESQL,
    statements.read_locked: (POSTGRESQL, MYSQL),
    statements.advisory_lock: ONLY_POSTGRESQL,
    statements.wait_to_reclaim: ONLY_POSTGRESQL,
    statements.has_written: ONLY_POSTGRESQL,
    statements.end_wait_silently: ONLY_POSTGRESQL,
    statements.next_fence: NOT_POSTGRESQL,
    statements.next_number: ONLY_MYSQL,
    statements.reconciling: ONLY_MYSQL,
    janitor.first_response: ONLY_MYSQL,
    janitor.note_removed: ONLY_MYSQL,
    quota.insert_within: ONLY_POSTGRESQL,
    quota.reclaim_within: ONLY_POSTGRESQL,
    quota.tenant_lock: ONLY_POSTGRESQL,
    outbox_statements.relay_lock: ONLY_POSTGRESQL,
    journal_statements.write: ONLY_POSTGRESQL,
}

IN_FORMS = (completion.complete, completion.resolve, activity.delete_expired, janitor.scan_unfinished)
"""They have no form without further arguments."""

FORMS = [form for number in range(4) for form in combinations(("sealed", "counted", "tells"), number)]


def public(module: ModuleType) -> Iterator[Made]:
    for name, made in vars(module).items():
        if not isfunction(made) or made.__module__ != module.__name__ or name.startswith("_") or name in PARTS:
            continue
        # Others than statements stand beside them.
        if next(iter(signature(made).parameters), None) in ("dialect", "_"):
            yield made


def completing(made: Made, *form: str) -> Made:
    return partial(made, form=completion.Form(**dict.fromkeys(form, True)))


def named() -> dict[str, tuple[Made, tuple[str, ...]]]:
    """Every statement by the name of its snapshot, and where it is sent."""
    found: dict[str, tuple[Made, tuple[str, ...]]] = {}
    for module in MODULES:
        folder = "" if module is statements else f"{module.__name__.rpartition('.')[2].removesuffix('_statements')}_"
        for made in public(module):
            if made not in IN_FORMS:
                found[f"{folder}{made.__name__}"] = made, NOT_ON_ALL.get(made, ALL)
    found["claim_or_read_in_queue"] = partial(statements.claim_or_read, queues=True), ONLY_POSTGRESQL
    for table in activity.SWEPT:
        short = table.name.removeprefix("idempotency_")
        found[f"activity_delete_expired_{short}"] = partial(activity.delete_expired, table=table), ALL
    for state in (schema.PROCESSING, schema.QUARANTINED):
        found[f"janitor_scan_{state}"] = partial(janitor.scan_unfinished, state=state), ALL
    found["janitor_next_for_resolver_of_owner"] = partial(janitor.next_for_resolver, one_owner=True), ALL
    found["completion_replace_sealed"] = partial(completion.replace, sealed=True), ALL
    found["mark_committed_early"] = partial(statements.mark_point_of_no_return, commits=True), ALL
    found["insert_numbered"] = partial(statements.insert, numbered=True), ONLY_MYSQL
    for form in FORMS:
        found["_".join(("complete", *form))] = completing(completion.complete, *form), ALL
        if "tells" not in form:
            found["_".join(("resolve", *form))] = completing(completion.resolve, *form), ALL
            found["_".join(("complete_closes", *form))] = completing(completion.complete, "closes", *form), ALL
    for form in ((), ("counted",)):
        found["_".join(("complete_remembers", *form))] = completing(completion.complete, "remembers", *form), ALL
        found["_".join(("resolve_remembers", *form))] = completing(completion.resolve, "remembers", *form), ALL
    begun, finished = Form(finished=False, has_payload=False), Form(finished=True, has_payload=True)
    found["journal_write_sealed"] = partial(journal_statements.write, sealed=True), ONLY_POSTGRESQL
    found["journal_write_begun"] = partial(journal_statements.write, forms=(begun,), opens=False), ONLY_POSTGRESQL
    found["journal_write_two"] = partial(journal_statements.write, forms=(finished, begun)), ONLY_POSTGRESQL
    found["journal_hold_in_doubt"] = partial(journal_statements.hold, opens=False), ALL
    found["journal_enter_begun"] = partial(journal_statements.enter, form=begun), ALL
    found["journal_enter_settles"] = partial(journal_statements.enter, settles=True), ALL
    found["journal_withdraw_settles"] = partial(journal_statements.withdraw, settles=True), ALL
    found["journal_read_journal_held"] = partial(journal_statements.read_journal, held=True), ALL
    found["journal_replace_sealed"] = partial(journal_statements.replace, sealed=True), ALL
    return found


STATEMENTS = named()


def parts(statement: Any) -> list[Any]:
    """Return what is sent for it, in turn."""
    if not isinstance(statement, Write):
        return [statement]
    every = statement.unless, statement.before, *statement.tries, statement.read
    return [each for each in every if each is not None]


@pytest.mark.parametrize("database", ALL)
def test_each_statement_reads_as_it_did_and_is_compiled_once(database: str) -> None:
    """Show a reviewer each change of what is sent. A statement without a cache key is compiled at each use."""
    made = {name: make(DIALECTS[database]) for name, (make, databases) in STATEMENTS.items() if database in databases}
    texts = {}
    for name, statement in made.items():
        sent_in_turn = [f"{each.compile(dialect=DRIVERS[database]())}" for each in parts(statement)]
        lines = "\n;\n".join(sent_in_turn).splitlines()
        texts[name] = "".join(f"{line.rstrip()}\n" for line in lines)
    folder = SNAPSHOTS / database
    if os.environ.get("REWRITE_SNAPSHOTS") == "1":
        for name, written in texts.items():
            (folder / f"{name}.sql").write_text(written)
    kept = {path.stem: path.read_text() for path in folder.glob("*.sql")}

    changed = [f"{name}:\n{written}" for name, written in texts.items() if kept.get(name) != written]
    assert not changed, "\n".join(changed)
    assert kept.keys() == texts.keys(), "snapshots of statements that are gone"
    made_of = {name: parts(statement) for name, statement in made.items()}
    assert [] == [name for name, each in made_of.items() if any(part._generate_cache_key() is None for part in each)]


def assignments(text: str) -> list[tuple[str, str]]:
    """Return what an UPDATE assigns, in its order: columns, and the new values."""
    found, depth, last = [], 0, 0
    _, _, rest = text.partition(" SET ")
    for at, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        ends = depth == 0 and re.match(r"\s+WHERE\b", rest[at:])
        if depth == 0 and (letter == "," or ends):
            column, _, value = rest[last:at].partition("=")
            found.append((column.strip().rpartition(".")[2], value))
            last = at + 1
            if ends:
                break
    return found


def test_on_mysql_no_new_value_reads_a_column_that_was_assigned_before_it() -> None:
    """It assigns in the order of the text, and a later value sees what an earlier one has written."""
    wrong, seen = [], 0
    for name, (make, databases) in STATEMENTS.items():
        for part in parts(make(DIALECTS[MYSQL])) if MYSQL in databases else ():
            if isinstance(part, Update):
                before: set[str] = set()
                for column, value in assignments(f"{part.compile(dialect=DRIVERS[MYSQL]())}"):
                    own = re.sub(r"\bexcluded\.\w+|:\w+|%\(\w+\)s", "", value)
                    wrong += [f"{name}: {column}" for each in before if re.search(rf"\b{each}\b", own)]
                    before.add(column)
                    seen += 1

    assert [] == wrong
    assert seen > 150


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
def test_a_claim_is_one_statement_unless_its_row_must_change(open_store: OpenStore, clock: FrozenClock) -> None:
    """On a connection that commits by itself. The second statement compares what the first has seen."""
    sent_by = {what: statements_of_a_claim(open_store(), clock, what) for what in CLAIMS}

    changes = ["WITH granted", "UPDATE idempotency_records"]
    assert sent_by == {what: ["WITH granted"] for what in CLAIMS} | {"take-over": changes, "quarantine": changes}


def test_the_first_claim_of_a_process_checks_once_for_missing_parts(open_store: OpenStore) -> None:
    store = open_store()
    store.read(a_key())
    looks = []
    for _ in range(2):
        with sent(store) as statements:
            store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
        looks.append(statements.count("SELECT NOT"))

    assert [1, 0] == looks


@on_sqlite
def test_on_sqlite_a_refusal_takes_no_lock_and_a_grant_reads_again_under_it(
    open_store: OpenStore, clock: FrozenClock
) -> None:
    """There is one lock for all writers. A reader that comes to write is refused if another one has written since.

    The insert of a new key finds out by itself whether another worker was faster.
    """
    look = "SELECT idempotency_records.state,"
    begun = ["BEGIN IMMEDIATE", look]
    expected = {
        "new": [look, "BEGIN IMMEDIATE", "INSERT INTO", "INSERT INTO", "COMMIT"],
        "take-over": [look, *begun, "INSERT INTO", "UPDATE idempotency_records", "COMMIT"],
        "quarantine": [look, *begun, "UPDATE idempotency_records", "COMMIT"],
    }

    sent_by = {what: statements_of_a_claim(open_store(), clock, what) for what in CLAIMS}

    assert sent_by == {what: [look] for what in CLAIMS} | expected


@on_postgresql
@pytest.mark.parametrize("strategy", ("row_lock", "advisory"))
@pytest.mark.parametrize("what", ("new", "replay", "mismatch", "conflict"))
def test_the_other_strategies_lock_only_what_they_change(
    open_store: OpenStore, clock: FrozenClock, strategy: str, what: str
) -> None:
    assert ["WITH granted"] == statements_of_a_claim(open_store(strategy=strategy), clock, what)


@on_postgresql
def test_an_advisory_lock_comes_before_each_change(open_store: OpenStore, clock: FrozenClock) -> None:
    locked = [
        "WITH granted",
        "SELECT pg_advisory_xact_lock(%(my_number)s::BIGINT)",
        "SELECT idempotency_records.state,",
    ]
    for what in ("take-over", "quarantine"):
        sent_for_it = statements_of_a_claim(open_store(strategy="advisory"), clock, what)
        assert [*locked, "UPDATE idempotency_records"] == sent_for_it


def test_an_owners_write_is_one_statement(open_store: OpenStore, clock: FrozenClock) -> None:
    store = open_store()
    for write in WRITES.values():
        key = a_key()
        token = stand(store, clock, key, "in flight")
        with sent(store) as statements:
            write(store, key, token)

        assert ["UPDATE idempotency_records"] == statements


LOGGED_TOKEN = b"canary-token-16b"
LOGGED_ABOUT = RequestInfo(tenant="canary-tenant", principal="canary-principal", method="POST", operation="pay")
LOGGED = StoredPayload(data=b"canary-answer", status=201, success=True, byte_size=13)


@pytest.mark.parametrize("options", (None, {"echo": "debug"}), ids=("url", "engine that echoes"))
def test_no_row_is_logged(
    records_url: str, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, options: dict[str, Any] | None
) -> None:
    """By an engine that is made when the level is set already; what is sent is logged as ever."""
    key = a_key()
    with caplog.at_level(logging.DEBUG, logger="sqlalchemy"):
        bind = records_url if options is None else make_engine(hide_parameters=True, **options)
        store = SqlStore(Database(bind))
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
