"""With `effects="transactional"` the inbox row and the rows of the work are one COMMIT, or none of them is written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, make_url, select, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from flask_idempotency import current_claim
from flask_idempotency.consumers import Dead, Inbox, Later, Processed
from flask_idempotency.engine.errors import ConfigurationError, NotCommitted
from flask_idempotency.testing.proxy import TcpProxy
from tests.apps import LONG
from tests.consumers.messenger import POINTS
from tests.long import unless_long
from tests.stores.sql.conftest import (
    database_url,
    make_engine,
    on_postgresql,
    on_sqlite,
    open_,
    shop,
    shop_database,
    shop_file,
)
from tests.stores.sql.shops import Account, Payment, Shop, open_shop

__all__ = ["database_url", "make_engine", "open_", "shop", "shop_database", "shop_file"]

MESSAGES = 10
KILLS = unless_long(2, long=100)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def inbox(shop: Shop) -> Inbox:
    return shop.idempotency.inbox("billing", effects="transactional")


def deliver(shop: Shop, inbox: Inbox, work: Any = None, message_id: str = "m-1") -> Any:
    def pays() -> str:
        shop.pay()
        return "paid"

    with shop.app.app_context():
        return inbox.process(message_id, work or pays)


def test_rows_and_record_are_committed_together_and_once(shop: Shop, inbox: Inbox) -> None:
    verdicts = [deliver(shop, inbox) for _ in range(3)]

    assert [Processed("paid", replayed=False), *[Processed("paid", replayed=True)] * 2] == verdicts
    assert (1, [100]) == (shop.payments(), shop.runs)


def test_what_fails_is_rolled_back_and_runs_again(shop: Shop, inbox: Inbox) -> None:
    def fails() -> None:
        shop.pay()
        shop.db.session.flush()
        raise ValueError("no stock")

    with pytest.raises(ValueError, match="no stock"):
        deliver(shop, inbox, fails)

    assert 0 == shop.payments()
    assert Processed("paid", replayed=False) == deliver(shop, inbox)
    assert 1 == shop.payments()


def test_an_interrupted_worker_leaves_no_rows_and_frees_the_message(shop: Shop, inbox: Inbox) -> None:
    def stops() -> None:
        shop.pay()
        shop.db.session.flush()
        raise SystemExit

    with pytest.raises(SystemExit):
        deliver(shop, inbox, stops)

    assert 0 == shop.payments()
    assert Processed("paid", replayed=False) == deliver(shop, inbox)


def test_many_messages_in_one_application_context(shop: Shop, inbox: Inbox) -> None:
    """As a consumer has it: the session lives on from message to message."""

    def fails() -> None:
        shop.pay()
        raise ZeroDivisionError

    with shop.app.app_context():
        for number in range(5):
            for _ in range(2):
                inbox.process(f"m-{number}", shop.pay)
            with pytest.raises(ZeroDivisionError):
                inbox.process(f"bad-{number}", fails)

    assert 5 == shop.payments()


def test_a_violated_constraint_at_commit_is_raised_and_the_message_is_free(shop: Shop, inbox: Inbox) -> None:
    with pytest.raises(NotCommitted):
        deliver(shop, inbox, lambda: shop.pay(account=404))

    assert 0 == shop.payments()
    assert Processed("paid", replayed=False) == deliver(shop, inbox)


def test_a_violated_constraint_in_the_work_is_raised(shop: Shop, inbox: Inbox) -> None:
    def twice() -> None:
        shop.db.session.add(Account(id=1))
        shop.db.session.flush()

    with pytest.raises(IntegrityError):
        deliver(shop, inbox, twice)
    assert Processed("paid", replayed=False) == deliver(shop, inbox)


@on_postgresql
def test_a_serialization_failure_in_the_work_is_no_failure_of_the_message(shop: Shop, inbox: Inbox) -> None:
    def conflicts() -> None:
        shop.pay()
        shop.db.session.flush()
        shop.db.session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$"))

    assert Later(1.0, "transaction-conflict") == deliver(shop, inbox, conflicts)
    assert 0 == shop.payments()
    assert Processed("paid", replayed=False) == deliver(shop, inbox)
    assert 1 == shop.payments()


@on_postgresql
def test_so_is_one_at_commit(shop: Shop, inbox: Inbox) -> None:
    once = iter([1])

    def conflict(connection: Any) -> None:
        if next(once, None):
            connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$"))

    event.listen(shop.db_engine, "commit", conflict)

    assert Later(1.0, "transaction-conflict") == deliver(shop, inbox)
    assert 0 == shop.payments()
    assert Processed("paid", replayed=False) == deliver(shop, inbox)
    assert 1 == shop.payments()


@on_sqlite
def test_a_commit_whose_reply_is_lost_is_looked_up(shop: Shop, inbox: Inbox) -> None:
    """SQLite commits before the session's listeners run: their failure is no failure of the message."""
    once = iter([1])

    def fails(session: Session) -> None:
        if next(once, None):
            raise OperationalError("COMMIT", {}, Exception("the reply was lost"))

    with shop.app.app_context():
        event.listen(shop.db.session.session_factory, "after_commit", fails)
    assert Processed("paid", replayed=False) == deliver(shop, inbox)
    assert Processed("paid", replayed=True) == deliver(shop, inbox)
    assert 1 == shop.payments()


