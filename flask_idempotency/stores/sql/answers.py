"""Answers that are there already: a walk through them, others in their place, and those that nobody can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, IntegrityError

from flask_idempotency.engine.capabilities import Answer, Page
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Payload
from flask_idempotency.stores.sql import answer_statements, completions
from flask_idempotency.stores.sql.completing import Completing, entry, facts_of, is_sealed, shard_of
from flask_idempotency.stores.sql.database import Database, together
from flask_idempotency.stores.sql.dialects import Dialect
from flask_idempotency.stores.sql.rows import row_of
from flask_idempotency.stores.sql.schema import COMPLETED, FAILED, RESPONSES

_LAST: Final = b"\xff" * 33
"""Behind every key there is: those have 32 bytes."""


class SqlAnswers:
    """Implements `upkeep.Answers`, and quarantines what cannot be read. `now` as for `SqlDataKeys`."""

    def __init__(
        self, database: Database, completing: Callable[[], Completing], *, now: Callable[[], int | None]
    ) -> None:
        self._database = database
        self._completing = completing
        self._now = now

    def walk(self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None) -> Page:
        asked = {
            "my_after": after,
            "my_limit": limit,
            "my_tenant_id": tid,
            "my_wrapping_key_id": other_than,
            "now": self._now(),
        }

        def page(connection: Connection) -> tuple[Sequence[Any], bytes | None]:
            ends = connection.execute(self._sent.page_end, asked).scalars().all()
            last = ends[0] if len(ends) > 1 else None
            return connection.execute(self._sent.page, {**asked, "my_until": last or _LAST}).all(), last

        # Not the connections for records: a page of large answers may take its time.
        found, last = self._database.take_time(page)
        return Page(tuple(answer for row in found if (answer := _answer(row)) is not None), after=last)

    def replace(self, key: StorageKey, old: Payload, new: Payload) -> bool:
        parameters = {**_seen(key, old, self._now()), **facts_of(new, "my")}

        def replace(connection: Connection) -> bool:
            if new.byte_size == old.byte_size:
                return self._replace(connection, parameters)
            with together(connection):
                return self._replace(connection, parameters, key=key, grown=new.byte_size - old.byte_size)

        return self._database.run(replace)

    def count(self) -> Mapping[str, int]:
        found = self._database.take_time(lambda connection: connection.execute(self._sent.count_answers).all())
        return {row.wrapping_key_id: row.responses for row in found}

    def condemn(self, key: StorageKey, payload: Payload) -> None:
        """As `Store.condemn` says."""
        parameters = _seen(key, payload, self._now())

        def condemn(connection: Connection) -> None:
            with together(connection):
                found = connection.execute(self._sent.holds, parameters).one_or_none()
                if found is not None and connection.execute(self._sent.condemn, parameters).one_or_none() is not None:
                    self._take_away(connection, key, found)

        self._database.run(condemn)

    def distrust(self, key: StorageKey) -> None:
        """A row that cannot be read at all goes where time does not end it, as far as it can be written."""
        parameters = {"my_record_id": key.rid, "now": self._now()}

        def distrust(connection: Connection) -> None:
            with together(connection):
                found = connection.execute(self._sent.unreadable, parameters).one_or_none()
                if found is None:
                    return
                connection.execute(self._sent.distrust, parameters)
                if found.state in (COMPLETED, FAILED) and _can_be_counted(found):
                    self._take_away(connection, key, found)

        try:
            self._database.run(distrust)
        except (IntegrityError, DataError, CorruptRecord):
            # It breaks rules that it would break again: so it stays as it is, and is refused each time.
            return

    def _replace(
        self, connection: Connection, parameters: dict[str, Any], *, key: StorageKey | None = None, grown: int = 0
    ) -> bool:
        before = None if key is None else connection.execute(self._sent.holds, parameters).one_or_none()
        statement = self._sent.replace_sealed if is_sealed(parameters) else self._sent.replace
        if connection.execute(statement, parameters).one_or_none() is None:
            if connection.execute(self._sent.holds, parameters).one_or_none() is not None:
                self._completing().refuse_without_key(connection, parameters)
            return False
        if key is not None and before is not None and before.in_quota:
            self._book(connection, key, bucket_end=before.expires_at, records=0, stored=grown)
        return True

    def _take_away(self, connection: Connection, key: StorageKey, found: Any) -> None:
        if found.in_quota:
            self._book(connection, key, bucket_end=found.expires_at, records=-1, stored=-found.response_size)

    def _book(self, connection: Connection, key: StorageKey, *, bucket_end: int, records: int, stored: int) -> None:
        added = entry(kind=RESPONSES, bucket_end=bucket_end, window_length=0, records=records, stored=stored)
        connection.execute(self._sent.book, {"my_tenant_id": key.tid, "my_shard": shard_of(key), **added})

    @cached_property
    def _sent(self) -> _SentResponse:
        return _SentResponse(self._database.dialect)


class _SentResponse:
    def __init__(self, dialect: Dialect) -> None:
        self.page_end = answer_statements.page_end(dialect)
        self.page = answer_statements.page(dialect)
        self.count_answers = answer_statements.count_answers(dialect)
        self.replace = answer_statements.replace(dialect)
        self.replace_sealed = answer_statements.replace_sealed(dialect)
        self.holds = answer_statements.holds(dialect)
        self.condemn = answer_statements.condemn(dialect)
        self.unreadable = answer_statements.unreadable(dialect)
        self.distrust = answer_statements.distrust(dialect)
        self.book = completions.book(dialect)


def _seen(key: StorageKey, payload: Payload, now: int | None) -> dict[str, Any]:
    return {"my_record_id": key.rid, "now": now, **facts_of(payload, "seen")}


def _answer(row: Any) -> Answer | None:
    rid, tid, *columns = row
    try:
        return Answer(StorageKey(rid, tid), row_of(columns).record())
    except CorruptRecord:
        return None


def _can_be_counted(found: Any) -> bool:
    """Whether the ledger still counts it, and under what, is to be told from the row."""
    numbers = found.in_quota, found.expires_at, found.response_size
    return all(isinstance(number, int) and 0 <= number < 2**62 for number in numbers) and found.expires_at > found.now
