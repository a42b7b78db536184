"""A worker that was paused past its lease does not overwrite its successor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
from sqlalchemy import BigInteger, Engine, Update, delete, insert, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from flask_idempotency.sql import fenced
from tests.stores.sql.conftest import on_sqlite

MINE, THEIRS = 1_700_000_000_000_007, 1_700_000_000_000_008


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]
    written_by: Mapped[int | None] = mapped_column(BigInteger)


TABLE = Base.metadata.tables["accounts"]
Builds: TypeAlias = Callable[[int, int], Update]


def core(balance: int, fence: int) -> Update:
    return fenced(update(TABLE).where(TABLE.c.id == 1).values(balance=balance), TABLE.c.written_by, fence)


def core_with_a_dict(balance: int, fence: int) -> Update:
    statement = update(TABLE).where(TABLE.c.id == 1).values({"balance": balance})
    return fenced(statement, TABLE.c.written_by, fence)


def orm(balance: int, fence: int) -> Update:
    return fenced(update(Account).where(Account.id == 1).values(balance=balance), Account.written_by, fence)


def orm_with_a_dict(balance: int, fence: int) -> Update:
    statement = update(Account).where(Account.id == 1).values({Account.balance: balance})
    return fenced(statement, Account.written_by, fence)


def values_afterwards(balance: int, fence: int) -> Update:
    return fenced(update(Account), Account.written_by, fence).where(Account.id == 1).values(balance=balance)


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """Two accounts that nobody has written to yet."""
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.execute(insert(Account), [{"id": number, "balance": 0} for number in (1, 2)])
        session.commit()
        yield session


def rows(session: Session) -> list[tuple[Any, ...]]:
    session.rollback()
    return [tuple(row) for row in session.execute(select(TABLE).order_by(TABLE.c.id))]


def matched(session: Session, statement: Update) -> int:
    count: int = session.execute(statement).rowcount  # type: ignore[attr-defined]
    session.commit()
    return count


@on_sqlite
@pytest.mark.parametrize("build", (core, core_with_a_dict, orm, orm_with_a_dict, values_afterwards))
def test_a_later_claim_writes_over_an_earlier_one_and_never_the_reverse(session: Session, build: Builds) -> None:
    """The paused worker matches no row, so it knows. The same attempt may write twice."""
    assert [1, 1] == [matched(session, build(100, MINE)), matched(session, build(150, MINE))]
    assert 1 == matched(session, build(200, THEIRS))
    assert (0, [(1, 200, THEIRS), (2, 0, None)]) == (matched(session, build(100, MINE)), rows(session))


def test_a_paused_worker_that_read_the_row_matches_no_row(engine: Engine, session: Session) -> None:
    account = session.get_one(Account, 1)
    assert 0 == account.balance
    session.rollback()
    with Session(engine) as other:
        assert 1 == matched(other, orm(200, THEIRS))

    assert (0, (1, 200, THEIRS)) == (matched(session, orm(100, MINE)), rows(session)[0])


@on_sqlite
def test_every_row_is_fenced_by_itself(session: Session) -> None:
    """One statement may touch rows of which only some have been written to since."""
    matched(session, orm(200, THEIRS))

    assert 1 == matched(session, fenced(update(Account).values(balance=100), Account.written_by, MINE))
    assert [(1, 200, THEIRS), (2, 100, MINE)] == rows(session)


@on_sqlite
def test_the_fence_wins_over_another_value_for_its_column(session: Session) -> None:
    """A row that was written without a mark would be open to everybody."""
    matched(session, fenced(update(Account).values(balance=1, written_by=None), Account.written_by, MINE))

    assert [MINE, MINE] == [row[2] for row in rows(session)]


def test_only_an_update_and_a_whole_number_are_accepted() -> None:
    """Without a row there is nothing to compare, and with NULL no row would match."""
    others: tuple[Any, ...] = (insert(TABLE), delete(TABLE), select(TABLE), text("UPDATE accounts SET id = 1"), TABLE)
    for statement in others:
        with pytest.raises(TypeError, match=r"fenced\(\) takes an UPDATE"):
            fenced(statement, TABLE.c.written_by, MINE)
    fences: tuple[Any, ...] = (None, "7", 7.0, True)
    for fence in fences:
        with pytest.raises(TypeError, match="a whole number for a fence"):
            fenced(update(TABLE), TABLE.c.written_by, fence)
