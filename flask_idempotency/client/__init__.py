"""The other end: send a request until you have its response, under one key, also after your program was restarted.

Needs the standard library alone. `flask_idempotency.client.httpx` and `flask_idempotency.client.requests` need the package of
that name.
"""

from flask_idempotency.client.errors import (
    AnswerErased,
    AnswerExpired,
    AnswerNotKept,
    CarriedOut,
    ClientError,
    InFlight,
    IntentOver,
    KeyExpired,
    KeyReused,
    KeyVoided,
    LedgerError,
    NotCarriedOut,
    NotSent,
    OutcomeUnknown,
    Refused,
    Unsettled,
)
from flask_idempotency.client.intents import Intent, Intents, current_intent, new_key
from flask_idempotency.client.ledger import Entry, Ledger
from flask_idempotency.client.retries import Attempt, Retries, Timing

__all__ = [
    "AnswerErased",
    "AnswerExpired",
    "AnswerNotKept",
    "Attempt",
    "CarriedOut",
    "ClientError",
    "Entry",
    "InFlight",
    "Intent",
    "IntentOver",
    "Intents",
    "KeyExpired",
    "KeyReused",
    "KeyVoided",
    "Ledger",
    "LedgerError",
    "NotCarriedOut",
    "NotSent",
    "OutcomeUnknown",
    "Refused",
    "Retries",
    "Timing",
    "Unsettled",
    "current_intent",
    "new_key",
]
