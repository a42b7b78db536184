"""Where a request meets the guard.

`head` notes that a request is keyed. `tail` asks for the claim: it stays the *last* hook of the request's innermost scope,
so that every authentication, CSRF and rate-limit hook of the application and its blueprints has run before a replay.
`capture` stays the *first executed* after_request hook of that scope; on a replay it puts the stored answer at the very
point where it was taken, so that all other hooks run once, afresh, on identical input. `finish` settles when all of them
have succeeded: a stored 200 must not follow a failed commit. `teardown` is the crash path only, and the first to be torn
down, because a teardown function that fails keeps the rest from running.

`research/flask-hooks.md` has the facts; `tests/web/test_flask_internals.py` holds Flask to those relied on here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock
from typing import Any

from flask import Flask, Request, appcontext_pushed, got_request_exception, request, request_finished
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.forks import notice
from flask_idempotency.engine.policy import Decision, Policy
from flask_idempotency.web.callbacks import check_counted
from flask_idempotency.web.guard import Desk, Guard
from flask_idempotency.web.policies import ResolvedPolicy
from flask_idempotency.web.principals import is_of_httpauth
from flask_idempotency.web.problems import Problem
from flask_idempotency.web.request_body import FORM_TYPES, Closing, watch_body
from flask_idempotency.web.request_state import (
    Phase,
    RequestState,
    context,
    context_id,
    environ_key,
    only_flashes_changed,
    session_is_modified,
    session_values,
    visit_of,
)

_log = logging.getLogger("flask_idempotency")


class Hooks:
    """One application's hooks. Owned by `app.extensions`; signals hold it weakly, so that apps can be dropped."""

    def __init__(self, app: Flask, desk: Desk) -> None:
        self._app = app
        self._desk = desk
        self._policies = desk.policies
        self._enabled = desk.settings.enabled
        self._guard = Guard(app, desk)
        self._slot = environ_key(app)
        self._tail = LastHook(app.before_request_funcs, self._slot, self.tail, newest_only=True)
        self._capture = LastHook(app.after_request_funcs, self._slot, self.capture)
        self._teardown = LastHook(app.teardown_request_funcs, self._slot, self.teardown)
        self.at_first: Callable[[], Any] | None = None
        """Called once, before the first request is looked at."""
        self._checked = False
        self._check = Lock()
        self._told: set[str] = set()
        self._fault: str | None = None
        """Why no key can be claimed in this application, if that came to light after it was set up."""
        self._warned: set[tuple[str, str]] = set()

    def install(self) -> None:
        """Raises Flask's own error once the application has handled a request."""
        self._app.before_request(self.head)
        if self._desk.engine.transactions is not None:
            # Before any hook or session interface of the application uses its database.
            appcontext_pushed.connect(self.entered, self._app)
        request_finished.connect(self.finish, self._app)
        got_request_exception.connect(self.failed, self._app)

    def entered(self, sender: Flask, **_: Any) -> None:
        """Notice a fork that Python was not told of: see `engine.forks`."""
        notice()

    def report(self) -> None:
        """Log what cannot hold of the endpoints that are there, all of it together. Each closes its own endpoint only."""
        try:
            faults = [fault for fault in self._policies.faults() if fault not in self._told]
        except Exception:  # noqa: BLE001 - one view that cannot be looked at must not close the others
            _log.exception("not every policy could be checked")
            return
        self._told.update(faults)
        if faults:
            # Not as an argument of the log call: line breaks of those are escaped.
            each = "".join(f"\n  - {printable(fault)}" for fault in faults)
            _log.error("Policies that cannot hold. Their endpoints answer 500 until you change them:" + each)

    def head(self) -> Response | None:
        """Note that this request may be keyed. Reads no body and calls no store: it may stand before authentication."""
        notice()
        if not self._checked:
            self._look_at_all()
        asked = request._get_current_object()  # type: ignore[attr-defined]
        rule = asked.url_rule
        if rule is None:  # 404, 405, a slash redirect: the router answers, and there is no view to guard
            return None
        resolved = self._policies.resolve(rule.endpoint, asked.method)
        if resolved.exempt:
            return None
        policy = resolved.policy
        # Transactional views leave it to us to commit their rows, whether or not there is a key, and even if we are off.
        keyed = self._enabled and _may_be_keyed(asked, resolved)
        joint = policy.effects == "transactional"
        if resolved.faults and (self._enabled or joint):
            return self._closed(rule.endpoint, policy, " ".join(resolved.faults))
        if not keyed and not joint:
            return None
        if keyed and self._fault is not None:
            return self._closed(rule.endpoint, policy, self._fault)
        scope = asked.blueprints[0] if asked.blueprints else None
        asked.__dict__[self._slot] = RequestState(policy, rule.endpoint, scope, resolved.deferred, self.from_view)
        watch_body(asked)
        self._tail.keep(scope)
        self._capture.keep(scope)
        self._teardown.keep(scope)
        return None

    def tail(self, visit: RequestState) -> Response | None:
        """Ask for the claim: the last thing before the view, so a missing or malformed key is judged after signing in."""
        visit.reached = True
        return self._enter(visit) if visit.phase is Phase.NEW and not visit.deferred else None

    def from_view(self, visit: RequestState) -> Response | None:
        """Ask for the claim where `@claim_here` stands. What was answered once is answered alike each time it is entered:
        a decorator above may take our answer for a failure, and try again."""
        if visit.phase is Phase.NEW:
            return self._enter(visit)
        if visit.answer is not None:
            return self._guard.again(visit)
        if visit.phase is Phase.CLAIMED and not visit.deferred:
            self._warn_once(
                visit,
                "@claim_here was entered in %s after its key had been claimed, so the decorators above it do not run on "
                "replays. A decorator there lacks functools.wraps, or one view calls another as a function.",
            )
        return None

    def capture(self, visit: RequestState, response: Response) -> Response:
        """Take the snapshot, or put our own answer in place."""
        if visit.captured or visit.context != context_id():
            return response
        visit.captured = True
        if visit.phase is Phase.CLAIMED:
            changed = not visit.session_was_modified and session_is_modified()
            changed = changed and not only_flashes_changed(visit.session_before)
            visit.sets_cookie = changed or "Set-Cookie" in response.headers
            visit.session_before = None
        self._guard.captured(visit, response)
        if visit.body is not None and "werkzeug.debug.preserve_context" not in request.environ:
            Closing(visit.body, response)
        return response

    def failed(self, sender: Flask, exception: BaseException, **_: Any) -> None:
        """Remember an unhandled error. Flask-RESTX and -RESTful send this signal for every abort() as well."""
        visit = self._visit()
        if visit is None or visit.context != context_id():
            return
        visit.captured = False  # if it was: a later hook failed, and the after_request functions run again over the 500
        if isinstance(exception, HTTPException) and not _unhandled(exception):
            return
        visit.error = exception
        visit.escaped = _escaped(exception)
        if visit.phase is Phase.ANSWERED:
            visit.phase = Phase.DONE  # a hook failed over our answer: its 500 stands

    def finish(self, sender: Flask, response: Response, **_: Any) -> None:
        """All hooks have succeeded and the session is saved: only now is the answer final."""
        if (
            self._guard.abandoned_streams
        ):  # of any request, for those with a key may be rare; one, for each may wait for the store
            self._guard.settle_abandoned(most=1)
        visit = self._visit()
        if visit is None:
            return
        if visit.phase is Phase.CLAIMED and visit.context == context_id():
            self._guard.finish(visit, response)
            if visit.sets_cookie and visit.decision is Decision.KEEP:
                self._warn_once(
                    visit,
                    "%s set a cookie or changed the session, and its responses are kept. A retry gets the response without "
                    "the cookie, and a token in its body can be read in the store. Add @exempt to views that sign users in "
                    "or out.",
                )
        elif visit.phase is Phase.NEW and visit.reached and 200 <= response.status_code < 300:
            self._warn_once(
                visit,
                "%s has answered without entering @claim_here, so its key was not looked at and a retry runs it again. "
                "A decorator above calls what is below @claim_here, or has answered itself.",
            )
        if visit.policy.effects == "transactional" and (
            visit.phase in (Phase.UNKEYED, Phase.UNPROTECTED) or (visit.phase is Phase.NEW and visit.reached)
        ):
            self._guard.rows.unclaimed(visit, response)
        if visit.client_key and self._desk.watch is not None:
            self._desk.watch.look()
        if visit.claim is not None and self._desk.shape is not None:
            self._desk.shape.look(
                httpauth=self._desk.loaders.principal is None and is_of_httpauth(visit.principal),
            )

    def teardown(self, visit: RequestState, error: BaseException | None) -> None:
        """Settle what nothing else has settled. Runs twice for some streams, and for every popped copy of the context."""
        if visit.phase is Phase.CLAIMED and visit.context == context_id():
            self._guard.abandon(visit, error)
        elif visit.phase is Phase.DONE and visit.policy.effects == "transactional":
            self._guard.rows.left_over(visit)
        if visit.unclaimed is not None and visit.context == context_id():
            visit.unclaimed.leave()

    def _look_at_all(self) -> None:
        """Before the first request is looked at: everything is registered and configured by now."""
        with self._check:
            if self._checked:
                return
            self.report()
            try:
                check_counted(self._desk.loaders, self._desk.settings.quota, counts=self._desk.counts)
            except ConfigurationError as error:
                self._fault = str(error)
                _log.error("Requests with a key answer 500 until you change this: %s", error)
            self._checked = True
        if self.at_first is not None:
            try:
                self.at_first()
            except Exception:  # noqa: BLE001 - it only tells; what is wrong there, a claim finds too
                _log.exception("the tables of the store could not be looked at")

    def _closed(self, endpoint: str, policy: Policy, fault: str) -> Response:
        """What a request is told that must not run unprotected, and cannot be protected."""
        if endpoint not in self._told:
            self._told.add(endpoint)
            _log.error("%s does not run: %s", endpoint, fault)
        shown = fault if self._app.debug or self._app.testing else ""
        return self._guard.problem(Problem("misconfigured", shown), policy)

    def _enter(self, visit: RequestState) -> Response | None:
        visit.context = context_id()
        visit.session_was_modified = session_is_modified()
        visit.session_before = None if visit.session_was_modified else session_values()
        return self._guard.enter(visit, request._get_current_object())  # type: ignore[attr-defined]

    def _warn_once(self, visit: RequestState, message: str) -> None:
        """Once per endpoint and message."""
        if (visit.operation, message) not in self._warned:
            self._warned.add((visit.operation, message))
            _log.warning(message, visit.operation)

    def _visit(self) -> RequestState | None:
        """For signals, which anybody may send, in a request or not."""
        here = context.get(None)
        return None if here is None else visit_of(here.request, self._slot)