def test_a_commit_of_unknown_outcome_keeps_the_message(
    shop: Shop, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows may be there. The next delivery finds out, because they are there together with the record."""
    from flask_idempotency.engine.errors import StoreUnavailable
    from flask_idempotency.stores.sql.transactional.transaction import SessionTransaction

    def unknown(self: Any, *args: Any, **options: Any) -> None:
        monkeypatch.undo()
        raise StoreUnavailable("the commit may be done or not")

    monkeypatch.setattr(SessionTransaction, "settle", unknown)

    assert Later(2.0, "commit-unknown") == deliver(shop, inbox)
    shop.app.extensions["idempotency"].built.engine._deps.repeater.drain(60.0)
    assert Processed("paid", replayed=False) == deliver(shop, inbox)
    assert 1 == shop.payments()


@pytest.fixture
def line(database_url: str) -> Iterator[TcpProxy]:
    """A way to the database that loses a COMMIT of the session."""
    with TcpProxy(make_url(database_url).port or 5432, marker=b"COMMIT\0") as line:
        yield line


@on_postgresql
@pytest.mark.parametrize("lost", ("request", "reply"))
def test_a_commit_that_is_cut_off_is_looked_up_in_the_record(
    open_: Any, database_url: str, line: TcpProxy, lost: str
) -> None:
    shop = open_()
    through = open_shop(make_url(database_url).set(port=line.port).render_as_string(hide_password=False), existing=True)
    inbox = through.idempotency.inbox("billing", effects="transactional")
    # SQLAlchemy asks the driver what it wants to know at first, and that commits as well.
    assert Processed("paid", replayed=False) == deliver(through, inbox, None, "m-0")
    line.lose_request() if lost == "request" else line.lose_reply()
    first = deliver(through, inbox)
    again = deliver(through, inbox)
    through.close()

    if lost == "reply":
        assert [Processed("paid", replayed=False), Processed("paid", replayed=True)] == [first, again]
    else:
        assert [Later(1.0, "transaction-conflict"), Processed("paid", replayed=False)] == [first, again]
    assert 2 == shop.payments()


def test_a_released_value_leaves_no_rows(shop: Shop) -> None:
    inbox = shop.idempotency.inbox("billing", effects="transactional", decide=lambda value, error: "release")

    assert Later(1.0, "released") == deliver(shop, inbox)
    assert 0 == shop.payments()


def test_keep_rows_commits_what_would_be_released(shop: Shop) -> None:
    inbox = shop.idempotency.inbox("billing", effects="transactional", decide=lambda value, error: "release")

    def declines() -> str:
        shop.pay()
        current_claim.keep_rows()
        return "declined"

    assert Processed("declined", replayed=False) == deliver(shop, inbox, declines)
    assert 1 == shop.payments()


def test_a_message_that_commits_by_itself_and_fails_is_dead(shop: Shop, inbox: Inbox) -> None:
    def commits() -> None:
        shop.pay()
        shop.db.session.commit()
        raise ValueError("after the commit")

    with pytest.raises(ValueError, match="after the commit"):
        deliver(shop, inbox, commits)
    assert Dead("outcome-unknown") == deliver(shop, inbox)
    assert 1 == shop.payments()


def test_a_transactional_message_in_transactional_work_is_refused(shop: Shop, inbox: Inbox) -> None:
    def nested() -> None:
        inbox.process("m-2", shop.pay)

    with pytest.raises(ConfigurationError):
        deliver(shop, inbox, nested)
    assert [Processed("paid", replayed=False)] * 2 == [deliver(shop, inbox, None, each) for each in ("m-1", "m-2")]


def test_without_protection_the_rows_are_committed_all_the_same(open_: Any) -> None:
    shop = open_(IDEMPOTENCY_ENABLED=False)
    inbox = shop.idempotency.inbox("billing", effects="transactional")

    assert Processed("paid", replayed=False, kept=False) == deliver(shop, inbox)
    assert 1 == shop.payments()


# Without a Flask application.


@pytest.fixture
def session(shop: Shop, database_url: str) -> Iterator[Any]:
    engine = create_engine(database_url)
    session = scoped_session(sessionmaker(engine))
    yield session
    session.remove()
    engine.dispose()


def config(url: str) -> dict[str, str]:
    return {"IDEMPOTENCY_STORE": url, "IDEMPOTENCY_SECRET": LONG}


def test_an_inbox_without_an_application_commits_with_a_session(shop: Shop, session: Any, database_url: str) -> None:
    inbox = Inbox.standalone(config(database_url), "billing", session=session, effects="transactional")

    def fails() -> None:
        session.add(Payment(amount=1))
        session.flush()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        inbox.process("m-1", fails)
    verdicts = [inbox.process("m-1", lambda: session.add(Payment(amount=100))) for _ in range(2)]

    assert [Processed(None, replayed=False), Processed(None, replayed=True)] == verdicts
    assert [100] == list(session.execute(select(Payment.amount)).scalars())


def test_the_session_must_be_on_the_database_of_the_store(session: Any, tmp_path: Path) -> None:
    inbox = Inbox.standalone(
        config(f"sqlite:///{tmp_path / 'other.db'}"), "billing", session=session, effects="transactional"
    )
    with pytest.raises(ConfigurationError, match="another database"):
        inbox.process("m-1", lambda: None)


@pytest.mark.parametrize("store", ("redis://localhost/0", "memory://"))
def test_a_session_is_for_sql_stores(session: Any, store: str) -> None:
    with pytest.raises(ConfigurationError, match="database of the session"):
        Inbox.standalone(config(store), "billing", session=session)


def test_a_session_is_a_scoped_one(database_url: str) -> None:
    with pytest.raises(ConfigurationError, match="scoped_session"):
        Inbox.standalone(config(database_url), "billing", session=sessionmaker())


def test_transactional_work_needs_a_session(database_url: str) -> None:
    with pytest.raises(ConfigurationError, match="session=…"):
        Inbox.standalone(config(database_url), "billing", effects="transactional")


# Killed workers.


def run_messenger(*arguments: str) -> str:
    """Run the program, which forks the workers that are killed: their imports cost more than all that they do."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.consumers.messenger", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=600)
    assert 0 == done.returncode, done.stderr[-3000:]
    return done.stderr


