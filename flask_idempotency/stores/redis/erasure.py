"""What the last erasure of a tenant destroyed, and responses whose data key is gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

from flask_idempotency.engine.errors import DataKeyMissing
from flask_idempotency.engine.model import Record, StoredPayload
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.executor import ScriptExecutor, whole_number

_FIELD: Final = layout.FIELDS["ERASURE"].encode()


class Erasure(NamedTuple):
    """The last erasure of a tenant."""

    destroyed: int
    """The highest number of a data key that it destroyed."""
    at: int
    """In microseconds."""

    def covers(self, payload: StoredPayload | None, *, requested_ms: int) -> bool:
        """Return whether it destroyed this payload of a request of that time."""
        if payload is None:
            return False
        by = payload.sealed_by
        return requested_ms * 1000 <= self.at if by is None else by.number <= self.destroyed


def decode_erasure(text: bytes | None) -> Erasure | None:
    """Decode the field `ERASURE` of a tenant's data keys."""
    if text is None:
        return None
    destroyed, _, erased_at = text.partition(b" ")
    return Erasure(whole_number(destroyed), whole_number(erased_at))


def with_erasure(record: Record, erasure: Erasure | None) -> Record:
    """Return this record, marked as erased if its tenant's erasure destroyed its response."""
    if erasure is None or not erasure.covers(record.payload, requested_ms=round(record.requested_at * 1000)):
        return record
    return replace(record, erased=True)


class ErasureCache:
    """Look up the last erasure of each tenant once."""

    def __init__(self, server: ScriptExecutor) -> None:
        self._server = server
        self._known = dict[bytes, Erasure | None]()

    def of(self, tid: bytes) -> Erasure | None:
        if tid not in self._known:
            self._known[tid] = decode_erasure(self._server.execute("HGET", layout.data_keys(tid), _FIELD))
        return self._known[tid]

    def mark(self, tid: bytes, record: Record) -> Record:
        return record if record.payload is None else with_erasure(record, self.of(tid))


def missing_data_key(result: Any) -> DataKeyMissing | None:
    """Return the error for a script's result if the data key of a payload is erased, deleted or disabled."""
    return DataKeyMissing(erased=result == b"ERASED") if result in (b"ERASED", b"KEYLESS") else None
