"""One keyed request's way through the guard: what is known of it, and how far it has come.

It lives on the `Request` object, because that is what one dispatch has and no other: copies of the context share it, and
a nested dispatch makes another, also from a copy of the outer environ or from the very same one. `request.environ` would
not do for that reason. Nor would Flask's `g`: it is shared with nested calls of the test client, and with later requests
of a worker thread on which an abandoned stream was cleaned up (pallets/flask#6123).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from flask import has_request_context
from werkzeug.wrappers import Response

from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.model import OnExpiry, StoredResponse
from flask_idempotency.engine.policy import Decision, Policy
from flask_idempotency.engine.store import Transaction
from flask_idempotency.web.request_body import Body
from flask_idempotency.web.responses import Answer, CapturedResponse, StreamEnd, Tee

if TYPE_CHECKING:
    from contextvars import ContextVar

try:
    from flask.globals import _cv_request
except ImportError:  # Flask 3.2 keeps one context for application and request
    from flask.globals import _cv_app as _cv_request  # type: ignore[assignment]

context: ContextVar[Any] = _cv_request
"""The running request's context: a tenth of the price of going through Flask's proxies, six times in each request."""


_FLASHES = "_flashes"
"""Where Flask keeps flash messages in the session."""


class Phase(Enum):
    """How far a request has come. Only NEW may ask for a claim; only CLAIMED and STREAMING have one to settle.

    UNKEYED: it might have carried a key in its form, and did not. ANSWERED: by us, so that its view must not run.
    """

    NEW = "new"
    UNKEYED = "unkeyed"
    CLAIMED = "claimed"
    UNPROTECTED = "unprotected"
    ANSWERED = "answered"
    STREAMING = "streaming"
    DONE = "done"


@dataclass(slots=True, eq=False, repr=False)
class RequestState:
    """Changed by the guard alone, and in the order of `Phase`. Refers to no request and no context: no cycles."""

    policy: Policy
    operation: str
    scope: str | None
    """The innermost blueprint: where the request's own hooks, and ours, stand."""
    deferred: bool
    """`@claim_here` asks for the claim, not the hook."""
    from_view: Callable[[RequestState], Response | None]
    """What `@claim_here` calls: asks for the claim. Returns the answer to give in the view's place, or None."""
    phase: Phase = Phase.NEW
    reached: bool = False
    """Whether every hook has let it pass: what answers now is the view, or a decorator of its."""
    context: int = 0
    """Which context asked. Copies of it share the request, and are popped while the view is still running."""
    client_key: str = ""
    record: str = ""
    """The short keyed hash that events carry."""
    tenant: str | None = None
    principal: str | None = None
    former: tuple[str | None, str | None] = (None, None)
    """The tenant and the principal by IDEMPOTENCY_FORMER_IDENTITY."""
    body: Body | None = None
    claim: Claim | None = None
    oldest: Identity | None = None
    answer: Answer | None = None
    captured: bool = False
    """Whether the response has passed our after_request hook, of which a scope may come to hold several."""
    capture: CapturedResponse | None = None
    tee: weakref.ref[Tee] | None = None
    """Weak, because it calls back to here: its destructor must run as soon as the last hook or server lets go of it."""
    end: StreamEnd | None = None
    result: StoredResponse | None = None
    decision: Decision | None = None
    error: BaseException | None = None
    status: int = 0
    """Of the answer as the view left it."""
    unclaimed: Transaction | None = None
    """Of a transactional view that runs without a claim."""
    session_was_modified: bool = True
    """Before the view. An application's hooks may change the session on each request."""
    session_before: dict[str, Any] | None = None
    """What the session held before the view. None: unknown."""
    sets_cookie: bool = False
    """Whether the view or its `after_this_request` functions set one, or changed more in the session than flash messages."""
    keeps_rows: bool = False
    """Whether the view wants its rows committed even with an error for an answer."""
    has_written: bool = True
    """Whether the view may have written rows, as known before they are rolled back."""
    unstated: bool = False
    """Whether its key is quarantined by default: neither the application nor the view has said so."""
    escaped: bool = False
    """Whether the error came out of the view, and was not only reported from within it."""

    def __repr__(self) -> str:
        # Error trackers send it away: no key, principal or tenant.
        return f"<Visit {self.operation} {self.phase.value} {self.record}>"


def environ_key(app: object) -> str:
    """Name the attribute of a `Request` that holds this application's visit."""
    return f"flask_idempotency.{id(app):x}"


def context_id() -> int:
    """Tells the running request context from its copies."""
    return id(context.get(None))


def session_is_modified() -> bool:
    """Whether the session of this request was changed. True if its class cannot tell.

    Flask's own way to the session marks it as accessed, and that adds `Vary: Cookie` to the response.
    """
    return bool(getattr(_session(), "modified", True))


def session_values() -> dict[str, Any] | None:
    """Copy what the session of this request holds. None: its class cannot be compared.

    The copy does not change when the view changes a list within the session.
    """
    session = _session()
    if not isinstance(session, dict):
        return None
    try:
        # Past the session's own methods: those note that it was accessed.
        return {name: _copied(value) for name, value in dict.items(session)}
    except Exception:  # noqa: BLE001 - a session on a server may hold anything
        return None


