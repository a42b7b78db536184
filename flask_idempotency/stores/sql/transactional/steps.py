"""Commit the rows of a transactional step together with its entry in the journal, on the application's session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sqlalchemy import Connection

from flask_idempotency.engine import errors
from flask_idempotency.engine.journal import JournalWrite, StepWriting
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.stores.sql.errors import is_refusal, is_retryable
from flask_idempotency.stores.sql.transactional.records import SessionRecords, refuse_autocommit
from flask_idempotency.stores.sql.transactional.transaction import SessionTransaction, undo

_log = logging.getLogger("flask_idempotency")


class SessionStep(SessionTransaction):
    """Implements `engine.journal.StepTransaction`."""

    def __init__(
        self,
        records: SessionRecords,
        keys: tuple[StorageKey, ...],
        token: bytes,
        *,
        operation: str,
        fences: Sequence[int],
        lease: float,
        early: Callable[[], Sequence[JournalWrite]],
        on_early_commit: Callable[[], None],
    ) -> None:
        """`early` returns what to write in a commit by the function of the step."""
        super().__init__(records, keys, token, operation=operation, on_early_commit=on_early_commit)
        self._fences = tuple(fences)
        self._lease = lease
        self._early_writes = early
        self._number = 0
        """The number of the last write that was sent for the first key."""

    def commit_step(self, writing: StepWriting) -> None:
        self.over = True
        session = self._records.session()

        def write(writes: Sequence[JournalWrite]) -> None:
            self._write(self._records.connection(session), writes)

        try:
            refuse_autocommit(self._records.connection(session))
            self._commit(session, lambda: writing(write))
        except (errors.LeaseLost, errors.ConfigurationError):
            undo(session)
            raise
        except Exception as error:
            role = self._records.role(session)
            undo(session)
            if isinstance(error, errors.StoreUnavailable) and not isinstance(error, errors.InheritedConnection):
                # The codec could not seal the result again.
                raise
            # Before the COMMIT was sent, nothing can be committed. A refused COMMIT is rolled back, if there is no other:
            # SQLAlchemy commits databases one after the other, and that of the records may have been an earlier one.
            several = len(self._pools) > 1
            if self._going_out and (several or not is_refusal(error)) and self._is_done(error):
                if not several:
                    return
                _log.error("a step has committed to one database, and may have failed to commit to another")
                raise errors.StoreUnavailable("a commit failed on one of the session's databases") from error
            why = f"a step was rolled back: {self._failed(error, role)}"
            if not is_retryable(error):
                # Its request is paused, and each retry comes here again.
                _log.error(why)
            raise errors.NotCommitted(why, retryable=is_retryable(error)) from error

    def leave(self) -> None:
        super().leave()
        self._records.end_step(self._keys)

    def _mark(self, connection: Connection) -> None:
        """Enter the step as begun and plain, in the commit that its function is about to send."""
        if not self._marked:
            self._write(connection, self._early_writes())
        self._marked = True

    def _write(self, connection: Connection, writes: Sequence[JournalWrite]) -> None:
        self._number = writes[0].number
        self._records.write_journals(
            connection, self._keys, self._token, fences=self._fences, writes=writes, lease=self._lease
        )

    def _is_done(self, error: Exception) -> bool:
        """Ask the journal on another connection whether a COMMIT without a reply was done."""
        try:
            return self._is_marked()
        except errors.LeaseLost:
            raise
        except errors.IdempotencyError:
            raise errors.StoreUnavailable(
                "the commit of a step may be done or not: the database does not answer"
            ) from error

    def _is_marked(self) -> bool:
        """Ask the journal: it holds the step if the commit was done."""
        key, fence = self._keys[0], self._fences[0]
        return self._records.has_reached(key, self._token, fence=fence, number=self._number)
