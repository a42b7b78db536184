"""What scripts are told of an answer that is to be stored."""

from __future__ import annotations

from functools import lru_cache

from flask_idempotency.engine.model import Payload
from flask_idempotency.engine.quota import bucket_width_ms
from flask_idempotency.stores.durations import microseconds
from flask_idempotency.stores.redis.record import payload_bytes

# An application keeps its answers for a few lengths of time, again and again.
_width_ms = lru_cache(maxsize=64)(bucket_width_ms)


def completion(payload: Payload, *, keep: float) -> tuple[int, int, int, bytes, int, int]:
    """Arguments 4 to 9 of `complete.lua` and `settle.lua`."""
    number = 0 if payload.sealed_by is None else payload.sealed_by.number
    facts = int(payload.success), payload.status, payload_bytes(payload), number
    return microseconds(keep), *facts, _width_ms(keep)