def _escaped(exception: BaseException) -> bool:
    """Whether it came out of the view: then it was Flask that caught it, and not whoever reports it by this signal."""
    seen_by = exception.__traceback__
    return seen_by is not None and seen_by.tb_frame.f_globals.get("__name__") == "flask.app"


def _unhandled(exception: BaseException) -> bool:
    """Whether Flask's outermost caller caught it: it was raised by a hook after the view, or was trapped."""
    seen_by = exception.__traceback__
    return _escaped(exception) and seen_by is not None and seen_by.tb_frame.f_code.co_name == "wsgi_app"


def _may_be_keyed(asked: Request, resolved: ResolvedPolicy) -> bool:
    policy = resolved.policy
    return (
        policy.required
        or not asked.environ.keys().isdisjoint(resolved.headers)
        or (policy.form_field is not None and asked.mimetype in FORM_TYPES)
    )


class LastHook:
    """Keeps a function of ours the last in each scope's list of hooks, whatever is added after it.

    It is called with the visit, if the request has one and this is its scope, and with what Flask passes on.

    Other threads iterate these lists, so nothing is ever moved or taken out: that could make them skip a hook, such as the
    one that authenticates. A new one is appended first and published second. `newest_only`: one that is no longer the
    newest does nothing. That is for lists that run forwards, where the newest is still to come; those that run backwards
    may have been begun before it was appended, and a request whose answer nobody captures would be run again.
    """

    def __init__(
        self,
        hooks: dict[str | None, list[Callable[..., Any]]],
        slot: str,
        act: Callable[..., Any],
        *,
        newest_only: bool = False,
    ) -> None:
        self._hooks = hooks
        self._slot = slot
        self._act = act
        self._newest_only = newest_only
        self._newest: dict[str | None, Callable[..., Any]] = {}
        self._lock = Lock()

    def keep(self, scope: str | None) -> None:
        """See that it is the last in this scope now."""
        if not self._is_last(scope):
            with self._lock:
                if not self._is_last(scope):
                    hook = self._made(scope)
                    self._hooks.setdefault(scope, []).append(hook)
                    self._newest[scope] = hook

    def _is_last(self, scope: str | None) -> bool:
        hooks = self._hooks.get(scope)
        return hooks is not None and hooks[-1:] == [self._newest.get(scope)]

    def _made(self, scope: str | None) -> Callable[..., Any]:
        slot, act, newest, newest_only = self._slot, self._act, self._newest, self._newest_only

        def idempotency(*passed_on: Any) -> Any:
            # Most requests have no visit, and all pay for this line.
            visit = context.get().request.__dict__.get(slot)
            if visit is None or visit.scope != scope or (newest_only and newest[scope] is not idempotency):
                return passed_on[0] if passed_on else None
            return act(visit, *passed_on)

        return idempotency
