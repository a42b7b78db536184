"""Connect the guard to Flask's hooks and signals.

`note` runs before all hooks, and notes that a request may be keyed. `begin` claims the key. It stays the *last*
before_request hook of the request's innermost scope, so that all authentication, CSRF and rate-limit hooks run before a
replay. `capture` stays the *first executed* after_request hook of that scope. On a replay it puts the stored response where
the snapshot was taken, so that all other hooks run again on identical input. `finish` ends the claim after all of them
succeeded: a stored 200 must not follow a failed commit. `teardown` handles crashes only. It runs first, because a failing
teardown function stops the rest.

`tests/web/test_hooks_contexts.py` tests the facts about Flask that this module relies on.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from flask import Flask, Request, appcontext_pushed, got_request_exception, request_finished
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from flask_idempotency.assembly import is_process_local
from flask_idempotency.engine import forks
from flask_idempotency.engine.activity import REPLAYED_TIME
from flask_idempotency.engine.errors import ConfigurationError, IdempotencyError
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.model import StoredResponse
from flask_idempotency.engine.outages import LogLimit
from flask_idempotency.engine.policy import Decision
from flask_idempotency.web.callbacks import check_counted
from flask_idempotency.web.guard import Guard
from flask_idempotency.web.monitors import IdentityMonitor, JanitorMonitor, shape_in
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.principals import is_of_httpauth
from flask_idempotency.web.problems import Problem
from flask_idempotency.web.request_body import FORM_TYPES, close_with, watch_body
from flask_idempotency.web.request_state import FINISHING, Phase, RequestState, context, environ_key

if TYPE_CHECKING:
    from flask_idempotency.web.key_status import KeyStatusView
    from flask_idempotency.web.observing import Observer

STATUS_MODULE: Final = "flask_idempotency.web.key_status"
"""Where the status view is. Most applications never load it."""

Hook: TypeAlias = "Callable[..., Any]"

Hooked: TypeAlias = "dict[str | None, list[Hook]]"
"""Flask's hooks of one kind, by blueprint."""

_log = logging.getLogger("flask_idempotency")


# Every application connects these same three functions to Flask's signals. Blinker takes a dead receiver out in whatever
# thread collects it, and raises "dictionary changed size during iteration" if another thread connects one at that moment.


def _entered(sender: Flask, **_: Any) -> None:
    """Notice a fork that bypassed Python's fork hooks: see `engine.forks`."""
    forks.notice()


def _finished(sender: Flask, response: Response, **_: Any) -> None:
    """Receive the end of every request, with a key or without. Most requests have nothing to finish."""
    hooks: Hooks = sender.extensions["idempotency"].hooks
    here = context.get(None)
    state = None if here is None else getattr(here.request, hooks._key, None)
    if hooks._guard.abandoned_streams:
        # In any request: those with a key may be rare. One only: each may wait for the store.
        forks.notice()
        hooks._guard.settle_abandoned(most=1)
    if state is not None:
        hooks.finish(state, response)


def _failed(sender: Flask, exception: BaseException, **_: Any) -> None:
    hooks: Hooks = sender.extensions["idempotency"].hooks
    hooks.failed(exception)


