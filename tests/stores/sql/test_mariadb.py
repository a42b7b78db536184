"""Where MariaDB and MySQL differ from PostgreSQL: what the store refuses there, and what it does not rely on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pymysql
import pytest
from pymysql.constants import CLIENT
from sqlalchemy import Engine, create_engine, event, make_url, select, text
from sqlalchemy.exc import DBAPIError, OperationalError

from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Expired, Grant, InFlight, OnExpiry, Record
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.stores.sql import claiming, errors, mysql
from flask_idempotency.stores.sql.claiming import STRATEGIES, strategy_of
from flask_idempotency.stores.sql.database import MYSQL_TRIES, Database, transaction
from flask_idempotency.stores.sql.dialects import DIALECTS, MYSQL, bigint
from flask_idempotency.stores.sql.migrations import LATEST, lacks_sequence, upgrade
from flask_idempotency.stores.sql.schema import SEEDED, metadata
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token, granted
from flask_idempotency.testing.doubles import FrozenClock
from tests.lab.mariadb import MariaDbServer, StartMariaDb
from tests.sql_backends import count_by_a_row, make_tables
from tests.stores.sql.conftest import MakeEngine
from tests.stores.sql.counting import sent
from tests.tooling.processes import eventually

GOOD = {
    "version": "10.11.19-MariaDB-0+deb12u1",
    "sql_mode": "STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION",
    "innodb_flush_log_at_trx_commit": 1,
    "log_bin": 0,
    "binlog_format": "MIXED",
}


@pytest.fixture
def database_url(mariadb_server: MariaDbServer) -> Iterator[str]:
    with mariadb_server.database() as name:
        make_tables(mariadb_server.url(name))
        yield mariadb_server.url(name)


@pytest.fixture
def open_real(database_url: str) -> Iterator[Callable[..., SqlStore]]:
    """Opens stores by the server's clock."""
    with ExitStack() as stores:

        def open_one(bind: Any = None, **options: Any) -> SqlStore:
            store = SqlStore(Database(bind or database_url), **options)
            stores.callback(store.close)
            return store

        yield open_one


def scalar(engine: Engine, statement: str) -> Any:
    with engine.connect() as connection:
        return connection.execute(text(statement)).scalar()


@pytest.mark.parametrize(
    ("changed", "needle"),
    (
        ({"version": "10.5.9-MariaDB"}, "MariaDB 10.5.9-MariaDB, and the store needs MariaDB 10.6"),
        ({"version": "5.5.5-10.3.1-MariaDB"}, "needs MariaDB 10.6"),
        ({"version": "8.0.12"}, "MySQL 8.0.12, and the store needs MySQL 8.0.13"),
        ({"version": "5.7.44-log"}, "needs MySQL 8.0.13"),
        ({"version": "TiDB"}, "needs MySQL 8.0.13"),
        ({"sql_mode": ""}, "sql_mode is not strict"),
        ({"innodb_flush_log_at_trx_commit": 2}, "innodb_flush_log_at_trx_commit is not 1"),
        ({"log_bin": 1, "binlog_format": "STATEMENT"}, "binlog_format is STATEMENT"),
    ),
)
def test_a_server_that_cannot_keep_claims_is_refused_by_name(changed: dict[str, Any], needle: str) -> None:
    (fault,) = mysql.faults({**GOOD, **changed})

    assert needle in fault


@pytest.mark.parametrize("version", ("10.6.0-MariaDB", "11.4.2-MariaDB-log", "8.0.13", "8.4.0", "9.1.0"))
def test_servers_that_are_new_enough(version: str) -> None:
    assert [] == list(mysql.faults({**GOOD, "version": version}))


@pytest.mark.slow
def test_a_server_outside_strict_mode_is_asked_and_refused(start_mariadb: StartMariaDb) -> None:
    """It would cut a token that does not fit, and say nothing."""
    server = start_mariadb("--sql-mode=")
    with server.database() as name:
        store = SqlStore(Database(server.url(name)))
        with pytest.raises(ConfigurationError, match="sql_mode is not strict"):
            store.read(a_key())
        store.close()


