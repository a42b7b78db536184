"""Keep the steps of requests and their results, in `idempotency_steps`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, get_args

from sqlalchemy import Connection

from flask_idempotency.engine import errors
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.journal import (
    EMPTY,
    MOST_STEPS,
    Effects,
    Entry,
    Journal,
    JournalWrite,
    StepAnswer,
    StepPage,
    StepState,
    SweptJournals,
)
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import SealedBy, State, StoredPayload
from flask_idempotency.stores import microseconds
from flask_idempotency.stores.sql import completion
from flask_idempotency.stores.sql import journal_statements as statements
from flask_idempotency.stores.sql.completion import SqlCompleting
from flask_idempotency.stores.sql.database import TRIES, transaction
from flask_idempotency.stores.sql.dialects import POSTGRESQL, in_microseconds, made
from flask_idempotency.stores.sql.driver import RecordConnection, SessionConnection
from flask_idempotency.stores.sql.journal_statements import Form
from flask_idempotency.stores.sql.rows import FINGERPRINT_BYTES, KID_LETTERS, TOKEN_BYTES, check_standing, readable
from flask_idempotency.stores.sql.schema import PROCESSING, QUARANTINE, QUARANTINED, TAKEOVER
from flask_idempotency.stores.sql.statements import LEASE_EXPIRED

SWEPT_AT_ONCE: Final = 200
"""Journals that one sweep looks at on SQLite, where every claim waits for its deletions."""

_EFFECTS: Final[Mapping[str, Effects]] = {effects: effects for effects in get_args(Effects)}
_STATES: Final = {state.value: state for state in StepState}
_BIG: Final = 2**63 - 1

PAYLOAD_STATUS: Final = 0
"""A step has no HTTP status, so its row does not keep one."""


def parameters_of(
    key: StorageKey, token: bytes, *, fence: int, writing: JournalWrite, lease: float, now: int | None
) -> dict[str, Any]:
    """Return the parameters of a write that concern the record."""
    return {
        "my_record_id": key.rid,
        "my_token": token,
        "my_fence": fence,
        "my_write": writing.number,
        "my_steps": writing.steps,
        "lease": microseconds(lease),
        "now": now,
    }


def _stored(payload: StoredPayload | None, whose: str, suffix: str = "") -> dict[str, Any]:
    """Return the parameters of the columns that a step keeps of a payload: data, size and data key."""
    by = None if payload is None else payload.sealed_by
    return {
        f"{whose}_payload_size{suffix}": 0 if payload is None else payload.byte_size,
        f"{whose}_payload{suffix}": None if payload is None else payload.data,
        f"{whose}_wrapping_key_id{suffix}": None if by is None else by.kid,
        f"{whose}_data_key_number{suffix}": None if by is None else by.number,
    }


def entered(entry: Entry, write: int, number: int, *, suffix: str = "") -> dict[str, Any]:
    """Return the parameters that enter this step, the `number`-th of its write."""
    return {
        f"my_step_id{suffix}": entry.id,
        f"my_position{suffix}": write * (MOST_STEPS + 1) + number,
        f"my_name{suffix}": entry.name,
        f"my_effects{suffix}": entry.effects,
        f"my_in_line{suffix}": int(entry.in_line),
        f"my_kept{suffix}": int(entry.kept),
        f"my_digest{suffix}": entry.digest,
        f"my_took{suffix}": in_microseconds(entry.took),
        **_stored(entry.payload, "my", suffix),
    }


class SqlJournals(SqlCompleting):
    """Implements `Journals`."""

    before_write: Callable[[StorageKey, JournalWrite], None] | None = None
    """Raises if the application's own session prevents a write."""

    def write(self, key: StorageKey, token: bytes, *, fence: int, writing: JournalWrite, lease: float) -> None:
        if self.before_write is not None:
            self.before_write(key, writing)
        parameters = parameters_of(key, token, fence=fence, writing=writing, lease=lease, now=self._now())
        self._database.send(self._write, parameters, writing)

    def recall(self, key: StorageKey, token: bytes, *, fence: int) -> Journal:
        parameters = {"my_record_id": key.rid, "my_token": token, "my_fence": fence}
        recall = made(statements.read_journal, self._database.dialect, held=True)
        rows = self._database.send(lambda connection: connection.execute(recall, parameters).all())
        if not rows:
            raise errors.LeaseLost("the record belongs to another worker, or is completed")
        return _journal(rows)

    def complete(
        self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float, remember: float | None = None
    ) -> None:
        parameters = {"my_record_id": key.rid, "my_tenant_id": key.tid, "my_token": token, "now": self._now()}
        given = {**parameters, **completion.answer_of(key, payload, keep, remember)}
        self._database.send(self._completing().complete, given, True)

    def read(self, key: StorageKey) -> Journal:
        rows = self._rows(statements.read_journal, my_record_id=key.rid)
        return _journal(rows) if rows else EMPTY

    def resume(self, seen: SeenRecord, journal: Journal, *, token: bytes, writing: JournalWrite) -> bool:
        if not journal.complete or not journal.entries:
            return False
        parameters = {
            **completion.as_seen(seen),
            "my_token": token,
            "my_fence": journal.fence,
            "seen_write": journal.write,
            "my_steps": writing.steps,
            "my_on_expiry": QUARANTINE if writing.in_doubt else TAKEOVER,
            "now": self._now(),
        }

        def resume(connection: Connection) -> bool:
            with transaction(connection):
                held = self._send(connection, statements.resume, parameters).one_or_none()
                if held is None:
                    found = self._send(connection, statements.why_not_held, parameters).one_or_none()
                    return found is not None and bool(found.token == token)
                self._fill(connection, parameters, held, writing, journal.write + 1, settles=True)
            return True

        return self._database.run(resume)

    def give_up(self, seen: SeenRecord, *, horizon: float) -> bool:
        if seen.record.state is not State.PROCESSING:
            return False
        given = {**completion.as_seen(seen), "my_horizon": in_microseconds(horizon)}
        return self._row(statements.give_up, **given) is not None

    def walk(
        self, *, after: bytes = b"", limit: int, tid: bytes | None = None, other_than: str | None = None
    ) -> StepPage:
        given: dict[str, Any] = {"my_after": after, "my_tenant_id": tid, "my_wrapping_key_id": other_than}
        # Use a connection without the read timeout of records: a page of large results takes longer.
        rows, last = self._page(statements.page_end, statements.walk, limit=limit, long=True, **given)
        return StepPage(tuple(readable(rows, _answer)), after=last)

    def replace(self, key: StorageKey, step: bytes, old: StoredPayload, new: StoredPayload) -> bool:
        dialect = self._database.dialect
        parameters = {
            "my_record_id": key.rid,
            "my_step_id": step,
            **_stored(new, "my"),
            **_stored(old, "seen"),
        }
        sealed = completion.is_sealed(parameters)

        def replace(connection: Connection) -> bool:
            replaced = connection.execute(made(statements.replace, dialect, sealed=sealed), parameters).one_or_none()
            if replaced is not None or not sealed:
                return replaced is not None
            completion.refuse_sealed(self._send(connection, statements.why_not_replaced, parameters).one_or_none())
            return False

        return self._database.run(replace)

    def count(self) -> Mapping[str, int]:
        return {row.wrapping_key_id: row.payloads for row in self._rows(statements.count_payloads, long=True)}

    def sweep(self, *, after: bytes = b"", limit: int) -> SweptJournals:
        if self._database.dialect.name != POSTGRESQL:
            limit = min(limit, SWEPT_AT_ONCE)
        rows, last = self._page(statements.page_end, statements.orphans, limit=limit, long=True, my_after=after)

        def remove(connection: Connection) -> SweptJournals:
            removed = set()
            for rid, step, requested_at in rows:
                row = {"my_record_id": rid, "my_step_id": step, "my_requested_at": requested_at}
                if self._send(connection, statements.remove_orphan, row).one_or_none() is not None:
                    removed.add(rid)
            return SweptJournals(len(removed), last)

        return self._database.run(remove, long=True) if rows else SweptJournals(0, last)

    def drop(self, key: StorageKey, requested_at: int) -> None:
        """Remove what is recorded of this life of a record that is free."""
        parameters = {"my_record_id": key.rid, "my_requested_at": requested_at}
        self._database.send(lambda connection: self._send(connection, statements.drop, parameters))

    def write_on(self, connection: SessionConnection, parameters: dict[str, Any], writing: JournalWrite) -> bool:
        """Change record and journal in the transaction of this connection: ours, or that of the application's session. Return
        False if no row was changed.

        `parameters` come from `parameters_of`. Without a transaction, call it only if `is_one_statement`. Raises
        `DataKeyMissing` if that was the reason; the caller rolls back.
        """
        dialect, opens = self._database.dialect, not writing.in_doubt
        if self.is_one_statement(writing):
            forms = tuple(map(_form, writing.enter))
            given: dict[str, Any] = {"my_data_key_number": next(iter(_numbers(writing.enter)), None), **parameters}
            for number, entry in enumerate(writing.enter):
                given |= entered(entry, parameters["my_write"], number, suffix=f"_{number}")
            sealed = bool(given["my_data_key_number"])
            statement = made(statements.write, dialect, forms, opens=opens, sealed=sealed)
            return connection.execute(statement, given).one_or_none() is not None
        held = connection.execute(made(statements.hold, dialect, opens=opens), parameters).one_or_none()
        if held is None:
            return False
        self._fill(connection, parameters, held, writing, parameters["my_write"])
        return True

    def _fill(
        self,
        connection: SessionConnection,
        parameters: dict[str, Any],
        held: Any,
        writing: JournalWrite,
        number: int,
        *,
        settles: bool = False,
    ) -> None:
        """Withdraw and enter the steps of this write of a record, as `hold` or `resume` has returned it."""
        self.refuse_without_keys(connection, parameters, writing.enter)
        dialect = self._database.dialect
        of_life = {
            **parameters,
            "my_tenant_id": held.tenant_id,
            "my_requested_at": held.requested_at,
            "my_attempt": held.attempt,
            "my_moment": held.now,
        }
        for step in writing.withdraw:
            withdraw = made(statements.withdraw, dialect, settles=settles)
            connection.execute(withdraw, {**of_life, "my_step_id": step})
        for place, entry in enumerate(writing.enter):
            enter = made(statements.enter, dialect, _form(entry), settles=settles)
            connection.execute(enter, {**of_life, **entered(entry, number, place)})

    def is_one_statement(self, writing: JournalWrite) -> bool:
        """Return True if PostgreSQL does this in one statement.

        A removal needs a statement of its own: in one with the update, it would not see a step that another transaction
        enters while the update waits for that transaction.
        """
        entries = writing.enter
        if self._database.dialect.name != POSTGRESQL or writing.withdraw:
            return False
        if not 0 < len(entries) <= statements.MOST_AT_ONCE:
            return False
        return len(entries) == 1 or (
            len({entry.id for entry in entries}) == len(entries) and len(_numbers(entries)) < 2
        )

    def refuse_without_keys(
        self, connection: SessionConnection, parameters: dict[str, Any], entries: Sequence[Entry]
    ) -> None:
        """Raise `DataKeyMissing` if a payload of these entries may not be stored for want of its data key."""
        for number in _numbers(entries):
            self._completing().refuse_without_key(connection, {**parameters, "my_data_key_number": number})

    def is_done(self, connection: SessionConnection, parameters: dict[str, Any], writing: JournalWrite) -> bool:
        """Find out why a write changed no row. True: an earlier try was applied. False: try again.

        Raises `LeaseLost` if this grant lost the record, and `DataKeyMissing` if that was the reason.
        """
        found = connection.execute(made(statements.why_not_held, self._database.dialect), parameters).one_or_none()
        if found is None:
            raise errors.LeaseLost("the record is gone")
        check_standing(found)
        if found.token != parameters["my_token"] or found.fence != parameters["my_fence"]:
            raise errors.LeaseLost("the record belongs to another worker")
        if found.state != PROCESSING and (found.state != QUARANTINED or found.reason != LEASE_EXPIRED):
            raise errors.LeaseLost("the record is completed, released or quarantined")
        if found.step_write >= parameters["my_write"]:
            return True
        self.refuse_without_keys(connection, parameters, writing.enter)
        return False

    def _write(self, connection: RecordConnection, parameters: dict[str, Any], writing: JournalWrite) -> None:
        alone = self.is_one_statement(writing)
        for _ in range(TRIES):
            with nullcontext() if alone else transaction(connection):
                written = self.write_on(connection, parameters, writing)
            if written or self.is_done(connection, parameters, writing):
                return
        raise errors.StoreUnavailable(f"the row changed between read and write {TRIES} times")