class Hooks:
    """One application's hooks, owned by `app.extensions`."""

    def __init__(self, guard: Guard, policies: Policies) -> None:
        app, settings, built, callbacks = guard.app, guard.settings, guard.built, guard.callbacks
        self._app, self._settings, self._built, self._callbacks = app, settings, built, callbacks
        self._guard = guard
        self._policies = policies
        self._resolved = policies.resolved
        self._observer: Observer | None = None
        self._janitor: JanitorMonitor | None = None
        self._identity: IdentityMonitor | None = None
        if not is_process_local(settings):
            if built.tasks is not None and (every := settings.heartbeat_interval) is not None:
                self._janitor = JanitorMonitor(built.tasks, guard.observers, every=every)
            if built.task_log is not None:
                shape = partial(shape_in, app, settings, callbacks, policies)
                self._identity = IdentityMonitor(built.task_log, shape)
        self._enabled = settings.enabled
        self._key = environ_key(app)
        self._last = LastHooks(app, self._key, before=self.begin, after=self.capture, teardown=self.teardown)
        self.at_first: Callable[[], Any] | None = None
        """Called once, before the first request is handled."""
        self._checked = False
        self._check = Lock()
        self._activity = guard.activity
        self._fault: str | None = None
        """Why no key can be claimed in this application, if that came to light after it was set up."""
        self._warned = LogLimit()

    def install(self) -> None:
        """Register the hooks. Raises Flask's error if the application has already handled a request."""
        # Before all hooks of the application, wherever they are registered: a step in one of them must raise. The URL's values
        # are processed before any of those run, and first of all here.
        self._app.url_value_preprocessor(self.note)
        processors = self._app.url_value_preprocessors[None]
        processors.insert(0, processors.pop())
        if self._built.engine.transactions is not None:
            # Before any hook or session interface of the application uses its database.
            appcontext_pushed.connect(_entered, self._app)
        request_finished.connect(_finished, self._app)
        got_request_exception.connect(_failed, self._app)
        # The application's own handler of our errors comes first, whenever it is registered.
        self._app.error_handler_spec[None][None].setdefault(IdempotencyError, self.refused)

    def refused(self, error: IdempotencyError) -> Any:
        """Answer an error that a step raised. Any other error of ours goes on as if this handler were not there."""
        state = self._state()
        if state is not None and state.phase is Phase.CLAIMED and state.is_refusal(error):
            return self._guard.refused_step(state, error)
        general = self._app.error_handler_spec[None][None].get(Exception)
        if general is None:
            raise error
        return self._app.ensure_sync(general)(error)

    def report(self) -> None:
        """Log all policies with faults in one message. Each fault closes its own endpoint only."""
        try:
            faults = [fault for fault in self._policies.faults() if self._warned.take(fault) is not None]
        except Exception:  # noqa: BLE001 - one view that cannot be looked at must not close the others
            _log.exception("not every policy could be checked")
            return
        if faults:
            # Not as an argument of the log call: line breaks of those are escaped.
            each = "".join(f"\n  - {printable(fault)}" for fault in faults)
            _log.error("Policies that cannot hold. Their endpoints answer 500 until you change them:" + each)

    def note(self, endpoint: str | None, values: Any) -> None:
        """Note that this request may be keyed. Reads no body and calls no store: it runs before authentication."""
        if not self._checked:
            self._look_at_all()
        here: Request = context.get().request
        rule = here.url_rule
        if rule is None:  # 404, 405, a slash redirect: the router responds, and there is no view to guard
            return
        resolved = self._resolved.get((rule.endpoint, here.method)) or self._policies.resolve(
            rule.endpoint, here.method
        )
        if resolved.exempt:
            return
        policy = resolved.policy
        # Transactional views and steps leave it to us to commit their rows, with a key or without, and even if we are off.
        joint = policy.effects == "transactional" or (policy.effects == "steps" and policy.commits_rows)
        finishing = here.environ.pop(FINISHING, None) if policy.finish == "janitor" else None
        if finishing is not None and finishing.environ is not here.environ:
            finishing = None  # a receiver of `request_started` has dispatched a copy of the request
        # Its view must never run without the guard.
        keyed = finishing is not None or (
            self._enabled
            and (
                policy.required
                or not here.environ.keys().isdisjoint(resolved.headers)
                or (policy.form_field is not None and here.mimetype in FORM_TYPES)
            )
        )
        fault = ""
        if resolved.faults and (joint or (self._enabled and not resolved.observed)):
            fault = " ".join(resolved.faults)
        elif not keyed and not joint and not (resolved.observed and self._enabled):
            return
        if os.getpid() != forks.pid:
            forks.notice()
        scope = here.blueprints[0] if here.blueprints else None
        state = RequestState(policy, rule.endpoint, scope, resolved.deferred)
        if not fault and keyed and self._fault is not None and not resolved.observed:
            fault = self._fault
        if fault:
            state.fault = fault
        setattr(here, self._key, state)
        if joint and self._app.testing and self._built.engine.transactions is not None:
            self._built.engine.transactions.begin()
        if keyed or not resolved.observed:
            watch_body(here)
        self._last.keep(scope)
        if finishing is not None:
            state.finishing = finishing
            finishing.begin(here)

    def begin(self, state: RequestState, *, in_view: bool = False) -> Response | None:
        """Claim the key: the last thing before the view, so a missing or malformed key is judged after signing in."""
        if state.fault:
            # It must not run unprotected, and cannot be protected.
            if self._warned.take(f"{state.operation} does not run") is not None:
                _log.error("%s does not run: %s", state.operation, state.fault)
            shown = state.fault if self._app.debug or self._app.testing else ""
            return self._guard.replies.build(Problem("misconfigured", shown), state.policy)
        state.reached = True
        if state.phase is not Phase.NEW or (state.deferred and not in_view):
            return None
        here = context.get()
        state.context = id(here)
        state.note_session()
        if state.policy.mode != "enforce" and self._enabled:
            try:
                self.observer.watch(state, here.request)
            except Exception:  # noqa: BLE001 - its code is loaded here, and a deployment may have replaced the file
                _log.exception("%s could not observe a request. The request was not affected.", state.operation)
        return self._guard.begin(state, here.request)

    def from_view(self, state: RequestState) -> Response | None:
        """Claim the key at `@claim_here`. If the view is entered again, return the same response.

        A decorator above may take the guard's response for a failure, and call the view again.
        """
        if state.phase is Phase.NEW:
            return self.begin(state, in_view=True)
        if state.reply is not None:
            state.phase = Phase.ANSWERED
            return self._guard.reply(state, state.reply)  # the first one may have changed
        if state.phase is Phase.CLAIMED and not state.deferred:
            self._warn_once(
                state,
                "@claim_here was entered in %s after its key had been claimed, so the decorators above it do not run on "
                "replays. A decorator there lacks functools.wraps, or one view calls another as a function.",
            )
        return None

    def capture(self, state: RequestState, response: Response) -> Response:
        """Take the snapshot, or put our own response in place."""
        here = context.get()
        if state.captured or state.context != id(here):
            return response
        state.captured = True
        if state.policy.effects == "transactional":
            response = self._guard.rows.flush(state, response)
        self._guard.capture(state, response)
        if state.shadow is not None:
            self.observer.look(state, state.shadow, response)
        if state.capture is not None:
            state.sets_cookie = state.session_changed() or state.capture.sets_cookie
        body = state.body
        # A body in memory goes with its last reference.
        if body is not None and body.data is None and "werkzeug.debug.preserve_context" not in here.request.environ:
            close_with(response, body)
        return response

    def failed(self, exception: BaseException) -> None:
        """Remember an unhandled error. Flask-RESTX and -RESTful send this signal for every abort() as well."""
        state = self._state()
        if state is None or state.context != id(context.get(None)):
            return
        state.captured = False  # a later hook may have failed: after_request functions then run again over the 500
        # Whether it left the view, so that Flask caught it: an extension may send this signal for a caught one.
        seen_by = exception.__traceback__
        escaped = seen_by is not None and seen_by.tb_frame.f_globals.get("__name__") == "flask.app"
        # Only `wsgi_app` catches what a hook after the view raised, or what Flask traps.
        handled = seen_by is None or not escaped or seen_by.tb_frame.f_code.co_name != "wsgi_app"
        if isinstance(exception, HTTPException) and handled:
            return
        state.error, state.escaped = exception, escaped
        if state.phase is Phase.ANSWERED:
            state.phase = Phase.DONE  # a hook failed after the guard's response: the client gets that hook's 500

    def finish(self, state: RequestState, response: Response) -> None:
        """End the claim: all hooks have succeeded and the session is saved, so the response is final."""
        if state.phase is Phase.CLAIMED and state.context == id(context.get(None)):
            self._guard.finish(state, response)
            if state.sets_cookie and state.decision is Decision.KEEP:
                self._warn_once(
                    state,
                    "%s set a cookie or changed the session, and its responses are kept. A retry gets the response without "
                    "the cookie, and a token in its body can be read in the store. Add @exempt to views that sign users in "
                    "or out.",
                )
        elif self._activity is not None and type(state.reply) is StoredResponse and state.phase is Phase.ANSWERED:
            self._activity.timed((state.operation, REPLAYED_TIME, perf_counter() - state.began))
        elif state.phase is Phase.NEW and state.reached and 200 <= response.status_code < 300:
            self._warn_once(
                state,
                "%s has answered without entering @claim_here, so its key was not looked at and a retry runs it again. "
                "A decorator above calls what is below @claim_here, or has answered itself.",
            )
        committed = True
        if state.policy.effects == "transactional" and (
            state.phase in (Phase.UNKEYED, Phase.UNPROTECTED) or (state.phase is Phase.NEW and state.reached)
        ):
            committed = self._guard.rows.commit_unclaimed(state, response)
        if state.shadow is not None and state.context == id(context.get(None)):
            self.observer.end(state, state.shadow, response, committed=committed)
        if state.client_key and (janitor := self._janitor) is not None and janitor.monotonic() >= janitor.due:
            janitor.look()
        if state.claim is not None and (identity := self._identity) is not None:
            if self._callbacks.principal is None and is_of_httpauth(state.principal):
                identity.note_httpauth()
            if identity.monotonic() >= identity.due:
                identity.look()

    def teardown(self, state: RequestState, error: BaseException | None) -> None:
        """End a claim that is still open. Runs twice for some streams, and for every popped copy of the context."""
        if state.phase is Phase.CLAIMED and state.context == id(context.get(None)):
            self._guard.abandon(state, error)
        elif state.phase is Phase.DONE and state.policy.effects == "transactional":
            self._guard.rows.log_unsaved(state)
        if state.shadow is not None and state.context == id(context.get(None)):
            self.observer.end(state, state.shadow, None, error=error)
        if state.unclaimed is not None and state.context == id(context.get(None)):
            state.unclaimed.leave()

    def _look_at_all(self) -> None:
        """Check all policies before the first request: by now everything is registered and configured."""
        with self._check:
            if self._checked:
                return
            self.report()
            try:
                check_counted(self._callbacks, self._settings.quota, counts=self._built.ledger is not None)
            except ConfigurationError as error:
                self._fault = str(error)
                _log.error("Requests with a key answer 500 until you change this: %s", error)
            self._policies.fix()
            if STATUS_MODULE in sys.modules:  # else none of its views can be registered
                from flask_idempotency.web.key_status import find_status_views, other_view

                url = self._settings.status_url
                if url is not None and (other := other_view(self._app, url)) is not None:
                    # It was registered after ours, so it never runs. Keyed requests are protected as before.
                    _log.error(
                        "IDEMPOTENCY_STATUS_URL is %r, and the view %r has the same path: it gets no request. Change one "
                        "of the two.",
                        url,
                        other,
                    )
                self._guard.replies.status_views = find_status_views(self._app)
            self._checked = True
        # Before the first refusal, form, long body, waiter or restart of Redis: no client waits for these, and no child that is
        # forked during an import waits for ever. Later this process may have no free file, and the files may be of another
        # release. What fails here fails there again.
        with suppress(Exception):
            from flask_idempotency.web import body_copies, forms, problem_types, rows  # noqa: F401

            # In a Redis store, objects stand in for these until one of their attributes is read.
            getattr(self._built.notifier, "subscribe", None)
            getattr(self._built.data_loss, "rules", None)
        # Without the lock: the collector may run any code.
        try:
            from flask_idempotency.web.unreached import unprotected  # once in each process

            for _, text, remedy in list(unprotected(self._app, self._policies)):
                _log.warning("%s %s", text, remedy)
        except Exception:  # noqa: BLE001 - an object of the application that cannot be looked at must close no endpoint
            _log.exception("not every annotation could be checked")
        if self.at_first is not None:
            try:
                self.at_first()
            except Exception:  # noqa: BLE001 - it only reports; a claim finds the same faults
                _log.exception("the tables of the store could not be looked at")

    @cached_property
    def key_status(self) -> KeyStatusView:
        """Tells clients what became of their keys. Made for the first that asks."""
        from flask_idempotency.web.key_status import KeyStatusView  # for applications with a status view

        guard = self._guard
        return KeyStatusView(guard.engine, guard.reader, self._policies, guard.replies.build)

    @property
    def observer(self) -> Observer:
        """Observes the requests of endpoints that are not enforced. Made, and its code loaded, for the first of them."""
        if self._observer is None:
            from flask_idempotency.web.observing import Observer  # for applications that do not enforce everywhere

            with self._check:
                if self._observer is None:
                    self._observer = Observer(self._guard)
        return self._observer

    def _warn_once(self, state: RequestState, message: str) -> None:
        """Log a warning once per endpoint and message."""
        if self._warned.take(f"{state.operation} {message}") is not None:
            _log.warning(message, state.operation)

    def _state(self) -> RequestState | None:
        """Return the state of the running request. Anyone may send these signals, in a request or not."""
        here = context.get(None)
        return None if here is None else getattr(here.request, self._key, None)