def test_advisory_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="advisory works on postgresql, not on mysql"):
        strategy_of("advisory", DIALECTS[MYSQL])
    assert {MYSQL} < STRATEGIES["row_lock"].keys()


def test_connections_for_records_read_what_is_committed(open_real: Callable[..., SqlStore]) -> None:
    """By default a transaction keeps the snapshot of its first read, and would not see the row that it lost to."""
    store = open_real()

    def levels(connection: Any) -> tuple[str, int]:
        found = connection.exec_driver_sql("SELECT @@tx_isolation, @@autocommit").one()
        return str(found[0]), int(found[1])

    assert ("READ-COMMITTED", 1) == store.database.run(levels)


@pytest.mark.parametrize("zone", ("+00:00", "-11:00", "+12:00"))
def test_times_are_the_same_in_each_time_zone(open_real: Callable[..., SqlStore], database_url: str, zone: str) -> None:
    """The zone of a session is the application's, and a clock that is set back an hour would be two times."""
    engine = create_engine(database_url)
    event.listen(engine, "connect", lambda connection, _: connection.cursor().execute(f"SET time_zone = '{zone}'"))
    store = open_real(engine)
    key = a_key()

    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    record = store.read(key)

    assert record is not None
    assert abs(record.requested_at - float(scalar(engine, "SELECT unix_timestamp(sysdate(6))"))) < 60
    engine.dispose()


def test_the_clock_stands_still_during_a_statement(database_url: str, make_engine: MakeEngine) -> None:
    """Two readings of one statement are the same. The time does not go on while the statement waits for a lock."""
    engine = make_engine()
    now = DIALECTS[MYSQL].now
    with engine.connect() as connection:
        before, slept, after = connection.execute(
            text(f"SELECT {DIALECTS[MYSQL].clock}, sleep(0.01), {DIALECTS[MYSQL].clock}")
        ).one()
        given = connection.scalar(select(now), {"now": 42})

    assert (before, 0, 42) == (after, slept, given)


def test_whole_numbers_are_divided_as_such(make_engine: MakeEngine) -> None:
    """Its `/` rounds to four decimals: 59,999,999 of 60,000,000 would be one."""
    quotient = select(DIALECTS[MYSQL].quotient(bigint("one"), bigint("other")))
    with make_engine().connect() as connection:
        assert 0 == connection.scalar(quotient, {"one": 59_999_999, "other": 60_000_000})


@pytest.mark.parametrize(
    ("version", "galera", "expected"),
    (
        ("10.11.19-MariaDB-0+deb12u1", ("wsrep_on", "OFF"), True),
        ("11.4.2-MariaDB", None, True),
        ("10.11.19-MariaDB-0+deb12u1", ("wsrep_on", "ON"), False),
        ("8.4.0", None, False),
    ),
)
def test_only_a_single_mariadb_counts_by_a_sequence(
    version: str, galera: tuple[str, str] | None, expected: bool
) -> None:
    """The nodes of a cluster take numbers apart from each other, and MySQL has no sequences."""
    assert expected is mysql.has_sequences(version, in_cluster=mysql.is_on(galera))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost", ("DELETE FROM idempotency_meta WHERE name = 'fence'", "DROP SEQUENCE idempotency_fence_numbers_number_seq")
)
def test_fences_rise_over_a_restart_and_lost_rows(start_mariadb: StartMariaDb, lost: str) -> None:
    server = start_mariadb()
    with server.database() as name:
        make_tables(server.url(name))
        store = SqlStore(Database(server.url(name)))
        if lost.startswith("DELETE"):
            count_by_a_row(store)
        engine = create_engine(server.url(name))

        def fence() -> int:
            return granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE)).fence

        first = fence()
        server.kill()
        server.restart()
        second = fence()
        with engine.begin() as connection:
            connection.execute(text("UPDATE idempotency_records SET fence = fence + 9000000000000"))
            connection.execute(text(lost))
        if lost.startswith("DROP"):
            with pytest.raises(ConfigurationError):
                fence()
        third = fence()
        store.close()
        engine.dispose()

    assert SEEDED < first < second
    assert second + 9_000_000_000_000 < third


