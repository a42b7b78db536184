"""One call through a transport, from its first attempt to its end: which key it sends, when it tries again, how it ends.

A delivery decides; it never sends or waits by itself. The transports of httpx and requests share it, so both keep the same
rules. Its block notes in the ledger how the call ended. `start` may write to the ledger's file: an asynchronous transport
calls it in a thread.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from threading import Lock
from traceback import walk_tb
from typing import Any, Final, NoReturn, Self
from weakref import WeakValueDictionary

from flask_idempotency.client import errors
from flask_idempotency.client.intents import Intent, current_intent, in_thread, new_key, taken_intent
from flask_idempotency.client.ledger import Begun, State
from flask_idempotency.client.responses import UNDONE, Reading, Verdict, read
from flask_idempotency.client.retries import LONGEST_SECONDS, LOST_REPLY_COST, RETRY_COST, Attempt, Retries

__all__ = ["MAX_BODY_BYTES", "METHODS", "Delivery", "Late", "Rules", "may_be_answered", "raised_in", "seconds_left"]

METHODS: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
MAX_BODY_BYTES: Final = 8 * 2**20
PAUSE_IN_FLIGHT: Final = 1.0
"""Seconds between two questions, if the service does not say how long to wait for an attempt that runs."""
CHALLENGES: Final = UNDONE - {307, 308, 425, 429}
"""An authentication flow may answer these by the same request with other credentials."""

_log = logging.getLogger("flask_idempotency.client")

_ENDINGS: Final[Mapping[Verdict, tuple[State | None, type[errors.ClientError], str]]] = {
    Verdict.NOT_KEPT: ("done", errors.AnswerNotKept, "The service has no response to send."),
    Verdict.ERASED: ("done", errors.AnswerErased, "The service has no response to send."),
    Verdict.EXPIRED: ("done", errors.AnswerExpired, "The service no longer keeps the response."),
    Verdict.VOIDED: ("voided", errors.KeyVoided, "The key was voided."),
    Verdict.KEY_REUSED: (None, errors.KeyReused, "The service knows the key with another request."),
    Verdict.IN_FLIGHT: (None, errors.InFlight, "An earlier attempt still runs."),
}
"""What a response with this verdict makes of the intent, and how it ends the call."""


class Late(Exception):
    """The deadline passed while a response came in."""


_under_way: ContextVar[Delivery | None] = ContextVar("flask_idempotency.client.delivery", default=None)


def seconds_left(late: type[Exception]) -> float | None:
    """Return the seconds until the deadline of the delivery that this code works for, or None if there is none.

    Raises `late` if it has passed. A timeout counts from byte to byte. A connection asks before and after each read, because a
    head may drip.
    """
    delivery = _under_way.get()
    if delivery is None:
        return None
    left = delivery.remaining
    if left <= 0:
        raise late("The deadline passed while the response came in.")
    return left


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def raised_in(error: BaseException, *functions: str) -> bool:
    """Return whether the error, or what caused it, passed through one of these functions."""
    frames = (frame for each in _causes(error) for frame, _ in walk_tb(each.__traceback__))
    return any(frame.f_code.co_name in functions for frame in frames)


def may_be_answered(error: errors.ClientError) -> bool:
    """Return whether the client's authentication flow gets the response of this error first, and may go on.

    A transport then returns the response to the flow, and raises the error once the flow has ended with it.
    """
    return getattr(error.response, "status_code", None) in CHALLENGES


class Rules:
    """The settings of one transport, and the budget and the doubts that its calls share."""

    def __init__(
        self, retries: Retries | None, *, header: str, methods: Iterable[str], automatic: bool, max_body: int
    ) -> None:
        if not isinstance(retries, Retries | None):
            raise TypeError(f"retries must be a Retries, not {type(retries).__name__}.")
        if isinstance(methods, str):
            raise TypeError('methods must be several names, such as {"POST"}.')
        self.retries: Retries = Retries() if retries is None else retries
        self.header = header
        self.methods: frozenset[str] = frozenset(method.upper() for method in methods)
        self.automatic = automatic
        self.max_body = max_body
        self._lock = Lock()
        self.tokens: int = self.retries.budget
        """Those that are left for retries. They bound what one client adds to the load of a service that fails."""
        self._challenged: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def delivery(self, method: str, own_key: str | None, *, aside: bool = False) -> Delivery | None:
        """Return the delivery of this request, or None if it is to be passed on untouched.

        The key is the current intent's, or the request's own, or a new one if `automatic`. A request `aside`, such as one
        for a token, is not the intent's.
        """
        if method.upper() not in self.methods:
            return None
        # The threads of a pool have no current intent, but may have taken the key of one.
        intent = None if aside else current_intent() or taken_intent(own_key)
        if intent is not None:
            return Delivery(self, intent, intent.key)
        if own_key is not None:
            return Delivery(self, None, own_key)
        return Delivery(self, None, new_key()) if self.automatic else None

    def take(self, cost: int) -> bool:
        """Take this many tokens and return True, or take none and return False if fewer are left."""
        with self._lock:
            enough = self.tokens >= cost
            self.tokens -= cost if enough else 0
            return enough

    def refund(self, cost: int) -> None:
        """Return this many tokens. There are never more than at first."""
        with self._lock:
            self.tokens = min(self.retries.budget, self.tokens + cost)

    def challenged(self, error: errors.ClientError, response: Any) -> None:
        """Note that an authentication flow gets this response, and that the outcome under its key is not known yet."""
        if not isinstance(error, errors.NotCarriedOut):
            # The flow holds the response while it goes on.
            self._challenged[error.key] = response

    def doubts(self, key: str) -> bool:
        """Return whether the flow that sends this key again began with a request that may have been carried out."""
        return key in self._challenged


class Delivery:
    """One call: its key, its doubts, its retries.

    A doubt is that the request may have been carried out by an attempt whose response is not here. Once there is one, no end
    of the call says that nothing was done.
    """

    def __init__(self, rules: Rules, intent: Intent | None, key: str) -> None:
        self.key: str = key
        self._rules = rules
        self._retries = rules.retries
        self._timing = rules.retries.timing
        self._intent = intent
        self._begun: Begun | None = None
        self._doubt = False
        self._repeatable = True
        self._attempts = 0
        """Those that count against the limit."""
        self._sent = 0
        self._waits = 0
        self._spent = 0
        self._deadline = 0.0
        self._last: Reading | None = None
        self._state: State | None = None
        self._noted = True
        self._token: Token[Delivery | None] | None = None

    @property
    def on_disk(self) -> bool:
        """Whether `start` and `finish` write to a file."""
        return self._intent is not None and self._intent.on_disk

    @property
    def remaining(self) -> float:
        """The seconds until the deadline. Cut the timeouts of an attempt to this."""
        return max(0.0, self._deadline - self._timing.monotonic())

    def start(self, method: str, media_type: str, body: bytes | None) -> None:
        """Begin. `body` is None if its length is unknown: then it is sent once.

        Raises `KeyReused`, `KeyExpired`, `IntentOver` or `LedgerError`; nothing has been sent then.
        """
        self._deadline = self._timing.monotonic() + min(self._retries.deadline, LONGEST_SECONDS)
        self._repeatable = body is not None
        self._doubt = self._rules.doubts(self.key)
        if self._intent is not None:
            self._begun = self._intent.begin(self._intent.content(method, media_type, body))
            # The ledger may have a newer key for this name.
            self.key = self._begun.entry.key
            # An earlier call under this key ended without a final response, or its process died.
            self._doubt = self._doubt or self._begun.doubt
            if self._doubt:
                # Past that time the service may have forgotten the key, and would carry the request out again.
                self._deadline = min(self._deadline, self._timing.monotonic() + self._begun.seconds_kept)

    def failed(self, error: Exception, *, sent: bool, again: bool = True) -> float:
        """Return the seconds to wait before the next attempt, after one that brought no whole response.

        `sent` says whether a byte of the request may have left this machine. Raises the error that ends the call.
        """
        self._sent += 1
        self._doubt = self._doubt or sent
        self._last = None
        # A service that restarts refuses connections. Such a try brings it no load, so only the deadline bounds those. A
        # certificate that does not verify will not do so later.
        away = not sent and not any(isinstance(each, ssl.SSLError) for each in _causes(error))
        self._attempts += not away
        wait = None
        if again and not (away and self._retries.attempts == 1):
            wait = self._next(None, cost=LOST_REPLY_COST if sent else 0 if away else RETRY_COST)
        self._observe(error, wait)
        if wait is None:
            if self._doubt:
                self._end(errors.OutcomeUnknown, "No response settles the request.", cause=error)
            self._state = "new"
            reason = "The connection could not be opened." if again else "The request cannot be sent as it is."
            self._end(errors.NotSent, reason, cause=error)
        return wait

    def received(self, response: Any, body: bytes, *, url: str) -> float | None:
        """Return the seconds to wait before the next attempt, or None if the caller gets this response.

        `body` is decoded. Raises the error that ends the call, with `response` in it.
        """
        reading = read(response.status_code, response.headers, body, url=url)
        self._sent += 1
        self._last = reading
        wait: float | None = None
        match reading.verdict:
            case Verdict.IN_FLIGHT:
                self._doubt = True
                pause = PAUSE_IN_FLIGHT if reading.retry_after is None else reading.retry_after
                wait = self._next(pause, cost=0)
            case Verdict.RETRY | Verdict.RETRY_UNDONE | Verdict.PAUSED:
                self._attempts += 1
                self._doubt = self._doubt or reading.verdict is not Verdict.RETRY_UNDONE
                wait = self._next(reading.retry_after, cost=RETRY_COST)
            case _:
                self._attempts += 1
        self._observe(None, wait)
        if wait is None:
            self._conclude(reading, response)
        return wait

    def __enter__(self) -> Self:
        self._token = _under_way.set(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Note in the ledger how the call ended, by a response or an exception."""
        if self._token is not None:
            _under_way.reset(self._token)
        self._finish()
        self._confirm(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        await in_thread(self._finish, on_disk=self.on_disk, shield=True)
        self._confirm(error)

    def _finish(self) -> None:
        if self._intent is not None and self._begun is not None:
            self._noted = self._intent.end(self._begun, self._state, self._last, attempts=self._sent)

    def _confirm(self, error: BaseException | None) -> None:
        """Raise `OutcomeUnknown` in place of a `NotCarriedOut`, if another delivery of the same key began.

        Another thread or process may have sent the key since, and then its request may be carried out.
        """
        if isinstance(error, errors.NotCarriedOut) and not isinstance(error, errors.KeyVoided) and not self._noted:
            self._state = None
            self._end(errors.OutcomeUnknown, "Another call has sent the key too.", error.response, cause=error)

    def _next(self, retry_after: float | None, *, cost: int) -> float | None:
        """Return how long to wait for the next attempt, or None if there is none. What costs nothing does not count as one."""
        if not self._repeatable or (cost and self._attempts >= self._retries.attempts):
            return None
        wait = self._retries.wait(self._waits, retry_after, growing=not cost and retry_after is None)
        if wait >= self.remaining or not self._rules.take(cost):
            return None
        self._waits += 1
        self._spent += cost
        return wait

    def _conclude(self, reading: Reading, response: Any) -> None:
        """Settle the call by this response, or raise the error that it means."""
        match reading.verdict:
            case Verdict.RETURN:
                if self._doubt and not reading.replayed and 400 <= reading.status < 500 and not reading.kept:
                    self._end(
                        errors.OutcomeUnknown,
                        f"The service answered {reading.status}, which settles nothing.",
                        response,
                    )
                self._rules.refund(self._spent or 1)
                # The caller gets this response. It settles the intent if the service keeps it.
                if reading.kept and reading.status < 400:
                    self._state = "done"
                elif reading.kept and (reading.replayed or not self._doubt):
                    self._state = "refused"
                elif reading.status in UNDONE and not self._doubt:
                    # Not carried out. The same key may follow a redirect, or come again with credentials.
                    self._state = "sent"
            case Verdict.PAUSED:
                # The caller gets what the view wrote. No status of it settles the intent.
                pass
            case verdict if (ending := _ENDINGS.get(verdict)) is not None:
                self._state, kind, reason = ending
                self._end(kind, reason, response)
            case Verdict.REFUSED | Verdict.RETRY_UNDONE if not self._doubt:
                self._state = "refused"
                self._end(errors.Refused, f"The service refused the request with {reading.status}.", response)
            case _:
                self._end(errors.OutcomeUnknown, "No response settles the request.", response)

    def _end(
        self, ending: type[errors.ClientError], reason: str, response: Any = None, *, cause: Exception | None = None
    ) -> NoReturn:
        reading = self._last
        raise ending(
            reason,
            key=self.key,
            intent=None if self._intent is None else self._intent.name,
            attempts=self._sent,
            code=None if reading is None else reading.code,
            response=response,
            retry_after=None if reading is None else reading.retry_after,
            status_url=None if reading is None else reading.status_url,
        ) from cause

    def _observe(self, error: Exception | None, wait: float | None) -> None:
        observer = self._retries.observer
        if observer is None:
            return
        reading = self._last
        status, code = (None, None) if reading is None else (reading.status, reading.code)
        try:
            observer(Attempt(self._sent, status, code, error, wait))
        except Exception as failure:  # noqa: BLE001 - the call goes on: it may have moved money
            # Its text and its context may have the request.
            _log.error("The observer of Retries failed with %s.", type(failure).__name__)
