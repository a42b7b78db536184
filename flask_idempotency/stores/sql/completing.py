"""Putting an answer into a record, on whichever connection that is to be committed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

from sqlalchemy import Connection

from flask_idempotency.engine.errors import DataKeyGone
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Payload
from flask_idempotency.engine.quota import bucket_width_ms
from flask_idempotency.stores.durations import microseconds
from flask_idempotency.stores.sql import completions
from flask_idempotency.stores.sql.database import together
from flask_idempotency.stores.sql.dialects import SQLITE, Dialect
from flask_idempotency.stores.sql.schema import COMPLETED, FAILED, RESPONSES

SHARDS: Final = 8
"""Rows that a tenant's completions of one moment are spread over: with one, each would wait for the commit of another
(2,188 in a second, and 7,089 with eight: correctness.md, section 4)."""


class Completing:
    """Takes the form of the statement that this record needs, and the plain one until it turns out to need another."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._made: dict[tuple[bool, bool, bool], Any] = {}
        self._settling: dict[tuple[bool, bool], Any] = {}
        self._book = completions.book(dialect)
        self._sealing = completions.sealing(dialect)
        self.counts = False
        """Whether there are quotas here. False costs a counted record one statement more, and nothing else."""

    def write(
        self, connection: Connection, parameters: dict[str, Any], *, tells: bool = False, checked: bool = False
    ) -> Any | None:
        """In the transaction that the connection is in. None: nothing was changed.

        `checked`: `refuse_without_key` was asked a moment ago, and need not be again.
        """
        counted = self.counts
        statement = self._complete(is_sealed(parameters) and not checked, counted, tells)
        return self._send(connection, statement, parameters, counted=counted)

    def write_alone(self, connection: Connection, parameters: dict[str, Any]) -> bool:
        """On a connection that commits each statement by itself."""
        return self._alone(connection, self._complete, parameters)

    def settle_alone(self, connection: Connection, parameters: dict[str, Any]) -> bool:
        """The same in the owner's place: `parameters` say besides which record was met."""
        return self._alone(connection, self._settle, parameters)

    def look_again(self, connection: Connection, parameters: dict[str, Any], standing: Any) -> None:
        """Nothing was changed although the record is its owner's. Raises `DataKeyGone` when that is why."""
        self.counts = self.counts or bool(standing.in_quota)
        self.refuse_without_key(connection, parameters)

    def refuse_without_key(self, connection: Connection, parameters: dict[str, Any]) -> None:
        """Raises `DataKeyGone` when that is why nothing was changed, or would be."""
        if not is_sealed(parameters):
            return
        found = connection.execute(self._sealing, parameters).one_or_none()
        if found is not None and found.erased:
            raise DataKeyGone("the tenant's answers were erased since the key was first used", erased=True)
        if found is not None and not found.kept:
            raise DataKeyGone("there is no open data key of this number", erased=False)

    def _alone(self, connection: Connection, form: Callable[[bool, bool], Any], parameters: dict[str, Any]) -> bool:
        counted = self.counts
        statement = form(is_sealed(parameters), counted)
        with together(connection) if counted and self._dialect.name == SQLITE else nullcontext():
            return self._send(connection, statement, parameters, counted=counted) is not None

    def _send(self, connection: Connection, statement: Any, parameters: dict[str, Any], *, counted: bool) -> Any | None:
        found = connection.execute(statement, parameters).one_or_none()
        if found is not None and counted and self._dialect.name == SQLITE and found.in_quota:
            connection.execute(self._book, {**parameters, **_entry(found)})
        return found

    def _complete(self, sealed: bool, counted: bool, tells: bool = False) -> Any:
        form = sealed, counted, tells
        if form not in self._made:
            # Two threads may both do this at first: what they make is the same.
            self._made[form] = completions.complete(self._dialect, sealed=sealed, counted=counted, tells=tells)
        return self._made[form]

    def _settle(self, sealed: bool, counted: bool) -> Any:
        form = sealed, counted
        if form not in self._settling:
            self._settling[form] = completions.settle(self._dialect, sealed=sealed, counted=counted)
        return self._settling[form]


def answer_of(key: StorageKey, payload: Payload, keep: float) -> dict[str, Any]:
    """The parameters of `completions.complete`, but for `my_record_id`, `my_token` and `now`."""
    return {
        **facts_of(payload, "my"),
        "my_shard": shard_of(key),
        "keep": microseconds(keep),
        "width": bucket_width_ms(keep) * 1000,
    }


def facts_of(payload: Payload, whose: str) -> dict[str, Any]:
    """A payload as columns: `my_…` of what is brought, `seen_…` of what is compared."""
    by = payload.sealed_by
    return {
        f"{whose}_state": COMPLETED if payload.success else FAILED,
        f"{whose}_status": payload.status,
        f"{whose}_response_size": payload.byte_size,
        f"{whose}_response": payload.data,
        f"{whose}_wrapping_key_id": None if by is None else by.kid,
        f"{whose}_data_key_number": None if by is None else by.number,
    }


def shard_of(key: StorageKey) -> int:
    return key.rid[0] % SHARDS


def is_sealed(parameters: dict[str, Any]) -> bool:
    """Whether a data key must be there. Number 0 stands for none."""
    return bool(parameters["my_data_key_number"])


def entry(*, kind: str, bucket_end: int, window_length: int, records: int, stored: int) -> dict[str, Any]:
    """The parameters of `completions.book`, but for `my_tenant_id` and `my_shard`."""
    return {
        "my_kind": kind,
        "my_bucket_end": bucket_end,
        "my_window_length": window_length,
        "my_records": records,
        "my_bytes": stored,
    }


def _entry(found: Any) -> dict[str, Any]:
    return entry(kind=RESPONSES, bucket_end=found.expires_at, window_length=0, records=1, stored=found.response_size)