def test_fences_rise_although_their_source_is_behind(open_real: Callable[..., SqlStore]) -> None:
    """As where the clock was set back, or a backup has brought an older source than the row."""
    stores = [open_real(), open_real()]
    count_by_a_row(stores[1])
    for store in stores:
        key = a_key()
        first = granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE)).fence
        with store.database.base.begin() as connection:
            higher = "UPDATE idempotency_records SET fence = fence + 9000000000000, lease_expires_at = 1"
            connection.execute(text(higher))
        again = granted(store.claim(a_request(key, on_expiry=OnExpiry.TAKEOVER), token=a_token(), lease=LEASE)).fence
        assert first + 9_000_000_000_000 < again


def test_fences_rise_over_a_stay_in_a_cluster(
    open_real: Callable[..., SqlStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There they come from a row. The sequence stays behind, until the server has left and the store opens a connection."""
    store = open_real()

    def fence() -> int:
        return granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE)).fence

    def numbered() -> int:
        """How many numbers the sequence has given."""
        return int(
            scalar(store.database.base, "SELECT next_not_cached_value FROM idempotency_fence_numbers_number_seq")
        )

    fences, alone = [fence(), fence()], numbered()
    with monkeypatch.context() as cluster:
        cluster.setattr(mysql, "has_sequences", lambda version, *, in_cluster: False)
        store.database.engine.dispose()
        fences += [fence()]
    assert alone == numbered()
    store.database.engine.dispose()
    fences += [fence(), fence(), fence()]

    assert sorted(set(fences)) == fences
    assert alone < numbered()


def test_an_upgrade_makes_the_sequence_for_a_role_that_may_not(mariadb_server: MariaDbServer) -> None:
    """As after a cluster was left: the tables are as new as this release, and the sequence is not there."""
    with mariadb_server.database() as name:
        url = mariadb_server.url(name)
        owner = SqlStore(Database(url))
        owner.schema.upgrade()
        with owner.database.base.begin() as connection:
            connection.execute(text("DROP SEQUENCE idempotency_fence_numbers_number_seq"))
            connection.execute(text(f"CREATE USER {name[:30]} IDENTIFIED BY 'few'"))
            connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name}.* TO {name[:30]}"))
        worker = SqlStore(Database(make_url(url).set(username=name[:30], password="few")))
        with pytest.raises(ConfigurationError, match="which `flask idempotency db upgrade` makes"):
            worker.claim(a_request(a_key()), token=a_token(), lease=LEASE)
        (advice,) = worker.schema.advice()
        assert advice.startswith("The sequence idempotency_fence_numbers_number_seq is not in this database.")

        assert ["created the sequence idempotency_fence_numbers_number_seq"] == owner.schema.upgrade()
        assert [] == owner.schema.upgrade() == worker.schema.advice()
        assert SEEDED < granted(worker.claim(a_request(a_key()), token=a_token(), lease=LEASE)).fence
        worker.close()
        owner.close()


def test_the_sequence_is_looked_for_in_the_database_of_the_connection(mariadb_server: MariaDbServer) -> None:
    """A migration may go from tenant to tenant with USE."""
    with mariadb_server.database() as first, mariadb_server.database() as second:
        engine = create_engine(mariadb_server.url(first))
        with engine.connect() as connection:
            connection.exec_driver_sql(f"USE {second}")
            upgrade(connection)
            assert not lacks_sequence(connection)
            connection.exec_driver_sql(f"USE {first}")
            assert lacks_sequence(connection)
        engine.dispose()


def test_a_table_without_grants_is_not_reported_as_missing(mariadb_server: MariaDbServer) -> None:
    """An upgrade would not help: the administrator has granted each table, and forgot the newest."""
    with mariadb_server.database() as name:
        url, role = make_url(mariadb_server.url(name)), name[:30]
        owner = create_engine(url)
        upgrade(owner)
        with owner.connect() as connection:
            connection.exec_driver_sql(f"CREATE USER {role} IDENTIFIED BY 'few'")
            for table in set(metadata.tables) - {"idempotency_audit"}:
                connection.exec_driver_sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {role}")
        store = SqlStore(Database(url.set(username=role, password="few")))
        for ask in (store.schema.faults, store.schema.upgrade):
            with pytest.raises(StoreUnavailable, match=rf"command denied to user '{role}'.*idempotency_audit"):
                ask()
        store.close()
        owner.dispose()


def test_a_broken_view_is_not_reported_as_a_missing_table(mariadb_server: MariaDbServer) -> None:
    with mariadb_server.database() as name:
        store = SqlStore(Database(mariadb_server.url(name)))
        store.schema.upgrade()
        with store.database.base.begin() as connection:
            connection.exec_driver_sql("RENAME TABLE idempotency_audit TO kept")
            connection.exec_driver_sql("CREATE VIEW idempotency_audit AS SELECT * FROM kept")
            connection.exec_driver_sql("DROP TABLE kept")
        for ask in (store.schema.faults, store.schema.upgrade):
            with pytest.raises(StoreUnavailable, match="references invalid table"):
                ask()
        store.close()


def test_a_connection_that_the_server_closed_is_replaced(open_real: Callable[..., SqlStore], database_url: str) -> None:
    """`wait_timeout` ends connections that wait in a pool."""
    store = open_real()
    key, token = a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    admin = create_engine(database_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        own = connection.scalar(text("SELECT connection_id()"))
        others = "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> :own"
        for number in connection.scalars(text(others), {"own": own}).all():
            connection.execute(text(f"KILL {number}"))
        assert eventually(lambda: not connection.execute(text(others), {"own": own}).all())
    admin.dispose()

    store.complete(key, token, PAYLOAD, keep=KEEP)
    record = store.read(key)
    assert record is not None
    assert PAYLOAD == record.payload


class _Error(Exception):
    """An error of the driver, as PyMySQL makes them."""


_Error.__module__ = "pymysql.err"


def error_of(code: int) -> DBAPIError:
    return OperationalError("…", None, _Error(code, "words of the server"))


def test_a_deadlock_is_repeated_and_a_lock_timeout_is_not(open_real: Callable[..., SqlStore]) -> None:
    database = open_real().database
    calls: list[int] = []

    def fails(code: int, times: int) -> Callable[[Any], str]:
        calls.clear()

        def work(connection: Any) -> str:
            calls.append(code)
            if len(calls) <= times:
                raise error_of(code)
            return "done"

        return work

    assert "done" == database.run(fails(1213, 2))
    assert [1213] * 3 == calls
    with pytest.raises(StoreUnavailable):
        database.run(fails(1213, 99))
    assert [1213] * MYSQL_TRIES == calls
    with pytest.raises(StoreUnavailable) as caught:
        database.run(fails(1205, 99))
    assert [1205] == calls
    assert isinstance(caught.value.__cause__, DBAPIError)
    assert errors.is_lock_timeout(caught.value.__cause__)


@pytest.mark.parametrize(
    ("code", "retryable", "refused"),
    ((1213, True, True), (1205, True, True), (1062, False, False), (2013, True, False), (1053, True, False)),
)
def test_what_an_error_says_of_a_commit(code: int, retryable: bool, refused: bool) -> None:
    """After a lost connection the commit may be done."""
    assert (retryable, refused) == (errors.is_retryable(error_of(code)), errors.is_refusal(error_of(code)))


def test_a_transaction_ends_with_the_statement_that_timed_out(
    open_real: Callable[..., SqlStore], database_url: str
) -> None:
    """The server rolls back that statement alone. The rows before it must not be committed."""
    store, key = open_real(), a_key()
    granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    engine = create_engine(database_url)
    with engine.connect() as holder:
        holder.execute(text("SELECT * FROM idempotency_records FOR UPDATE"))

        def work(connection: Any) -> None:
            connection.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 0")
            with transaction(connection):
                connection.exec_driver_sql("INSERT INTO idempotency_meta (name, value) VALUES ('half', 1)")
                connection.exec_driver_sql("UPDATE idempotency_records SET attempt = 9")

        with pytest.raises(StoreUnavailable):
            store.database.run(work)
    assert 0 == scalar(engine, "SELECT count(*) FROM idempotency_meta WHERE name = 'half'")
    engine.dispose()


def test_a_claim_does_not_wait_for_a_row_that_a_transaction_has_locked(
    open_real: Callable[..., SqlStore], database_url: str
) -> None:
    """A frozen worker may hold it for long, and a claim that waited there would hold the row of the last fence."""
    store, key = open_real(), a_key()
    request = a_request(key, on_expiry=OnExpiry.TAKEOVER)
    granted(store.claim(request, token=a_token(), lease=0.000001))
    engine = create_engine(database_url)
    with engine.connect() as holder:
        holder.execute(text("SELECT * FROM idempotency_records WHERE record_id = :rid FOR UPDATE"), {"rid": key.rid})

        with sent(store) as statements:
            assert isinstance(store.claim(request, token=a_token(), lease=LEASE), InFlight)
        # After a wait that was too long, it would be ROLLBACK.
        assert "COMMIT" == statements[-1]
        granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    assert isinstance(store.claim(request, token=a_token(), lease=LEASE), Grant)
    engine.dispose()


def test_a_claim_waits_for_a_row_that_is_being_removed(
    open_real: Callable[..., SqlStore], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the row of the last fence, so that other claims go on: no request runs under this key."""
    store, key = open_real(), a_key()
    token = a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.release(key, token)
    engine, waits = create_engine(database_url), []
    with engine.connect() as janitor:
        janitor.execute(text("DELETE FROM idempotency_records WHERE record_id = :rid"), {"rid": key.rid})

        def wait(seconds: float) -> None:
            waits.append(seconds)
            granted(open_real().claim(a_request(a_key()), token=a_token(), lease=LEASE))
            janitor.commit()

        monkeypatch.setattr(claiming, "time", SimpleNamespace(sleep=wait))
        granted(store.claim(a_request(key), token=a_token(), lease=LEASE))
    engine.dispose()

    assert 1 == len(waits)


def test_a_repeated_write_that_changes_no_value_is_done(open_real: Callable[..., SqlStore]) -> None:
    """Without the flag FOUND_ROWS the server counts only rows whose values differ."""
    store, key, token = open_real(), a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))

    for _ in range(3):
        store.mark_point_of_no_return(key, token)