def _form(entry: Entry) -> Form:
    return Form(entry.state is StepState.FINISHED, entry.payload is not None)


def _numbers(entries: Sequence[Entry]) -> set[int]:
    """Return the numbers of the data keys that these payloads need."""
    sealed = (entry.payload.sealed_by for entry in entries if entry.payload is not None)
    return {by.number for by in sealed if by is not None and by.number != 0}


def _journal(rows: Sequence[Any]) -> Journal:
    first = rows[0]
    entries = tuple(_entry(row) for row in rows if row.step_id is not None)
    if not isinstance(first.record_fence, int) or not isinstance(first.step_write, int):
        raise errors.CorruptRecord("the row's fence or step_write is invalid")
    erased = any(row.erased and row.payload is not None for row in rows)
    return Journal(entries, fence=first.record_fence, write=first.step_write, erased=erased)


def _answer(row: Any) -> StepAnswer:
    tokens = ((row.token, TOKEN_BYTES), (row.fingerprint, FINGERPRINT_BYTES))
    if any(not isinstance(each, bytes) or len(each) != size for each, size in tokens):
        raise errors.CorruptRecord("the row's token or fingerprint is invalid")
    key = StorageKey(row.record_id, row.tenant_id)
    return StepAnswer(key, row.token, row.fingerprint, _entry(row), erased=bool(row.erased))