@pytest.mark.slow
def test_a_killed_worker_leaves_one_set_of_rows(shop: Shop, database_url: str) -> None:
    """Before its COMMIT all is undone; after it, the next delivery is acknowledged and does nothing."""
    inbox = shop.idempotency.inbox("billing", effects="transactional", lease=2, in_flight="wait", wait=300)
    run_messenger("killed", database_url)

    replayed = {point: deliver(shop, inbox, None, f"m-{point}").replayed for point in POINTS}
    again = [deliver(shop, inbox, None, f"m-{point}").replayed for point in POINTS]

    assert {point: point == "committed" for point in POINTS} == replayed
    assert [True] * len(POINTS) == again
    assert len(POINTS) == shop.payments()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_that_are_killed_at_any_moment_leave_one_row_for_each_message(shop: Shop, database_url: str) -> None:
    """Two at a time, each killed in the middle of some message. The last ones are left to finish."""
    run_messenger("crowds", database_url, str(MESSAGES), str(KILLS))

    assert MESSAGES == shop.payments()


@pytest.mark.slow
@on_postgresql
def test_children_of_a_worker_that_used_its_database_write_each_row_once(shop: Shop, database_url: str) -> None:
    """They inherit its connections. Two processes on one socket read each other's results."""
    errors = run_messenger("forked", database_url, "12")

    assert "OperationalError" not in errors
    assert 12 == shop.payments()
