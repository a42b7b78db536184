"""Handle each message of a broker once per consumer. These are the public names."""

from flask_idempotency.consumers.inbox import Inbox
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