def _entry(row: Any) -> Entry:
    """Return the step of this row. Raise `CorruptRecord` if this package did not write it."""
    numbers = (row.fence, row.took, row.began_at, row.payload_size, 0 if row.finished_at is None else row.finished_at)
    if row.effects not in _EFFECTS or row.state not in _STATES or not isinstance(row.name, str):
        raise errors.CorruptRecord("the name, effects or state of a recorded step is invalid")
    if not all(isinstance(number, int) and 0 <= number <= _BIG for number in numbers):
        raise errors.CorruptRecord("a number or time of a recorded step is invalid")
    if not all(isinstance(each, bytes) for each in (row.step_id, row.digest)):
        raise errors.CorruptRecord("the id or digest of a recorded step is invalid")
    state, payload, sealed_by = _STATES[row.state], None, None
    if (state is StepState.FINISHED) != (row.finished_at is not None):
        raise errors.CorruptRecord("a recorded step has a time that does not fit its state")
    if row.wrapping_key_id is not None or row.data_key_number is not None:
        kid, number = row.wrapping_key_id, row.data_key_number
        if not isinstance(kid, str) or len(kid) > KID_LETTERS or not isinstance(number, int) or not 0 <= number <= _BIG:
            raise errors.CorruptRecord("the wrapping key or data key number of a recorded step is invalid")
        sealed_by = SealedBy(kid, number)
    if row.payload is not None:
        if not isinstance(row.payload, bytes):
            raise errors.CorruptRecord("the payload of a recorded step is invalid")
        payload = StoredPayload(
            row.payload, PAYLOAD_STATUS, success=True, byte_size=row.payload_size, sealed_by=sealed_by
        )
    return Entry(
        id=row.step_id,
        name=row.name,
        effects=_EFFECTS[row.effects],
        state=state,
        in_line=bool(row.in_line),
        digest=row.digest,
        payload=payload,
        kept=bool(row.kept),
        took=row.took / 1_000_000,
        fence=row.fence,
        began_at=row.began_at / 1_000_000,
        finished_at=None if row.finished_at is None else row.finished_at / 1_000_000,
    )