class LastHooks:
    """Keeps three of the guard's functions last in each scope's hook lists, even if later hooks are added.

    They get the state, if the request has one and this is its scope, and Flask's arguments.

    Other threads iterate these lists, so nothing is ever moved or taken out: that could make them skip a hook, such as the
    one that authenticates. A new one is appended first and published second. The list of `before` runs forwards, so the
    newest is still to come, and one that is no longer the newest does nothing. The other two run backwards, and may have
    begun before it was appended: a request whose response is not captured would be run again.
    """

    def __init__(self, app: Flask, key: str, *, before: Hook, after: Hook, teardown: Hook) -> None:
        self._before: Hooked = app.before_request_funcs
        self._after: Hooked = app.after_request_funcs
        self._teardown: Hooked = app.teardown_request_funcs
        self._key = key
        self._acts = before, after, teardown
        self._newest: Hooked = {}
        """In the order of the lists above. Replaced as a whole."""
        self._lock = Lock()

    def keep(self, scope: str | None) -> None:
        """Make the guard's functions the last of this scope."""
        newest = self._newest.get(scope)
        if newest and newest == [*self._before[scope][-1:], *self._after[scope][-1:], *self._teardown[scope][-1:]]:
            return
        with self._lock:
            hooks = list(self._newest.get(scope, ()))
            for number, lists in enumerate((self._before, self._after, self._teardown)):
                if not hooks[number:] or lists[scope][-1:] != hooks[number : number + 1]:
                    hooks[number : number + 1] = [self._made(scope, number)]
                    lists[scope].append(hooks[number])
            self._newest[scope] = hooks

    def _made(self, scope: str | None, number: int) -> Hook:
        """Return one of the three functions. All requests pay for its first two lines, and most have no state."""
        key, act, newest = self._key, self._acts[number], self._newest

        def idempotency(*given: Any) -> Any:
            # With getattr: `__dict__` would make a dictionary, which Python 3.11 creates only when it is asked for.
            state = getattr(context.get().request, key, None)
            if state is None or state.scope != scope or (number == 0 and newest[scope][0] is not idempotency):
                return given[0] if number == 1 else None  # an after_request function returns its response
            return act(state, *given)

        return idempotency
