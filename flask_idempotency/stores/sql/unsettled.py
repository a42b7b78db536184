"""Records that are not completed, and what others than their owners may do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

from sqlalchemy import Connection

from flask_idempotency.engine.capabilities import Found, Sheet, UnfinishedCounts
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey, new_token
from flask_idempotency.engine.model import Payload, State
from flask_idempotency.stores.durations import microseconds
from flask_idempotency.stores.sql import answer_statements, completions, unsettled_statements
from flask_idempotency.stores.sql.completing import Completing, answer_of, entry, shard_of
from flask_idempotency.stores.sql.database import TRIES, Database, together
from flask_idempotency.stores.sql.dialects import Dialect
from flask_idempotency.stores.sql.rows import row_of
from flask_idempotency.stores.sql.schema import COMPLETED, FAILED, PROCESSING, QUARANTINED, RELEASED, RESPONSES
from flask_idempotency.stores.sql.times import in_microseconds

_LAST: Final = b"\xff" * 33
"""Behind every key there is: those have 32 bytes."""

_TIME_BYTES: Final = 8

_STATES: Final = {
    State.PROCESSING: (PROCESSING, PROCESSING),
    State.QUARANTINED: (QUARANTINED, QUARANTINED),
    State.COMPLETED: (COMPLETED, FAILED),
}


class SqlUnsettled:
    """Implements `unsettled.Unsettled`. `now` as for `SqlDataKeys`."""

    def __init__(
        self, database: Database, completing: Callable[[], Completing], *, now: Callable[[], int | None]
    ) -> None:
        self._database = database
        self._completing = completing
        self._now = now

    def stale(self, *, horizon: float, after: bytes = b"", limit: int) -> Sheet:
        first, behind = int.from_bytes(after[:_TIME_BYTES], "big"), after[_TIME_BYTES:]
        asked = {"my_horizon": in_microseconds(horizon), "my_first": first, "my_after": behind, "my_limit": limit}
        found = self._all(self._sent.stale, asked)
        last = found[-1] if len(found) == limit else None
        return Sheet(
            _readable(found),
            None if last is None else last.lease_expires_at.to_bytes(_TIME_BYTES, "big") + last.record_id,
        )

    def lapse(self, seen: Found, *, horizon: float) -> bool:
        asked = {**self._seen(seen), "my_horizon": in_microseconds(horizon)}
        lapse = self._sent.lapse
        return self._database.run(lambda connection: connection.execute(lapse, asked).one_or_none()) is not None

    def due(
        self, *, horizon: float, least: float, most: float, limit: int, owner: bytes | None = None
    ) -> Sequence[Found]:
        pauses = {"least": microseconds(least), "most": microseconds(most)}
        asked = {"my_horizon": in_microseconds(horizon), "my_limit": limit, "my_owner": owner, **pauses}
        statement = self._sent.due if owner is None else self._sent.due_of_one
        while True:
            taken = self._all(statement, asked)
            found = _readable(taken)
            # Those that cannot be read have had their turn, too: they keep nobody else from theirs.
            if found or len(taken) < limit:
                return sorted(found, key=lambda each: each.record.deadline)

    def settle(self, seen: Found, *, token: bytes, payload: Payload, keep: float) -> bool:
        brought = {"my_tenant_id": seen.key.tid, "my_token": token, **answer_of(seen.key, payload, keep)}
        parameters = {**self._seen(seen), **brought}
        completing = self._completing()

        def settle(connection: Connection) -> bool:
            for _ in range(TRIES):
                if completing.settle_alone(connection, parameters):
                    return True
                found = connection.execute(self._sent.glance, parameters).one_or_none()
                if found is not None and found.token == token:
                    return found.state in (COMPLETED, FAILED)
                if found is None or found.state != QUARANTINED or not found.unchanged:
                    return False
                completing.look_again(connection, parameters, found)
            raise StoreUnavailable("the row was another one at every look")

        return self._database.run(settle)

    def free(self, seen: Found) -> bool:
        # A token of its own, so that a reply that was lost is not taken for somebody else's work.
        parameters = {**self._seen(seen), "my_tenant_id": seen.key.tid, "my_token": new_token()}

        def free(connection: Connection) -> bool:
            if seen.record.state is not State.COMPLETED:
                freed = connection.execute(self._sent.free, parameters).one_or_none() is not None
            else:
                with together(connection):
                    freed = self._free_and_book(connection, seen.key, parameters)
            if freed:
                return True
            found = connection.execute(self._sent.glance, parameters).one_or_none()
            return found is not None and (found.state, found.token) == (RELEASED, parameters["my_token"])

        return self._database.run(free)

    def walk(self, state: State, *, after: bytes = b"", limit: int, tid: bytes | None = None) -> Sheet:
        asked = {"my_after": after, "my_limit": limit, "my_tenant_id": tid}
        if state is State.COMPLETED:
            return self._walk_completed(asked)
        statement = self._sent.walk_processing if state is State.PROCESSING else self._sent.walk_quarantined
        found = self._all(statement, asked)
        return Sheet(_readable(found), found[-1].record_id if len(found) == limit else None)

    def standing(self) -> UnfinishedCounts:
        (found,) = self._all(self._sent.standing, {})
        return UnfinishedCounts(
            in_flight=int(found.in_flight),
            lapsed=int(found.lapsed),
            quarantined=found.quarantined,
            lapsed_for=_seconds(found.lapsed_for),
            quarantined_for=_seconds(found.quarantined_for),
        )

    def _walk_completed(self, asked: dict[str, Any]) -> Sheet:
        """Page by page of all that there is: most records are completed."""

        def page(connection: Connection) -> tuple[Sequence[Any], bytes | None]:
            ends = connection.execute(self._sent.page_end, asked).scalars().all()
            last = ends[0] if len(ends) > 1 else None
            bounded = {**asked, "my_until": last or _LAST, "now": self._now()}
            return connection.execute(self._sent.walk_completed, bounded).all(), last

        found, last = self._database.run(page)
        return Sheet(_readable(found), after=last)

    def _free_and_book(self, connection: Connection, key: StorageKey, parameters: dict[str, Any]) -> bool:
        freed = connection.execute(self._sent.free, parameters).one_or_none()
        if freed is not None and freed.in_quota:
            bucket_end = parameters["seen_deadline"]
            taken = entry(
                kind=RESPONSES, bucket_end=bucket_end, window_length=0, records=-1, stored=-freed.response_size
            )
            connection.execute(self._sent.book, {**parameters, "my_shard": shard_of(key), **taken})
        return freed is not None

    def _all(self, statement: Any, asked: dict[str, Any]) -> Sequence[Any]:
        parameters = {**asked, "now": self._now()}
        return self._database.run(lambda connection: connection.execute(statement, parameters).all())

    def _seen(self, seen: Found) -> dict[str, Any]:
        state, other = _STATES[seen.record.state]
        return {
            "my_record_id": seen.key.rid,
            "seen_state": state,
            "seen_other": other,
            "seen_token": seen.record.token,
            "seen_deadline": in_microseconds(seen.record.deadline),
            "now": self._now(),
        }

    @cached_property
    def _sent(self) -> _SentRecovery:
        return _SentRecovery(self._database.dialect)


class _SentRecovery:
    def __init__(self, dialect: Dialect) -> None:
        self.stale = unsettled_statements.stale(dialect)
        self.lapse = unsettled_statements.lapse(dialect)
        self.due = unsettled_statements.due(dialect)
        self.due_of_one = unsettled_statements.due_of_one(dialect)
        self.free = unsettled_statements.free(dialect)
        self.glance = unsettled_statements.glance(dialect)
        self.walk_processing = unsettled_statements.walk_processing(dialect)
        self.walk_quarantined = unsettled_statements.walk_quarantined(dialect)
        self.walk_completed = unsettled_statements.walk_completed(dialect)
        self.page_end = answer_statements.page_end(dialect)
        self.standing = unsettled_statements.standing(dialect)
        self.book = completions.book(dialect)


def _readable(found: Sequence[Any]) -> tuple[Found, ...]:
    """Without those that are none of ours: a claim that meets one says so."""
    return tuple(each for row in found if (each := _found(row)) is not None)


def _found(row: Any) -> Found | None:
    rid, tid, *columns = row
    # Of those that are given a turn.
    asked = bool(columns.pop()) if "asked" in row._fields else False
    try:
        return Found(StorageKey(rid, tid), row_of(columns).record(), asked)
    except CorruptRecord:
        return None


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else max(microseconds, 0) / 1_000_000