def test_a_driver_that_counts_changed_rows_only_is_refused(database_url: str) -> None:
    url = create_engine(database_url).url

    def connect() -> Any:
        return pymysql.connect(host=url.host, port=url.port or 0, user="root", database=url.database)

    engine = create_engine("mysql+pymysql://", creator=connect)
    store = SqlStore(Database(engine))
    with pytest.raises(ConfigurationError, match="FOUND_ROWS"):
        store.read(a_key())
    store.close()
    engine.dispose()
    assert CLIENT.FOUND_ROWS == mysql.FOUND_ROWS


@pytest.mark.parametrize("strategy", ("insert", "row_lock"))
def test_limits_are_exact_among_many_claims(open_real: Callable[..., SqlStore], strategy: str) -> None:
    store = open_real(strategy=strategy)
    tenant = a_key()
    outcomes: list[Any] = []
    begin = threading.Barrier(8)

    def claim() -> None:
        begin.wait(60)
        for _ in range(4):
            key = type(tenant)(a_key().rid, tenant.tid)
            outcomes.append(store.claim(a_request(key), token=a_token(), lease=LEASE, quota=Quota(records=5)))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert (32, 5) == (len(outcomes), sum(isinstance(each, Grant) for each in outcomes))


@pytest.mark.parametrize("strategy", ("insert", "row_lock"))
def test_a_claim_within_a_limit_waits_for_the_one_before_it(
    open_real: Callable[..., SqlStore], database_url: str, strategy: str
) -> None:
    """Between the count of a claim and its row no other claim counts, or both would take the last place."""
    store, other, tenant = open_real(strategy=strategy), open_real(strategy=strategy), a_key()
    claimed: list[Any] = []
    admin = create_engine(database_url, isolation_level="AUTOCOMMIT")

    def claim(which: SqlStore) -> None:
        key = type(tenant)(a_key().rid, tenant.tid)
        claimed.append(which.claim(a_request(key), token=a_token(), lease=LEASE, quota=Quota(records=1)))

    second = threading.Thread(target=claim, args=(other,))

    @event.listens_for(store.database.engine, "after_cursor_execute")
    def claim_between(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "idempotency_quota" in statement and second.ident is None:
            second.start()
            # Here it waits for its turn, before it counts.
            waits = "SELECT count(*) FROM information_schema.processlist WHERE db = database() AND info LIKE 'UPDATE %'"
            assert eventually(lambda: not second.is_alive() or scalar(admin, waits))

    claim(store)
    second.join(timeout=60)
    admin.dispose()

    assert ["Grant", "OverQuota"] == [type(each).__name__ for each in claimed]


def test_letters_and_spaces_of_a_name_are_compared_as_they_are(open_real: Callable[..., SqlStore]) -> None:
    """The default of the server takes a letter and its accent, or its capital, for one. Keys are bytes anyway."""
    store = open_real()
    for name in ("Abc", "abc", "Àbc"):
        store.task_log.report(name, "{}")
    assert {"Abc", "abc", "Àbc"} == store.task_log.reports().keys()


def test_responses_of_megabytes_and_text_beyond_the_basic_plane(open_real: Callable[..., SqlStore]) -> None:
    store, key, token = open_real(), a_key(), a_token()
    payload = type(PAYLOAD)(bytes(range(256)) * 2**12, 201, success=True, byte_size=2**20)
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.quarantine(key, token, "🦭" * 20_000)
    store.complete(key, token, payload, keep=KEEP)

    record = store.claim(a_request(key), token=a_token(), lease=LEASE)
    assert isinstance(record, Record)
    assert payload == record.payload


@pytest.mark.slow
def test_doctor_says_how_large_a_statement_may_be(start_mariadb: StartMariaDb) -> None:
    server = start_mariadb("--max-allowed-packet=4M")
    with server.database() as name:
        make_tables(server.url(name))
        store = SqlStore(Database(server.url(name)))
        (found,) = (each for each in store.health.findings() if each.check == "packets")
        store.close()

    assert "4194304 bytes" in found.text
    assert "max_allowed_packet" in found.remedy


def test_an_upgrade_makes_and_repairs_the_tables(mariadb_server: MariaDbServer) -> None:
    """Each change of a table commits, so an upgrade that was interrupted goes on where it was."""
    with mariadb_server.database() as name:
        store = SqlStore(Database(mariadb_server.url(name)))
        assert LATEST == len(store.schema.upgrade())
        assert ([], []) == (store.schema.upgrade(), store.schema.faults())
        engine = create_engine(mariadb_server.url(name))
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE idempotency_audit"))
            connection.execute(text("DROP INDEX idempotency_expiry ON idempotency_records"))
            connection.execute(text("ALTER TABLE idempotency_outbox DROP COLUMN ready_at"))
        assert store.schema.upgrade()
        assert [] == store.schema.faults()
        assert "ready_at" in [each[0] for each in engine.connect().execute(text("DESCRIBE idempotency_outbox"))]
        engine.dispose()
        store.close()


@pytest.mark.parametrize("last", ("COMMIT", "INSERT"))
def test_a_claim_whose_commit_lost_its_reply_is_granted_to_the_same_worker(
    open_real: Callable[..., SqlStore], last: str
) -> None:
    """It may be done although the connection broke: a statement that commits by itself, or the COMMIT of a transaction."""
    store, key, token = open_real(), a_key(), a_token()
    if last == "COMMIT":
        count_by_a_row(store)
    granted(store.claim(a_request(a_key()), token=a_token(), lease=LEASE))
    lost: list[str] = []

    @event.listens_for(store.database.engine, "after_cursor_execute")
    def lose_the_reply(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(last) and not lost:
            lost.append(last)
            raise pymysql.err.OperationalError(2013, "Lost connection to MySQL server during query")

    grant = granted(store.claim(a_request(key), token=token, lease=LEASE))

    assert ([last], token, 1) == (lost, grant.token, grant.attempt)


@pytest.mark.parametrize("scheme", ("mysql+pymysql", "mariadb+pymysql"))
def test_each_name_of_the_dialect_leads_to_the_same_store(
    open_real: Callable[..., SqlStore], database_url: str, scheme: str
) -> None:
    store, key, token = open_real(f"{scheme}:{database_url.partition(':')[2]}"), a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE, quota=Quota(records=5)))
    store.complete(key, token, PAYLOAD, keep=KEEP)

    assert MYSQL == store.database.dialect.name
    assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Record)
    assert (1, []) == (store.ledger.usage(key.tid).records, store.schema.faults())
    assert store.recovery.force_release(SeenRecord(key, store.read(key) or pytest.fail("it is gone")))


