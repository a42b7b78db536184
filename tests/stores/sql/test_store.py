"""What the SQL store promises beyond the contract in `tests/stores/test_contract.py`."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import select, text

from example_app.demo.servers import RedisServer
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.model import VOIDED, Grant, InFlight, OnExpiry, Record
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import store_time
from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.schema import FENCES, meta, metadata
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.stores.tiered import TieredStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.stress import at_once
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    found,
    granted,
    stand,
)
from tests.stores.contenders import contended
from tests.stores.sql.conftest import MakeEngine, OpenStore, by_every_lock, by_every_strategy, on_postgresql, on_sqlite
from tests.stores.sql.counting import sent
from tests.tooling.processes import eventually

STRATEGIES = ("insert", "row_lock", "advisory")


@by_every_strategy
def test_the_store_uses_the_server_time(open_store: OpenStore, strategy: str) -> None:
    """In production nobody says what time it is. Here server and test share a clock."""
    store, key, token = open_store(strategy=strategy, clock=store_time), a_key(), a_token()
    before = time.time()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    asked = found(store, key)
    store.complete(key, token, PAYLOAD, keep=KEEP)
    done = found(store, key)
    after = time.time()

    # SQLite counts time in milliseconds.
    assert before - 0.002 <= asked.requested_at <= (done.completed_at or 0) <= after
    assert pytest.approx(LEASE, abs=0.001) == asked.deadline - asked.requested_at
    assert pytest.approx(KEEP, abs=0.001) == done.deadline - (done.completed_at or 0)
    assert LEASE - (after - before) - 0.002 <= asked.remaining <= LEASE


@by_every_strategy
def test_a_lease_ends_by_the_servers_clock(open_store: OpenStore, strategy: str) -> None:
    """Whoever asks after it takes over, and is the only one."""
    store, key = open_store(strategy=strategy, clock=store_time), a_key()
    granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=0.000_001))
    attempts: list[int] = []

    def taken_over() -> bool:
        outcome = store.claim(a_request(key), token=a_token(), lease=LEASE)
        attempts.extend([outcome.attempt] if isinstance(outcome, Grant) else [])
        return bool(attempts)

    # At the first try or, where time is counted in milliseconds, in the next one.
    assert eventually(taken_over)
    assert [2] == attempts
    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)


@by_every_strategy
def test_a_refusal_takes_no_fence(open_store: OpenStore, clock: FrozenClock, strategy: str) -> None:
    """Nor does it try to insert: either would be written to disk for every replay."""
    store, key = open_store(strategy=strategy), a_key()
    stand(store, clock, key, "completed")
    fence = found(store, key).fence
    clock.advance(-1)
    for _ in range(3):
        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)

    assert fence + 1 == granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE)).fence


@on_postgresql
@pytest.mark.parametrize("first", STRATEGIES)
@pytest.mark.parametrize("second", STRATEGIES)
def test_strategies_may_be_mixed(open_store: OpenStore, clock: FrozenClock, first: str, second: str) -> None:
    one, other, key, token = open_store(strategy=first), open_store(strategy=second), a_key(), a_token()
    fence = granted(one.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=token, lease=LEASE)).fence
    assert isinstance(other.claim(a_request(key), token=a_token(), lease=LEASE), InFlight)
    clock.advance(LEASE)
    successor = a_token()

    assert granted(other.claim(a_request(key), token=successor, lease=LEASE)).fence > fence
    other.complete(key, successor, PAYLOAD, keep=KEEP)
    assert isinstance(one.claim(a_request(key), token=token, lease=LEASE), Record)


def test_a_void_that_fails_halfway_leaves_no_claim(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim and the completion that make a voided key are one transaction."""
    store, key = open_store(), a_key()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the process ended between the two")

    with monkeypatch.context() as patched:
        patched.setattr(type(store.completing), "write", fail)
        with pytest.raises(RuntimeError):
            store.void(a_request(key, fingerprint=VOIDED), token=a_token(), keep=KEEP)

    assert store.read(key) is None
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))


def test_an_unknown_strategy_is_refused(records_url: str) -> None:
    with pytest.raises(ConfigurationError, match="insert, row_lock, advisory"):
        SqlStore(Database(records_url), strategy="optimism")


@on_sqlite
@pytest.mark.parametrize("strategy", ("row_lock", "advisory"))
def test_a_strategy_is_refused_where_it_cannot_work(records_url: str, strategy: str) -> None:
    """SQLite has neither locks on rows nor on numbers, and would say nothing."""
    with pytest.raises(ConfigurationError, match=f"{strategy} works on postgresql.*, not on sqlite"):
        SqlStore(Database(records_url), strategy=strategy)


@on_sqlite
def test_a_strategy_is_refused_at_first_use_where_the_database_was_not_known(make_engine: MakeEngine) -> None:
    store = SqlStore(Database(make_engine), strategy="advisory")

    with pytest.raises(ConfigurationError, match="not on sqlite"):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)