def only_flashes_changed(before: dict[str, Any] | None) -> bool:
    """Return whether the session, which was modified, holds what it held `before` except for its flash messages."""
    session = _session()
    if before is None or not isinstance(session, dict):
        return False
    now = dict(dict.items(session))
    if _FLASHES not in before and _FLASHES not in now:
        return False
    try:
        return {**now, _FLASHES: None} == {**before, _FLASHES: None}
    except Exception:  # noqa: BLE001 - as above
        return False


def _session() -> Any:
    held = vars(context.get())
    return held.get("_session", held.get("session"))


def _copied(value: Any) -> Any:
    return value if type(value) in (str, int, bool, type(None)) else deepcopy(value)


def visit_of(request: object, slot: str) -> RequestState | None:
    """Return this dispatch's visit, or None."""
    visit: RequestState | None = request.__dict__.get(slot)
    return visit


def current_visit() -> RequestState | None:
    """The visit of the request that is being handled here, or None: no request, or none that could be keyed."""
    if not has_request_context():
        return None
    here = context.get()
    return visit_of(here.request, environ_key(here.app))


# What becomes of a visit's claim, by its policy and by how its work ended.

ELSEWHERE: Final = frozenset({307, 308})
"""The same request goes elsewhere: such an answer promises nothing of what was done here."""

_log = logging.getLogger("flask_idempotency")


def decide(
    visit: RequestState, *, response: Response | None, status: int, error: BaseException | None, overruled: bool = False
) -> Decision:
    """What the policy says. Where the application's own `decide` fails, nobody knows, and the key is quarantined.

    Unless nothing will be left of the work: then it is released. And an answer whose rows the view wants kept is kept with
    them, for they must not be written twice. Notes in the visit whether a quarantine is nobody's word but the default.
    """
    policy, beyond = visit.policy, past_point(visit)
    try:
        stated = policy.stated(response=response, status=status, error=error, overruled=overruled)
    except Exception:  # noqa: BLE001 - an application's own function may raise anything
        decision = Decision.RELEASE if transactional(visit) and not beyond else Decision.QUARANTINE
        _log.exception("`decide` failed for %s: its key is %sd", visit.operation, decision.value)
        stated = decision
    else:
        decision = policy.settled_as(stated, past_point=beyond)
    if decision is Decision.RELEASE and transactional(visit) and visit.keeps_rows and error is None:
        return Decision.KEEP
    visit.unstated = decision is Decision.QUARANTINE is not stated
    return decision


def with_rows(visit: RequestState, *, status: int, error: BaseException | None) -> bool:
    """Whether the rows of a transactional view are to be committed. `status` is the worse of the view's and its hooks'."""
    return (status < 400 and status not in ELSEWHERE) or (visit.keeps_rows and error is None)


def vanished(visit: RequestState) -> Decision:
    """A worker that is being killed knows as little of the outcome as one that is gone."""
    return Decision.RELEASE if visit.policy.on_expiry is OnExpiry.TAKEOVER else Decision.QUARANTINE


def past_point(visit: RequestState) -> bool:
    """Whether the visit's work may have done what must not be done twice."""
    return visit.claim is not None and visit.claim.past_point


def transactional(visit: RequestState) -> bool:
    """Whether the rows that its view writes are committed with its claim."""
    return visit.claim is not None and visit.claim.transactional


class QuarantineLog:
    """Tells the operator of one application why failed requests quarantine their keys, and what would let retries run."""

    INTERVAL_SECONDS: Final = 3600
    """A view that fails does so on every request. One line an hour for each endpoint is seen, and drowns nothing."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = Lock()
        self._next: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def quarantined(self, visit: RequestState, reason: str) -> None:
        """Log this quarantine, or count it if the endpoint had its line within the hour."""
        operation, now = visit.operation, self._monotonic()
        with self._lock:
            if now < self._next.get(operation, now):
                self._suppressed[operation] = self._suppressed.get(operation, 0) + 1
                return
            self._next[operation] = now + self.INTERVAL_SECONDS
            more = self._suppressed.pop(operation, 0)
        _log.warning(
            "%s failed (%s) %s. The key is quarantined: retries get 409 outcome-unknown until a resolver or an operator "
            "settles it. %s%s",
            operation,
            reason,
            "past its point of no return" if past_point(visit) else "and does not say how far it came",
            _remedy(visit),
            f" {more} more keys of this endpoint since the last such line." if more else "",
        )


def _remedy(visit: RequestState) -> str:
    if not past_point(visit):
        return (
            'A retry runs by itself under effects="transactional" (rows committed with the record), "deduplicated" (a unique '
            'marker row or a downstream key) and "marked" (before its point of no return). on_error="release" runs it again '
            f'under effects="{visit.policy.effects}" too, and may do the work twice.'
        )
    if transactional(visit):
        return "The view committed by itself. Leave the commit to the library, and the retry runs."
    return (
        'A retry runs by itself under effects="deduplicated", without current_claim.point_of_no_return(), if the effect '
        "carries current_claim.downstream_key(…) or a unique marker row."
    )
