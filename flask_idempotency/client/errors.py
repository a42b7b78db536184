"""How a keyed request ends if you get no response: one exception for each thing that you may do next.

No class inherits from an exception of httpx or requests. Code that catches those and sends again would take a new key.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ClientError(Exception):
    """A keyed request ended without a response that you may use. The class tells you what you may do next.

    The text names no key and no part of the response. You can pickle the exception; `response` is then left out.
    """

    advice: ClassVar[str] = ""

    def __init__(
        self,
        reason: str = "",
        *,
        key: str = "",
        intent: str | None = None,
        attempts: int = 0,
        code: str | None = None,
        response: Any = None,
        retry_after: float | None = None,
        status_url: str | None = None,
    ) -> None:
        super().__init__(f"{reason} {self.advice}".strip())
        self.key = key
        """The idempotency key of the request."""
        self.intent = intent
        """The name of the intent, if it has one."""
        self.attempts = attempts
        """How many attempts this call made."""
        self.code = code
        """The code of the service's problem, such as `outcome-unknown`, if it sent one."""
        self.response = response
        """The last response, in the class of your HTTP library, if there is one. It is lost by pickling."""
        self.retry_after = retry_after
        """How many seconds the service asked you to wait, if it did."""
        self.status_url = status_url
        """Where the service shows what became of the key, if it told."""

    def __reduce__(self) -> tuple[Any, ...]:
        cause = self.__cause__
        if cause is not None and "request" in vars(cause):
            # The errors of requests hold the request, with its credentials.
            cause = RuntimeError(type(cause).__name__)
        # Not by `__init__`, which would write the advice a second time.
        return type(self).__new__, (type(self), *self.args), {**vars(self), "response": None, "__cause__": cause}


class NotCarriedOut(ClientError):
    """The service did not carry out the request, and will not. You may change it, and you may take a new key."""


class NotSent(NotCarriedOut):
    """No attempt left this machine: the connection could not be opened, or a header field cannot be sent."""

    advice = "The service did nothing. Look at the cause. You may send the request again, changed or not."


class Refused(NotCarriedOut):
    """The service refused the request before it began: its key, the caller, its size, or a limit on requests."""

    advice = "The service did nothing. You may change the request and send it with a new key."


class KeyVoided(NotCarriedOut):
    """The key was voided: the service has no request that ran under it, and lets none run. So lost attempts did not run."""

    advice = "The service did nothing. If you still want it to happen, use an intent of another name."


class KeyReused(ClientError):
    """The key belongs to another request. Find out which one before you send this one under another key."""

    advice = "This request did nothing. Use one intent for one request, and find out what the key was used for."


class Unsettled(ClientError):
    """The service may have carried out the request. Send it again with the same key, never with a new one."""


class InFlight(Unsettled):
    """An attempt with this key was still running when the deadline passed."""

    advice = "Ask again later with the same key."


class OutcomeUnknown(Unsettled):
    """The request may have been carried out, and no response settles it."""

    advice = "Ask again with the same key, or look up whether it took effect. Do not take a new key."


class KeyExpired(Unsettled):
    """The request was sent so long ago that the service may have forgotten its key. The same key could run it again."""

    advice = "Look up whether it took effect. Then call `forget(name)` on the ledger."


class CarriedOut(ClientError):
    """The service carried out the request before, and its response cannot be had. Read the resource instead."""


class AnswerNotKept(CarriedOut):
    """The service kept no copy of the response, or does not show it to this caller."""

    advice = "It was carried out before. Read the resource, at `Location` if the response has one."


class AnswerExpired(CarriedOut):
    """The service no longer keeps its copy of the response, and still knows the key."""

    advice = "It was carried out before. Read the resource."


class AnswerErased(CarriedOut):
    """The service has erased its copy of the response."""

    advice = "It was carried out before. Read the resource."


class IntentOver(CarriedOut):
    """The intent ended so long ago that the service may have forgotten its key. Nothing was sent."""

    advice = "It was carried out before. Read the resource, or name a new intent."


class LedgerError(Exception):
    """The ledger's file cannot be used, so nothing was sent. The cause has the error of SQLite."""
