"""What an inbox says about a message: acknowledge it, keep it, or set it aside; and the errors of adapters."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal, TypeAlias

from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.values import valueclass

LaterReason: TypeAlias = Literal[
    "in-flight",
    "store-unavailable",
    "memory-lost",
    "keys-unavailable",
    "transaction-conflict",
    "commit-unknown",
    "result-not-stored",
    "released",
    "paused",
]
DeadReason: TypeAlias = Literal["outcome-unknown", "too-many-attempts", "message-reused", "record-corrupt"]


@valueclass(frozen=True, slots=True)
class Processed:
    """The message is done, now or before, and its record is durable. Acknowledge it."""

    value: Any = field(repr=False)
    """What the work returned, as JSON gives it back. None if it is not kept and this is a replay."""
    replayed: bool
    """Whether an earlier delivery did the work."""
    kept: bool = True
    """False: the value is not stored. It is too large, no JSON, or erased, so a replay has none."""


@valueclass(frozen=True, slots=True)
class Later:
    """The message may not run now. Keep it unacknowledged, and call `process` again in `after` seconds."""

    after: float
    reason: LaterReason
    lease_left: float | None = None
    """With `in-flight`, the seconds until the lease of the other worker ends, unless that worker renews it."""


@valueclass(frozen=True, slots=True)
class Dead:
    """No worker may do this message. Set it aside and acknowledge it: an operator or a resolver decides."""

    reason: DeadReason


Verdict: TypeAlias = Processed | Later | Dead


class MissingMessageId(IdempotencyError):
    """A message has no id that stays the same when its sender repeats it. Nothing was claimed."""


class MessageStopped(IdempotencyError):
    """A consumer stopped at a message that no worker may do, because its broker would have destroyed it. It stays there."""


class MessageReused(IdempotencyError):
    """The id was used before for a message with another payload."""


class OutcomeUnknown(IdempotencyError):
    """An earlier delivery may have taken effect, or not. An operator or a resolver decides."""


class TooManyAttempts(IdempotencyError):
    """So many workers vanished at this message that no further worker runs it."""


class ResultNotKept(IdempotencyError):
    """The message was done before, and its value was not kept."""


class TaskBusy(IdempotencyError):
    """Another worker has this message, and the caller cannot wait for it."""
