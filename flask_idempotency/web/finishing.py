"""Finish a request in its client's place: claim it, and dispatch it within the application, as the caller of its record.

A worker that only handles requests does not import this: the janitor, the commands and the doctor do.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, Literal

from flask import Flask

from flask_idempotency.assembly import Services
from flask_idempotency.engine.audit import JANITOR, AuditEntry
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.engine import Outcome
from flask_idempotency.engine.errors import (
    CorruptRecord,
    KeyProviderUnavailable,
    LeaseLost,
    ResponseUnavailable,
    StoreUnavailable,
)
from flask_idempotency.engine.events import Event, FinishGaveUp, FinishTried
from flask_idempotency.engine.journal import MOST_TRIES, Journal
from flask_idempotency.engine.keys import Identity, StorageKey, new_token, paused_token, step_digest
from flask_idempotency.engine.model import ClaimRequest, RequestInfo, State, Unknown
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.policy import Policy
from flask_idempotency.maintenance.finish import GAVE_UP, Tried
from flask_idempotency.settings import Settings
from flask_idempotency.web.acting import leave_out
from flask_idempotency.web.callbacks import Callbacks, load_quota
from flask_idempotency.web.kept_requests import KeptRequest, Try
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.request_state import FINISHING
from flask_idempotency.web.requests import fingerprints, read_body

REPEATED_SECONDS: Final = 5.0
"""How long a try waits for a store that does not take its response: the process may end after it."""

_log = logging.getLogger("flask_idempotency")


@dataclass(eq=False, repr=False)
class Finisher:
    """Tries to finish requests of one application."""

    app: Flask
    built: Services
    settings: Settings
    callbacks: Callbacks
    policies: Policies
    observers: Callable[[Event], None]
    identities: Sequence[Identity]

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._left_out = False
        self.later: dict[bytes, tuple[bytes, float]] = {}
        """See `maintenance.finish.finish`."""
        self._handed_back: dict[bytes, bytes] = {}
        """The token of each record that was claimed and is left to its client: a further claim would only put off its end."""

    def within(self, found: SeenRecord) -> float | None:
        """Return for how many seconds after the end of its lease this record is finished. None: it is not."""
        policy = self._policy(found.record.info)
        if policy is None or self._handed_back.get(found.key.rid) == found.record.token:
            return None
        # After `keep` the record of another secret may be gone, which alone knew that the request has completed.
        return policy.keep if policy.resume_within is None else min(policy.resume_within, policy.keep)

    def _policy(self, about: RequestInfo) -> Policy | None:
        """Return the policy of an endpoint whose requests the janitor finishes."""
        if about.operation not in self.app.view_functions:
            return None
        resolved = self.policies.resolve(about.operation, about.method)
        finished = resolved.policy.finish == "janitor" and resolved.policy.mode == "enforce"
        return resolved.policy if finished and not resolved.exempt and not resolved.faults else None

    def attempt(self, found: SeenRecord, journal: Journal) -> Tried:
        """Try to finish this request, as the client's retry would. Raises `StoreUnavailable`."""
        with self._lock:
            if not self._left_out and self.callbacks.act_for is not None:
                leave_out(self.app, self.callbacks.act_for)
                self._left_out = True
        # In a context of its own: the janitor's application context would share its `g` with all tries.
        try:
            return Context().run(self._attempt, found, journal)
        except StoreUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - such as of a quota_loader, before the try: others that are due must not wait
            # Only the class: its text may quote a body or a person.
            _log.error("A request of %s could not be finished: %s", found.record.info.operation, type(error).__name__)
            return "failed"

    def _attempt(self, found: SeenRecord, journal: Journal) -> Tried:
        policy, act_for = self._policy(found.record.info), self.callbacks.act_for
        if policy is None or act_for is None:
            return "overtaken"
        try:
            kept = self._opened(found, journal)
            with self.app.app_context():
                claim, oldest = self._claim(found, kept, policy)
        except KeyProviderUnavailable as error:
            _log.warning("A request of %s waits to be finished: %s", found.record.info.operation, cause_of(error))
            return "waiting"
        except (CorruptRecord, ResponseUnavailable):
            return "unreadable"
        if not isinstance(claim, Claim):
            return "quarantined" if isinstance(claim, Unknown) else "overtaken"
        attempt = Try(kept, self.app.ensure_sync(act_for.function), claim, oldest)
        try:
            steps = claim.steps
            # Whether each record of this claim is still that of the request that stopped, and a try is left.
            unfit = steps is None or claim.has_new_record or steps.has_gap
            if steps is None or unfit or not steps.has_effects or steps.tries >= MOST_TRIES:
                # Another had a key since. One that is free now may have completed and expired: the view would run again. Its
                # new record must not get the steps of the others, so nothing is written here.
                claim.release_unstarted()
                self._handed_back |= {context.key.rid: paused_token(context.token) for context in claim.contexts}
                return "overtaken"
            number = steps.tries + 1
            steps.note_try()
            reason = self._dispatched(attempt, found.record.info)
        except LeaseLost:
            return "overtaken"
        finally:
            if not attempt.adopted and not claim.ended:
                with suppress(LeaseLost):
                    claim.release("not-finished")
        return self._ended(attempt, reason, number)

    def _opened(self, found: SeenRecord, journal: Journal) -> KeptRequest:
        """Return the kept request that names the most records: a later attempt may have had more than the first one.

        It names one under the newest secret. Else the janitor would complete the request under the older names alone, and a
        retry of its client would run again as soon as those secrets are no longer listed.
        """
        every = []
        keys = [replace(found.key, steps=identity.steps) for identity in self.identities]
        for entry in journal.kept_requests:
            if entry.payload is None or journal.erased:
                raise CorruptRecord("the request was erased")
            context = entry.context(found.key, found.record.fingerprint)
            _, data = self.built.codec.steps.open(entry.payload, context)
            if not data or not any(hmac.compare_digest(entry.digest, step_digest(key, data)) for key in keys):
                raise CorruptRecord("the request was not kept under a secret that is listed now")
            every.append(KeptRequest.decode(data))
        if not every:
            raise CorruptRecord("the request was not kept")
        marks = {identity.mark(self.settings.namespace) for identity in self.identities}
        if any(kept.keys[0].mark not in marks for kept in every):
            raise CorruptRecord(
                "a host with a newer secret has claimed it since: that host claims all records, and this cannot"
            )
        newest = self.identities[0].mark(self.settings.namespace)
        fitting = [kept for kept in every if kept.keys[0].mark == newest]
        if not fitting:
            raise CorruptRecord(
                "it stopped before the newest secret was added: only its client has the key to name it by that"
            )
        return max(fitting, key=lambda kept: sum(key.mark in marks for key in kept.keys))

    def _claim(self, found: SeenRecord, kept: KeptRequest, policy: Policy) -> tuple[Outcome, Identity]:
        """Claim the records of this request, as its retry would. Return the outcome, and the oldest secret in use."""
        namespace = self.settings.namespace
        known = {identity.mark(namespace): identity for identity in self.identities}
        used = [
            (identity, StorageKey(key.rid, key.tid, identity.label(key), key.mark, identity.steps))
            for key in kept.keys
            if (identity := known.get(key.mark)) is not None
        ]
        if found.key not in [key for _, key in used]:
            raise CorruptRecord("the secret of this record is not listed any more")
        request = self.app.request_class(kept.environ())
        prints, former = fingerprints(
            request,
            policy,
            [identity for identity, _ in used],
            body=read_body(request, most=policy.max_request_body),
            app=self.app,
        )
        quota = load_quota(self.callbacks, self.settings, kept.tenant, self.app)
        requests = [
            ClaimRequest(
                key,
                fingerprint,
                policy.on_expiry,
                found.record.info,
                notify_on_completion=policy.in_flight == "wait",
                former_fingerprint=before,
            )
            for (_, key), fingerprint, before in zip(used, prints, former or (None,) * len(prints), strict=True)
        ]
        at_once = replace(policy, in_flight="reject")
        return self.built.engine.claim(requests[0], at_once, former=requests[1:], quota=quota), used[-1][0]

    def _dispatched(self, attempt: Try, about: RequestInfo) -> str:
        """Let the application respond to the request. Return the status, or the error, as a short code."""
        app, environ = self.app, attempt.kept.environ()
        environ[FINISHING], attempt.environ = attempt, environ
        status = ""

        def start(line: str, headers: Any, error: Any = None) -> Callable[[bytes], object]:
            nonlocal status
            status = line.partition(" ")[0]
            return lambda data: None

        try:
            found = None
            with app.app_context(), suppress(Exception):  # such as for a host that is not trusted any more
                adapter = app.create_url_adapter(app.request_class(environ))
                found = None if adapter is None else adapter.match()[0]
            if found != about.operation:
                return "other-endpoint"  # the router finds a view of another policy, which must not run
            # The application's own, and not the middleware around it: that has seen the request already.
            response = type(app).wsgi_app(app, environ, start)
            try:
                for _ in response:
                    pass
            finally:
                getattr(response, "close", lambda: None)()
        except Exception as error:  # noqa: BLE001 - an application may raise anything, and so it does to a server
            return attempt.reason or type(error).__name__
        return attempt.reason or f"status-{status}"

    def _ended(self, attempt: Try, reason: str, number: int) -> Tried:
        claim = attempt.claim
        outcome: Literal["failed", "overtaken", "completed", "quarantined"] = "failed"
        if attempt.adopted:
            with suppress(LeaseLost):
                claim.stored_within(REPEATED_SECONDS)
            with suppress(CorruptRecord):
                record = self.built.engine.read(claim.key)
                token = claim.contexts[0].token
                if record is None or record.token not in (token, paused_token(token)):
                    outcome = "overtaken"  # while the try ran: how the request ends is not its doing
                elif record.state is State.COMPLETED:
                    outcome = "completed"
                elif record.state is State.QUARANTINED:
                    outcome, reason = "quarantined", record.reason
        self.observers(FinishTried(claim.label, claim.operation, number, outcome, reason))
        if outcome == "completed":
            self._note(claim, "finished", f"try {number}: {reason}")
            return "completed"
        if outcome == "quarantined" or outcome == "overtaken":
            return outcome
        if number < MOST_TRIES:
            self._note(claim, "try-failed", f"try {number}: {reason}")
            return "failed"
        self.observers(FinishGaveUp(claim.label, claim.operation, number))
        self._note(claim, "gave-up", f"{GAVE_UP}: {reason}")
        return "gave_up"

    def _note(self, claim: Claim, verb: str, reason: str) -> None:
        """Add to the audit trail of each record who finished it. The response is stored, so no error may hide that."""
        audit = self.built.audit
        if audit is None:
            return
        for context in claim.contexts:
            try:
                entry = AuditEntry(verb, State.PROCESSING.value, JANITOR, reason)
                audit.append(context.key, entry, token=new_token())
            except Exception as error:  # noqa: BLE001 - a custom store may raise anything
                _log.error("the audit trail of record %s lacks %s (%s)", claim.label, verb, cause_of(error))