@pytest.mark.parametrize(
    ("token", "fingerprint"),
    ((bytes(15), bytes(17)), (bytes(16), bytes(32)), (b"", bytes(17))),
    ids=("token", "fingerprint", "no token"),
)
def test_a_claim_that_would_be_corrupt_is_not_written(open_store: OpenStore, token: bytes, fingerprint: bytes) -> None:
    """A token or a fingerprint of another size could not be read again."""
    store, key = open_store(), a_key()

    with pytest.raises(ValueError, match="16 bytes and a fingerprint 17"):
        store.claim(a_request(key, fingerprint=fingerprint), token=token, lease=LEASE)

    assert store.read(key) is None


@by_every_strategy
def test_without_tables_the_error_names_the_remedy(
    make_engine: MakeEngine, open_store: OpenStore, strategy: str
) -> None:
    metadata.drop_all(make_engine())
    store = open_store(strategy=strategy)

    with pytest.raises(ConfigurationError, match="flask idempotency db upgrade"):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    with pytest.raises(ConfigurationError, match="flask idempotency db upgrade"):
        store.complete(a_key(), a_token(), PAYLOAD, keep=KEEP)
    with pytest.raises(ConfigurationError, match="flask idempotency db upgrade"):
        store.read(a_key())


def test_an_old_table_is_named_as_such(make_engine: MakeEngine, open_store: OpenStore) -> None:
    with make_engine().begin() as connection:
        connection.execute(text("ALTER TABLE idempotency_records RENAME COLUMN method TO verb"))

    with pytest.raises(ConfigurationError, match="flask idempotency db upgrade"):
        open_store().claim(a_request(a_key()), token=a_token(), lease=LEASE)


@on_sqlite
def test_a_lost_last_fence_is_found_in_the_records(
    make_engine: MakeEngine, open_store: OpenStore, clock: FrozenClock
) -> None:
    """One from the clock might have been given out before: that was set back."""
    store = open_store()
    before = granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    with make_engine().begin() as connection:
        connection.execute(text("DELETE FROM idempotency_meta WHERE name = 'fence'"))
    clock.advance(-3600)

    after = granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))

    assert before.fence < after.fence


@by_every_lock
@pytest.mark.parametrize("quota", (None, Quota(records=10**6)), ids=("no quota", "quota"))
@pytest.mark.parametrize("released", (False, True), ids=("lapsed", "released"))
def test_the_fence_of_a_key_rises_where_the_sequence_went_back(
    make_engine: MakeEngine,
    open_store: OpenStore,
    clock: FrozenClock,
    strategy: str,
    released: bool,
    quota: Quota | None,
) -> None:
    """
    A new table has a new sequence, logical replication leaves sequences out, and not every role may set one. The worker of
    before must not pass for the newer one.
    """
    store, request, token = open_store(strategy=strategy), a_request(a_key(), on_expiry=OnExpiry.TAKEOVER), a_token()
    before = granted(store.claim(request, token=token, lease=LEASE, quota=quota))
    if released:
        store.release(request.key, token)
    else:
        clock.advance(LEASE + 1)
    with make_engine().begin() as connection:
        connection.execute(text(f"ALTER SEQUENCE {FENCES} RESTART"))

    after = granted(store.claim(request, token=a_token(), lease=LEASE, quota=quota))

    assert before.fence < after.fence


@on_postgresql
def test_the_error_names_the_missing_rights(open_store: OpenStore, make_engine: MakeEngine, database_url: str) -> None:
    with make_engine().begin() as connection:
        connection.execute(text("CREATE ROLE stranger LOGIN"))
    try:
        store = open_store(database_url.replace("postgres@", "stranger@"))
        with pytest.raises(ConfigurationError, match="grant it SELECT"):
            store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    finally:
        with make_engine().begin() as connection:
            connection.execute(text("DROP ROLE stranger"))


@on_postgresql
def test_a_standby_is_an_outage(open_store: OpenStore, make_engine: MakeEngine, database_url: str) -> None:
    name = database_url.rpartition("/")[2]
    with make_engine(isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
    store, key = open_store(), a_key()

    with pytest.raises(StoreUnavailable, match="25006"):
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert store.read(key) is None


@on_sqlite
def test_a_file_that_cannot_be_written_is_an_outage(open_store: OpenStore, records_url: str) -> None:
    """Answers can still be read from it, as far as SQLite lets us."""
    store = open_store(f"{records_url}?mode=ro&uri=true".replace("sqlite:///", "sqlite:///file:"))

    with pytest.raises(StoreUnavailable):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)


@on_sqlite
def test_a_file_that_is_no_database_is_an_outage(open_store: OpenStore, tmp_path: Path) -> None:
    """It cannot decide, so nobody may."""
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"not a database" * 100)
    store = open_store(f"sqlite:///{broken}")

    with pytest.raises(StoreUnavailable):
        store.claim(a_request(a_key()), token=a_token(), lease=LEASE)