def test_what_a_write_returns_is_what_it_wrote(open_real: Callable[..., SqlStore], database_url: str) -> None:
    """Between a write and the read of its row no other worker comes in."""
    store, key, token = open_real(), a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    seen: list[str] = []
    other = open_real()

    @event.listens_for(store.database.engine, "after_cursor_execute")
    def claim_between(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE") and not seen:
            seen.append(type(other.claim(a_request(key), token=a_token(), lease=LEASE)).__name__)

    released = store.release(key, token)

    assert (["InFlight"], None) == (seen, released)


def test_a_relay_waits_for_the_claim_of_another(open_real: Callable[..., SqlStore], database_url: str) -> None:
    """Under a lock of the session, which ends with it."""
    database = open_real().database
    asked = threading.Event()

    def second(connection: Any) -> bool:
        asked.set()
        with mysql.in_turn(connection) as mine:
            return mine

    def first(connection: Any) -> bool:
        with mysql.in_turn(connection) as mine:
            outcome = database.run(second)
        return mine and not outcome

    assert database.run(first)
    assert database.run(second)


def test_a_worker_that_has_locked_one_task_locks_another(open_real: Callable[..., SqlStore]) -> None:
    """A condition with OR limits which row of the same name is replaced, and no row of another name."""
    log, token = open_real().task_log, a_token()

    assert log.lock("one", token, lease=LEASE)
    assert log.lock("two", token, lease=LEASE)
    assert [False, False] == [log.lock(name, a_token(), lease=LEASE) for name in ("one", "two")]


@pytest.mark.parametrize(
    ("by_row", "claim", "replay"),
    (
        (False, ["INSERT"], ["INSERT", "SELECT"]),
        (True, ["SELECT", "START", "UPDATE", "INSERT", "COMMIT"], ["SELECT"]),
    ),
)
def test_a_first_claim_and_a_replay_take_as_many_statements_as_the_guide_says(
    open_real: Callable[..., SqlStore], by_row: bool, claim: list[str], replay: list[str]
) -> None:
    store, key, token = open_real(), a_key(), a_token()
    if by_row:
        count_by_a_row(store)
    store.claim(a_request(a_key()), token=a_token(), lease=LEASE)
    with sent(store) as first:
        granted(store.claim(a_request(key), token=token, lease=LEASE))
    with sent(store) as completed:
        store.complete(key, token, PAYLOAD, keep=KEEP)
    with sent(store) as replayed:
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert (claim, ["UPDATE"], replay) == tuple(
        [each.split()[0] for each in sent] for sent in (first, completed, replayed)
    )


def test_a_locked_row_is_no_new_key_of_a_quota(open_real: Callable[..., SqlStore], database_url: str) -> None:
    store, key = open_real(), a_key()
    limited: dict[str, Any] = {"lease": LEASE, "quota": Quota(new_keys=NewKeys(9, 3600.0))}
    request = a_request(key, on_expiry=OnExpiry.TAKEOVER)
    token = a_token()
    granted(store.claim(request, token=token, **limited))
    store.release(key, token)
    before = store.ledger.usage(key.tid).new_keys
    engine = create_engine(database_url)
    with engine.connect() as holder:
        holder.execute(text("SELECT * FROM idempotency_records WHERE record_id = :rid FOR UPDATE"), {"rid": key.rid})

        assert isinstance(store.claim(request, token=a_token(), **limited), InFlight)
    engine.dispose()

    assert before == store.ledger.usage(key.tid).new_keys


@pytest.mark.slow
def test_a_response_that_is_too_large_for_a_statement_is_not_stored_in_part(start_mariadb: StartMariaDb) -> None:
    """The server closes the connection. The record stays in flight, and its worker goes on with a smaller response."""
    server = start_mariadb("--max-allowed-packet=1M")
    with server.database() as name:
        make_tables(server.url(name))
        store = SqlStore(Database(server.url(name)))
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        large = type(PAYLOAD)(bytes(2**21), 201, success=True, byte_size=2**21)

        with pytest.raises(StoreUnavailable):
            store.complete(key, token, large, keep=KEEP)
        found = store.read(key)
        assert found is not None
        assert (token, None) == (found.token, found.payload)
        store.complete(key, token, PAYLOAD, keep=KEEP)
        store.close()


def test_a_response_that_was_locked_in_one_pass_is_removed_in_a_later_one(open_real: Callable[..., SqlStore]) -> None:
    """Also if it had expired long before that pass, and others after it: a rotation locks rows while the janitor works."""
    clock = FrozenClock()
    store = open_real(clock=lambda: clock.now)
    keys = [a_key(), a_key()]
    for key, keep in zip(keys, (1, 400), strict=True):
        token = a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        store.complete(key, token, PAYLOAD, keep=keep, remember=86_400)
    clock.advance(500)
    with store.database.base.connect() as holder:
        holder.execute(
            text("SELECT * FROM idempotency_records WHERE record_id = :rid FOR UPDATE"), {"rid": keys[0].rid}
        )
        assert [1, 0] == [store.expiry.sweep(horizon=clock.now, limit=25) for _ in range(2)]
    clock.advance(300)

    assert [1, 0] == [store.expiry.sweep(horizon=clock.now, limit=25) for _ in range(2)]


def test_a_pass_over_responses_does_not_read_those_that_are_removed(open_real: Callable[..., SqlStore]) -> None:
    """PostgreSQL has an index without them. Here a pass begins a minute before the place that the last one has reached."""
    clock = FrozenClock()
    store = open_real(clock=lambda: clock.now)

    def stored(*, keep: float) -> StorageKey:
        key, token = a_key(), a_token()
        granted(store.claim(a_request(key), token=token, lease=LEASE))
        store.complete(key, token, PAYLOAD, keep=keep, remember=86_400)
        return key

    def passed() -> tuple[int, int]:
        read = "SELECT variable_value FROM information_schema.session_status WHERE variable_name = 'Handler_read_next'"
        before = int(store.database.run(lambda connection: connection.exec_driver_sql(read).scalar_one()))
        removed = store.expiry.sweep(horizon=clock.now, limit=25)
        return removed, int(
            store.database.run(lambda connection: connection.exec_driver_sql(read).scalar_one())
        ) - before

    for _ in range(60):
        stored(keep=10)
    clock.advance(100)
    locked = stored(keep=1)
    clock.advance(10)
    with store.database.base.connect() as holder:
        holder.execute(text("SELECT * FROM idempotency_records WHERE record_id = :rid FOR UPDATE"), {"rid": locked.rid})
        assert [25, 25, 10] == [passed()[0] for _ in range(3)]
    late = stored(keep=1)
    clock.advance(20)
    (both, _), (none, read) = passed(), passed()
    clock.advance(-20)
    early = stored(keep=0.000001)
    clock.advance(1)
    (again, _) = passed()

    assert (2, 0, 1) == (both, none, again)
    assert read < 20
    for key in (locked, late, early):
        assert isinstance(store.claim(a_request(key), token=a_token(), lease=LEASE), Expired)
