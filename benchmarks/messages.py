"""What an inbox costs for each message, beside the bare handler and beside the same inbox written by hand.

By hand is what a good engineer writes. On Redis, one command claims, and a script that compares the token stores the value.
In a database, the id of the message is a row of the handler's own transaction. Neither renews a lease, compares payloads or
waits, and the second lets two workers do the same work until one of them commits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias
from uuid import uuid4

import redis
from sqlalchemy import Engine, Integer, String, create_engine, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from benchmarks.apps import SECRET
from benchmarks.harness import timed
from benchmarks.report import Row, Section
from flask_idempotency.consumers import Inbox, Processed
from flask_idempotency.stores.sql.schema import metadata as records_metadata

BARE: Final = "bare handler"
HAND: Final = "by hand"
HAND_AGAIN: Final = "by hand, delivered again"
INBOX: Final = "inbox"
AGAIN: Final = "inbox, delivered again"
LEASE_MS: Final = 30_000
KEEP_MS: Final = 7 * 24 * 3600 * 1000

COMPLETE: Final = """
if redis.call("GET", KEYS[1]) ~= ARGV[1] then return 0 end
redis.call("SET", KEYS[1], ARGV[2], "PX", ARGV[3])
return 1
"""

Call: TypeAlias = Callable[[], object]
Scoped: TypeAlias = "scoped_session[Session]"


class Base(DeclarativeBase):
    pass


class Booking(Base):
    __tablename__ = "bookings"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    amount: Mapped[int] = mapped_column(Integer)


class Handled(Base):
    __tablename__ = "handled"
    message_id: Mapped[str] = mapped_column(String, primary_key=True)
    value: Mapped[str] = mapped_column(String)


def section(url: str, *, rounds: int, messages: int) -> Section:
    """Time each case, interleaved by round. `url` is that of an empty Redis."""
    with ExitStack() as stack:
        cases = {
            (store, case): call
            for store, calls in (
                ("Redis", stack.enter_context(_redis(url))),
                ("SQLite, transactional", stack.enter_context(_sqlite())),
            )
            for case, call in calls.items()
        }
        taken: dict[tuple[str, str], list[tuple[float, float]]] = {name: [] for name in cases}
        for call in cases.values():
            call()
        for _ in range(rounds):
            for name, call in cases.items():
                taken[name].append(timed(call, messages))
    note = (
        "Microseconds of one message: `CPU` is the calling thread's, and the ratio is of that; `wall` includes the server and "
        "the disk. On Redis the handler does nothing; on SQLite it inserts one row, and is committed."
    )
    return Section("Messages", note, [_row(name, taken) for name in taken])


def _row(name: tuple[str, str], taken: dict[tuple[str, str], list[tuple[float, float]]]) -> Row:
    store, case = name
    used, passed = (median(each[part] for each in taken[name]) * 1e6 for part in range(2))
    cells: dict[str, float | str] = {"CPU": used}
    by_hand = {INBOX: HAND, AGAIN: HAND_AGAIN}.get(case)
    if by_hand is not None:
        cells["× by hand"] = median(
            ours[0] / theirs[0] for ours, theirs in zip(taken[name], taken[store, by_hand], strict=True)
        )
    return Row(f"{store}: {case}", {**cells, "wall": passed})


def _inbox_calls(inbox: Inbox, work: Call, ids: Iterator[int]) -> dict[str, Call]:
    def first() -> None:
        verdict = inbox.process(f"m-{next(ids)}", work)
        assert isinstance(verdict, Processed)

    def again() -> None:
        verdict = inbox.process("again", work)
        assert isinstance(verdict, Processed)

    again()
    return {INBOX: first, AGAIN: again}


@contextmanager
def _redis(url: str) -> Iterator[dict[str, Call]]:
    """Yield the cases on Redis."""
    ids = count()
    inbox = Inbox.standalone({"IDEMPOTENCY_STORE": url, "IDEMPOTENCY_SECRET": SECRET}, "bench")
    with redis.Redis.from_url(url) as client:
        complete: Any = client.register_script(COMPLETE)

        def by_hand(message_id: str) -> None:
            key, token = f"hand:{message_id}", uuid4().hex
            if client.set(key, token, nx=True, px=LEASE_MS):
                complete(keys=[key], args=[token, json.dumps(None), KEEP_MS])
            else:
                held = client.get(key)
                assert isinstance(held, bytes)
                json.loads(held)

        by_hand("again")
        yield {
            BARE: _nothing,
            HAND: lambda: by_hand(f"m-{next(ids)}"),
            HAND_AGAIN: lambda: by_hand("again"),
            **_inbox_calls(inbox, _nothing, ids),
        }


def _nothing() -> None:
    return None


@contextmanager
def _sqlite() -> Iterator[dict[str, Call]]:
    """Yield the cases on a SQLite file in WAL mode."""
    ids = count()
    with TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'bench.sqlite3'}"
        engine = create_engine(url)
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        Base.metadata.create_all(engine)
        records_metadata.create_all(engine)
        session: Scoped = scoped_session(sessionmaker(engine))
        config = {"IDEMPOTENCY_STORE": url, "IDEMPOTENCY_SECRET": SECRET}
        inbox = Inbox.standalone(config, "bench", session=session, effects="transactional")

        def book() -> None:
            session.add(Booking(amount=100))

        def bare() -> None:
            book()
            session.commit()

        def by_hand(message_id: str) -> None:
            found = session.get(Handled, message_id)
            if found is not None:
                json.loads(found.value)
                session.rollback()
                return
            book()
            session.execute(insert(Handled).values(message_id=message_id, value=json.dumps(None)))
            session.commit()

        by_hand("again")
        try:
            yield {
                BARE: bare,
                HAND: lambda: by_hand(f"m-{next(ids)}"),
                HAND_AGAIN: lambda: by_hand("again"),
                **_inbox_calls(inbox, book, ids),
            }
        finally:
            _close(session, engine)


def _close(session: Scoped, engine: Engine) -> None:
    session.remove()
    engine.dispose()