@on_sqlite
def test_a_writer_that_never_ends_is_an_outage(
    open_store: OpenStore, make_engine: MakeEngine, clock: FrozenClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SQLite's own patience. What needs no lock goes on meanwhile, and a free key is granted afterwards."""
    monkeypatch.setattr("flask_idempotency.stores.sql.engines.BUSY_MS", 50)
    store, done = open_store(f"{make_engine().url.render_as_string()}?timeout=0.05"), a_key()
    stand(store, clock, done, "completed")
    with make_engine(isolation_level="AUTOCOMMIT").connect() as elsewhere:
        elsewhere.execute(text("BEGIN IMMEDIATE"))

        with pytest.raises(StoreUnavailable):
            store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
        assert isinstance(store.claim(a_request(done), token=a_token(), lease=LEASE), Record)
        elsewhere.execute(text("ROLLBACK"))

    assert isinstance(store.claim(a_request(a_key()), token=a_token(), lease=LEASE), Grant)


@by_every_strategy
def test_an_error_quotes_no_stored_data(open_store: OpenStore, make_engine: MakeEngine, strategy: str) -> None:
    """A traceback ends up in logs, and what it hides in error trackers; tokens, principals and answers must not."""
    metadata.drop_all(make_engine())
    with pytest.raises(ConfigurationError) as caught:
        open_store(strategy=strategy).claim(a_request(a_key()), token=b"secret-token-16b", lease=LEASE)

    chain, error = "", caught.value.__context__
    while error is not None:
        chain, error = chain + str(error), error.__context__
    assert chain
    assert "secret-token" not in chain
    assert "alice" not in chain


THREADS, ROUNDS = 32, 40


@pytest.mark.slow
@by_every_strategy
def test_exactly_one_thread_is_granted(open_store: OpenStore, strategy: str) -> None:
    """In every round, and everybody else hears of it or of its answer."""
    store = open_store(strategy=strategy)
    for _ in range(ROUNDS):
        key = a_key()

        def claim_and_complete(key: object = key) -> object:
            token = a_token()
            outcome = store.claim(a_request(key), token=token, lease=LEASE)  # type: ignore[arg-type]
            if isinstance(outcome, Grant):
                store.complete(key, token, PAYLOAD, keep=KEEP)  # type: ignore[arg-type]
            return type(outcome)

        outcomes = at_once(*[claim_and_complete] * THREADS)

        assert 1 == outcomes.count(Grant)
        assert set(outcomes) <= {Grant, InFlight, Record}


@pytest.mark.slow
@by_every_strategy
def test_exactly_one_thread_takes_over(open_store: OpenStore, clock: FrozenClock, strategy: str) -> None:
    """A lapsed claim has one successor, and nobody else is told that it is theirs."""
    store = open_store(strategy=strategy)
    for _ in range(ROUNDS):
        key = a_key()
        stand(store, clock, key, "lapsed, takeover")
        ask = a_request(key, on_expiry=OnExpiry.TAKEOVER)

        outcomes = at_once(*[lambda ask=ask: store.claim(ask, token=a_token(), lease=LEASE)] * THREADS)

        assert [2] == [outcome.attempt for outcome in outcomes if isinstance(outcome, Grant)]
        assert THREADS - 1 == sum(isinstance(outcome, InFlight) for outcome in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ("postgresql", "sqlite"), indirect=True)
def test_exactly_one_thread_of_all_processes_is_granted(records_url: str) -> None:
    wins, outcomes = contended(records_url, rounds=20)

    assert list(range(20)) == [number for number, _ in wins]
    assert set(outcomes) <= {"Grant", "InFlight", "Record"}
    assert sorted(fence for _, fence in wins) == [fence for _, fence in wins]


def since(store: SqlStore) -> list[int]:
    statement = select(meta.c.value).where(meta.c.name == "cached_since")
    return list(store.database.run(lambda connection: connection.scalars(statement).all()))


def test_the_store_keeps_the_time_of_its_first_cache(open_store: OpenStore, clock: FrozenClock) -> None:
    """By every host, and also when two note it at once: of the second nothing is left."""
    store, other = open_store(clock=clock), open_store(clock=clock)
    assert not store.has_cache()
    first = round(clock.now * 1_000_000)
    store.note_cache()
    clock.advance(60)
    other.has_cache = lambda: False  # type: ignore[method-assign]
    other.note_cache()

    assert store.has_cache()
    assert [first] == since(store)


def test_a_process_records_its_cache_once(open_store: OpenStore, clock: FrozenClock, redis_server: RedisServer) -> None:
    """Before its first claim, so before anything is cached: one statement more than to learn which database it is."""
    noted: list[list[str]] = []
    # The first claim in a new database also sets where fences begin.
    granted(open_store(clock=clock).claim(a_request(a_key()), token=a_token(), lease=LEASE))
    for _ in range(2):
        system, cache = open_store(clock=clock), RedisReplayCache(redis_server.url, clock=clock)
        store = TieredStore(system, cache)
        with sent(system) as statements:
            for _ in range(2):
                granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
        noted.append(statements)
        cache.close()

    first, second = noted
    assert Counter([*second, "INSERT INTO"]) == Counter(first)
    assert 1 == second.count("SELECT count(*)")
