"""Hold the state of one keyed request.

The state is an attribute of the `Request` object, because each dispatch has another one. Copies of the context share the
request. A nested dispatch makes a new one, even from the same environ, so `request.environ` would not do. Nor would Flask's
`g`: nested calls of the test client share it, and so do later requests of a worker thread that cleaned up an abandoned
stream (pallets/flask#6123).
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from copy import deepcopy
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, final

from flask import has_request_context
from werkzeug.wrappers import Response

from flask_idempotency.engine import ending
from flask_idempotency.engine.ending import IN_STREAM, Running
from flask_idempotency.engine.errors import IdempotencyError
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.policy import Decision, Policy
from flask_idempotency.web.problems import Problem
from flask_idempotency.web.request_body import Body
from flask_idempotency.web.responses import CapturedResponse, Looks, StreamEnd, Tee

if TYPE_CHECKING:
    from contextvars import ContextVar

    from flask_idempotency.engine.store import Transaction
    from flask_idempotency.web.kept_requests import Try

try:
    from flask.globals import _cv_request
except ImportError:  # Flask 3.2 keeps one context for application and request
    from flask.globals import _cv_app as _cv_request  # type: ignore[assignment]

context: ContextVar[Any] = _cv_request
"""The running request's context, at a tenth of the cost of Flask's proxies. Each request reads it six times."""


# From Flask 3.2 on, an application context is of the same class.
ending.request_context = lambda: context.get() if has_request_context() else None

_FLASHES = "_flashes"
"""Where Flask keeps flash messages in the session."""


FINISHING: Final = "flask_idempotency.finishing"
"""Where the environ of the janitor's request holds its `Try`, until the request has begun. No client can set it."""


class Phase(Enum):
    """How far a request has come. Only NEW may claim; only CLAIMED and STREAMING have a claim to end.

    UNKEYED: its form could have carried a key, but did not. ANSWERED: the guard responded, so the view must not run.
    """

    NEW = "new"
    UNKEYED = "unkeyed"
    CLAIMED = "claimed"
    UNPROTECTED = "unprotected"
    ANSWERED = "answered"
    STREAMING = "streaming"
    DONE = "done"


