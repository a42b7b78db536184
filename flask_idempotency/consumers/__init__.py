"""Handle each message of a broker once per consumer. These are the public names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flask_idempotency.consumers.verdicts import (
    Dead,
    Later,
    MessageReused,
    MessageStopped,
    MissingMessageId,
    OutcomeUnknown,
    Processed,
    ResultNotKept,
    TaskBusy,
    TooManyAttempts,
    Verdict,
)

if TYPE_CHECKING:
    from flask_idempotency.consumers.inbox import Inbox

__all__ = [
    "Dead",
    "Inbox",
    "Later",
    "MessageReused",
    "MessageStopped",
    "MissingMessageId",
    "OutcomeUnknown",
    "Processed",
    "ResultNotKept",
    "TaskBusy",
    "TooManyAttempts",
    "Verdict",
]


def __getattr__(name: str) -> Any:
    # An application without consumers does not load it.
    if name == "Inbox":
        from flask_idempotency.consumers.inbox import Inbox

        return Inbox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
