"""What a shop's database says, read behind the shop's back."""

from __future__ import annotations

from collections import Counter, defaultdict

from sqlalchemy import create_engine, func, insert, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from flask_idempotency.stores.sql.migrations.runner import upgrade
from tests.e2e.shop import ACCOUNTS, Account, Base, Payment


class Books:
    """The tables of one shop, made when this is."""

    def __init__(self, url: str) -> None:
        self.url = url
        # One connection would be stale after a crash of the server.
        self._engine = create_engine(url, pool_pre_ping=True, connect_args=_unprepared(url))
        upgrade(self._engine)
        Base.metadata.create_all(self._engine)
        with self._engine.begin() as connection:
            connection.execute(insert(Account), [{"id": number, "balance": 0} for number in range(ACCOUNTS)])

    def payments(self) -> dict[str, list[str]]:
        """The ids of all payments, by case."""
        found = defaultdict(list)
        with self._engine.connect() as connection:
            for case, number in connection.execute(select(Payment.case, Payment.id)):
                found[case].append(number)
        return dict(found)

    def balance(self) -> int:
        """Of all accounts together."""
        with self._engine.connect() as connection:
            balance: int = connection.execute(select(func.sum(Account.balance))).scalar_one()
            return balance

    def records(self) -> Counter[str]:
        """How many keys are in which state."""
        with self._engine.connect() as connection:
            rows = connection.execute(text("SELECT state, count(*) FROM idempotency_records GROUP BY state"))
            return Counter({str(state): int(count) for state, count in rows})

    def locked(self) -> bool:
        """Whether a transaction holds a record, or all of a SQLite file."""
        sqlite = self._engine.dialect.name == "sqlite"
        engine = create_engine(
            self.url, poolclass=NullPool, connect_args={"timeout": 0} if sqlite else _unprepared(self.url)
        )
        take = "BEGIN IMMEDIATE" if sqlite else "SELECT 1 FROM idempotency_records FOR UPDATE NOWAIT"
        try:
            with engine.connect() as connection:
                connection.execute(text(take))
                connection.rollback()
        except OperationalError:
            return True
        return False

    def ask(self, question: str) -> int:
        """A number that the server knows about this database; what the question changes is committed."""
        with self._engine.begin() as connection:
            answer: int = connection.execute(text(question)).scalar_one()
            return answer

    def end_sessions(self, *, in_mid_view: bool) -> int:
        """End the sessions of all others in this database, or of those in a transaction. Return how many."""
        if self._engine.dialect.name == "postgresql":
            which = "state = 'idle in transaction'" if in_mid_view else "pid <> pg_backend_pid()"
            ends = (
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND "
            )
            return self.ask(ends + which)
        transactions = (
            " AND id IN (SELECT trx_mysql_thread_id FROM information_schema.innodb_trx)" if in_mid_view else ""
        )
        others = "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()"
        with self._engine.connect() as connection:
            found = connection.scalars(text(others + transactions)).all()
            for number in found:
                connection.execute(text(f"KILL {number}"))
        return len(found)

    def close(self) -> None:
        self._engine.dispose()


def _unprepared(url: str) -> dict[str, object]:
    # A pooler gives each transaction to another of its connections, which has not heard of what was prepared.
    return {"prepare_threshold": None} if url.startswith("postgresql") else {}