@final
class RequestState(Running):
    """The state of one request. Only the guard changes it, in the order of `Phase`; and an observer its shadow.

    It refers to no request or context.

    Defaults are attributes of the class, so that a request pays only for what it sets.
    """

    def __init__(self, policy: Policy, operation: str, scope: str | None, deferred: bool) -> None:
        self.policy = policy
        self.operation = operation
        self.scope = scope
        """The innermost blueprint, whose hook lists hold the guard's hooks for this request."""
        self.deferred = deferred
        """`@claim_here` claims the key, not the hook."""

    finishing: Try | None = None
    fault: str = ""
    """Why this request must not run unprotected, and cannot be protected. Empty: nothing prevents it."""
    phase: Phase = Phase.NEW
    reached: bool = False
    """Whether every hook has let it pass: now the view or one of its decorators responds."""
    context: int = 0
    """The context that claimed. Copies of it share the request, and are popped while the view is still running."""
    record: str = ""
    """The short keyed hash that events carry."""
    began: float = 0.0
    """When the guard began to read it, by `time.perf_counter`. Set if activity is on."""
    preferred_wait: int | None = None
    """The seconds of `Prefer: wait=…`, if they shorten the policy's `wait`."""
    body: Body | None = None
    shadow: RequestState | None = None
    """The state by which this request is observed. Only under `mode` `observe` and `warn`."""
    caller: str = "anonymous"
    """Of a shadow: the kind of credential that the request carries, one of `activity.CALLERS`."""
    observed: str = ""
    """Of a shadow: what enforcing would have done with it, one of `activity.OBSERVED`."""
    watching: Any = None
    """Of a shadow: the `ObservingStore` of its claim."""
    reply: Problem | StoredResponse | None = None
    """What the guard sends in the view's place. Hooks may change the response, so it can be built again."""
    response: Response | None = None
    """The last response that was built from it."""
    looks: Looks | None = None
    """The appearance of that response when it was built."""
    captured: bool = False
    """Whether the response has passed our after_request hook, of which a scope may come to hold several."""
    capture: CapturedResponse | None = None
    tee: weakref.ref[Tee] | None = None
    """Weak, because the tee refers to this state. Its destructor must run when the last hook or server drops it."""
    end: StreamEnd | None = None
    result: StoredResponse | None = None
    decision: Decision | None = None
    error: BaseException | None = None
    status: int = 0
    """The status of the view's response, before other hooks."""
    unclaimed: Transaction | None = None
    """The transaction of a view that runs without a claim."""
    session_was_modified: bool = True
    """Whether hooks had modified the session before the view."""
    session_before: dict[str, Any] | None = None
    """What the session held before the view. None: unknown."""
    sets_cookie: bool = False
    """Whether the view or its `after_this_request` functions set one, or changed more in the session than flash messages."""
    escaped_refusal: IdempotencyError | None = None
    """The error of ours that a step raised, that left the view, and that the guard has answered."""
    escaped: bool = False
    """Whether the error came out of the view, and was not only reported from within it."""

    @property
    def step_hindrance(self) -> str:
        """Where this code runs, if no step may begin there, and the remedy. Empty: one may.

        What runs before the claim or after the view also runs on replays, and would do the effect again.
        """
        observed = self.policy.mode != "enforce" and not self.policy.commits_rows
        if self.phase is Phase.NEW and self.policy.effects == "steps" and not observed:
            return "before the key of its request is claimed. Take it in the view, below @claim_here if there is one."
        if self.claim is not None and self.phase in (Phase.STREAMING, Phase.DONE):
            return IN_STREAM
        if self.reply is not None or (self.claim is not None and self.captured):
            return "in a hook after the view, which runs on replays too. Take it in the view, or in after_this_request."
        return ""

    def note_session(self) -> None:
        """Remember what the session of this request holds before the view.

        The copy does not change when the view changes a list within the session.
        """
        session = session_here()
        self.session_was_modified = bool(getattr(session, "modified", True))
        self.session_before = None
        if not self.session_was_modified and isinstance(session, dict):
            with suppress(Exception):  # a session on a server may hold anything
                # dict.items, because the session's own methods mark it as accessed.
                self.session_before = deepcopy(dict(dict.items(session)))

    def session_changed(self) -> bool:
        """Return whether the view changed more in the session than its flash messages. True if its class cannot tell."""
        before, self.session_before = self.session_before, None
        if self.session_was_modified:
            return False
        held = vars(context.get())  # as `session_here`, without the call: every first request comes here
        session = held.get("_session", held.get("session"))
        if not getattr(session, "modified", True):
            return False
        if before is None or not isinstance(session, dict):
            return True
        now = dict(dict.items(session))
        if _FLASHES not in before and _FLASHES not in now:
            return True
        try:
            return {**now, _FLASHES: None} != {**before, _FLASHES: None}
        except Exception:  # noqa: BLE001 - as above
            return True

    def __repr__(self) -> str:
        # Error trackers send it to other services: no key, principal or tenant.
        return f"<RequestState {self.operation} {self.phase.value} {self.record}>"


def environ_key(app: object) -> str:
    """Name the attribute of a `Request` that holds this application's state."""
    return f"flask_idempotency.{id(app):x}"


def current_state() -> RequestState | None:
    """Return the state of the request that is being handled here. None: no request, or none that could be keyed."""
    if not has_request_context():
        return None
    here = context.get()
    state: RequestState | None = getattr(here.request, environ_key(here.app), None)
    return state


ending.request_work = current_state


def session_here() -> Any:
    """Return the session of this request, and leave no trace that it was read."""
    # Flask's own way to the session marks it as accessed, and that adds `Vary: Cookie` to the response.
    held = vars(context.get())
    return held.get("_session", held.get("session"))
