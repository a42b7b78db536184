"""Claim the key of a request before its view runs; judge how the work ended, and end the claim.

The hooks call four methods, in this order: `begin`, `capture`, `finish`, and `abandon` if the request ended otherwise.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Final, final

from flask import Flask, Request
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.wrappers import Response

from flask_idempotency.activity import Activity
from flask_idempotency.assembly import Services, identities
from flask_idempotency.codec import canonical
from flask_idempotency.engine import errors
from flask_idempotency.engine.activity import BAD_REQUEST, MISSING_KEY, NEW_TIME, STORE_FAILED, without_key
from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.ending import NOT_REACHED, decide, settle, stopped_short, with_rows
from flask_idempotency.engine.engine import Engine, Outcome, Replay
from flask_idempotency.engine.events import ReplayForbidden, ReplayServed, StoreFailed
from flask_idempotency.engine.model import IN_DOUBT, InFlight, OverQuota, StoredResponse, Unknown
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.outages import INTERVAL_SECONDS, LogLimit, OutageLog, cause_of
from flask_idempotency.engine.policy import RELEASED_BY_DEFAULT, Decision
from flask_idempotency.settings import Settings
from flask_idempotency.web.callbacks import Callbacks, load_quota, load_tenant
from flask_idempotency.web.judging import (
    QUARANTINES_SECONDS,
    UNCAPTURED,
    Judgement,
    judge_stream,
    judge_unanswered,
    log_quarantine,
)
from flask_idempotency.web.principals import AnonymousCaller, UnknownCaller
from flask_idempotency.web.problems import (
    CONFLICT_RETRY_SECONDS,
    STORE_RETRY_SECONDS,
    Problem,
    failure,
    refusal,
    step_problem,
)
from flask_idempotency.web.replies import Replies, command_for
from flask_idempotency.web.request_body import MEMORY_BYTES, BodyNotKept, BodyTooLarge, TruncatedBody
from flask_idempotency.web.request_state import Phase, RequestState, context
from flask_idempotency.web.requests import RequestReader, preferred_wait
from flask_idempotency.web.responses import AbandonedStreams, LostFields, StreamEnd, Tee, capture, looks, overlay

if TYPE_CHECKING:
    from flask_idempotency.engine.keys import Identity
    from flask_idempotency.engine.steps import Steps
    from flask_idempotency.otel import Telemetry
    from flask_idempotency.web.kept_requests import Try
    from flask_idempotency.web.rows import Rows

STATUS: Final = "Idempotency-Status"
"""The response header of a request that ended otherwise than its response says.

`unprotected`: its view ran without a claim because the store was down. `paused`: send it again with the same key.
"""

COUNTED_HERE: Final = {
    "missing-key": MISSING_KEY,
    **dict.fromkeys(("invalid-key", "truncated-body", "request-too-large", "principal-required"), BAD_REQUEST),
}
"""The codes of refusals before a claim, and their counters of activity. They have no event: they concern no key."""

_log = logging.getLogger("flask_idempotency")


@final
@dataclass(eq=False, repr=False)
class Guard:
    """Claim keys and end claims, for one application. What belongs to one request is in its `RequestState`."""

    app: Flask
    settings: Settings
    callbacks: Callbacks
    built: Services
    observers: Observers
    lost_fields: LostFields
    activity: Activity | None = None
    tracing: Telemetry | None = None

    def __post_init__(self) -> None:
        self.engine: Engine = self.built.engine
        self.identities: tuple[Identity, ...] = identities(self.settings)
        self.reader: RequestReader = RequestReader(self.app, self.identities, self.settings, self.callbacks)
        self.replies: Replies = Replies(self.app, self.settings, self.callbacks)
        self.abandoned_streams: AbandonedStreams = deque()
        self._outages = OutageLog()
        self._quarantines = LogLimit(QUARANTINES_SECONDS)
        self._body_lines = LogLimit(INTERVAL_SECONDS)
        self._unknown_callers = LogLimit()
        self._unkept = LogLimit()
        # Load orjson now if this host has it: no client waits for an import.
        canonical.fastest_json_digest()

    @cached_property
    def rows(self) -> Rows:
        """What to do about the rows of transactional views. Its code is loaded for the first of them."""
        from flask_idempotency.web.rows import Rows  # for applications with transactional views

        return Rows(self.app, self.settings, self.engine, self.replies)

    # -- before the view

    def begin(self, state: RequestState, request: Request) -> Response | None:
        """Claim the request's key. Return the response to send in the view's place, or None if the view is to run."""
        if self.abandoned_streams:
            self.settle_abandoned()
        policy, settings, callbacks = state.policy, self.settings, self.callbacks
        if state.finishing is None and (policy.mode != "enforce" or not settings.enabled):
            return self._run_without_key(state)
        if self.activity is not None:
            state.began = perf_counter()
        try:
            if state.finishing is not None:
                return self._adopt(state, state.finishing, request)
            requests = self.reader.read(state, request, trace=None if self.tracing is None else self.tracing.trace)
        except UnknownCaller as error:
            return self._refuse(state, self._unknown_caller(state, error))
        except BodyNotKept as error:
            return self._body_failed(state, error)
        except (errors.InvalidKey, AnonymousCaller, TruncatedBody, BodyTooLarge) as error:
            return self._refuse(state, failure(error))
        if not requests:
            if policy.required and self.activity is not None:
                self.activity.count(state.operation, without_key(self.reader.credentials.kind_of(request)))
            return self._run_without_key(state, required=policy.required)
        state.record = requests[0].key.label
        quota = settings.quota
        if callbacks.quota is not None or settings.tenant_shards > 1:
            quota = load_quota(callbacks, settings, state.tenant, self.app)
        if policy.in_flight == "wait" and "HTTP_PREFER" in request.environ:
            preferred = preferred_wait(request)
            if preferred is not None and preferred < policy.wait:
                # This client wants to wait for less time.
                state.preferred_wait, policy = preferred, replace(policy, wait=float(preferred))
        try:
            outcome = self.engine.claim(requests[0], policy, former=requests[1:], quota=quota)
        except (errors.StoreUnavailable, errors.ConfigurationError, errors.CorruptRecord) as error:
            return self._not_claimed(state, error)
        if self.tracing is not None:
            self.tracing.decided(outcome, partial(self.engine.read, requests[0].key))
        if isinstance(outcome, Claim):
            state.claim, state.oldest, state.phase = outcome, self.identities[-1], Phase.CLAIMED
            if outcome.steps is not None:
                self._let_steps_begin(state, request, outcome, outcome.steps)
            return None
        if isinstance(outcome, Unknown) and self.app.debug:
            detail = command_for(self.engine, self.settings, state.policy, requests)
            return self._refuse(state, replace(refusal(outcome), detail=detail))
        response = self._outcome(state, outcome)
        state.phase = Phase.ANSWERED
        return response

    def _let_steps_begin(self, state: RequestState, request: Request, claim: Claim, steps: Steps) -> None:
        """Say where steps may run. Keep the request for the janitor, if it may finish it, from the first step on."""
        state.thread, state.strict = get_ident(), self.app.debug or self.app.testing
        if state.policy.finish != "janitor":
            return
        from flask_idempotency.web.kept_requests import KeptRequest  # for the endpoints that the janitor finishes

        kept = None
        if state.body is not None:
            keys = [context.key for context in claim.contexts]
            kept = KeptRequest.of(request, state.policy, state.body, keys, (state.tenant, state.principal))
        data = None if kept is None else kept.encode()
        if data is not None:
            steps.keep(data)
        elif self._unkept.take(state.operation) is not None:
            _log.warning(
                "%s cannot be finished by the janitor: no bytes of a request are left, or its path and header fields take too "
                "much. A hook that parses the form should call request.get_data() first.",
                state.operation,
            )

    def _adopt(self, state: RequestState, finishing: Try, request: Request) -> Response | None:
        """Let the view run under the claim of the janitor, if this request came out as the caller of the record.

        Raises `UnknownCaller`.
        """
        callbacks, claim = self.callbacks, finishing.claim
        if callbacks.tenant is not None:
            state.tenant = load_tenant(callbacks, self.app)
        named = self.reader.credentials.principal(callbacks.principal, request, self.app, in_view=state.deferred)
        state.principal = named
        if not finishing.adopt(state.tenant, state.principal):
            return self._refuse(state, Problem("principal-required", status=403))
        state.record, state.claim, state.oldest = claim.label, claim, finishing.oldest
        state.phase, state.thread = Phase.CLAIMED, get_ident()
        state.strict = self.app.debug or self.app.testing
        return None

    def _run_without_key(self, state: RequestState, *, required: bool = False) -> Response | None:
        """Let the view run without a claim, unless it needs a key. Rows of transactional work are ours to commit."""
        state.phase, state.transactions = Phase.UNKEYED, self.engine.transactions
        if required:
            return self._refuse(state, Problem("missing-key"))
        if state.policy.effects == "transactional":
            try:
                self.rows.join(state)
            except errors.InheritedConnection as error:
                return self._refuse(state, failure(error))
        return None

    # -- responses in the view's place

    def _refuse(self, state: RequestState, problem: Problem) -> Response:
        if self.activity is not None and problem.code in COUNTED_HERE:
            self.activity.count(state.operation, COUNTED_HERE[problem.code])
        response = self.reply(state, problem)
        state.phase = Phase.ANSWERED
        return response

    def reply(self, state: RequestState, reply: Problem | StoredResponse) -> Response:
        """Build our response, and remember how it looks, so that `capture` notices what others make of it."""
        if self.replies.status_views and isinstance(reply, Problem):
            reply = self.replies.with_status_url(state, reply)
        response = self.replies.build(reply, state.policy)
        state.reply, state.response, state.looks = reply, response, looks(response)
        return response

    def _outcome(self, state: RequestState, outcome: Outcome) -> Response:
        """Build the response for an outcome that is no claim."""
        if isinstance(outcome, Claim):
            raise AssertionError("a granted claim has no response yet")
        if not isinstance(outcome, Replay):
            if isinstance(outcome, OverQuota):
                # The store knows the limit of one part. A client learns what its tenant may have.
                outcome = replace(outcome, allowed=outcome.allowed * self.settings.tenant_shards)
            problem = refusal(outcome)
            if state.preferred_wait is not None and isinstance(outcome, InFlight):
                problem = replace(problem, headers=(("Preference-Applied", f"wait={state.preferred_wait}"),))
            return self.reply(state, problem)
        stored = outcome
        guard = self.callbacks.replay_guard
        if guard is not None and not self.app.ensure_sync(guard)(stored.record):
            self.observers(ReplayForbidden(state.record, state.operation))
            return self.reply(state, Problem("replay-forbidden"))
        try:
            response = self.reply(state, stored.response)
        except errors.CorruptRecord as error:
            try:
                self.engine.mark_corrupt(stored, label=state.record)
            except errors.StoreUnavailable as unavailable:
                # The next retry will find it out again.
                name = cause_of(unavailable)
                _log.warning("a record that cannot be read could not be quarantined (%s)", name)
            return self.reply(state, failure(error))
        status, kept = stored.response.status, stored.response.kept
        self.observers(ReplayServed(state.record, state.operation, status=status, kept=kept))
        return response

    def _not_claimed(
        self, state: RequestState, error: errors.StoreUnavailable | errors.ConfigurationError | errors.CorruptRecord
    ) -> Response | None:
        """Refuse the request, or let it run without a claim if its policy allows that for a store that is down.

        A claim may find a fault of the set-up: log the remedy, or raise it where Flask lets errors pass, as in debug mode and
        in tests. Such a request never runs: the store would grant its retry once the fault is repaired.
        """
        if isinstance(error, errors.CorruptRecord):
            return self._refuse(state, failure(error))
        if isinstance(error, errors.StoreDataLoss):
            # The engine has published it. Such a request never runs.
            self._outages.refused(state.operation, error)
            return self._refuse(state, failure(error))
        allowed, problem = False, Problem("store-unavailable", retry_after=STORE_RETRY_SECONDS)
        if isinstance(error, errors.ConfigurationError):
            passes = self.app.config["PROPAGATE_EXCEPTIONS"]
            if self.app.testing or self.app.debug if passes is None else passes:
                raise error
        else:
            # Neither of these means that the store is down: what runs past it now, it would let run again.
            known = isinstance(error, errors.ResponseUnavailable | errors.KeyProviderUnavailable)
            allowed = state.policy.on_store_down == "allow" and not known
            problem = failure(error)
        self.observers(StoreFailed(state.record, state.operation, error=cause_of(error), unprotected=allowed))
        if not allowed:
            self._outages.refused(state.operation, error)
            return self._refuse(state, problem)
        state.phase, state.transactions = Phase.UNPROTECTED, self.engine.transactions
        return None

    def _body_failed(self, state: RequestState, error: BodyNotKept) -> Response:
        """Refuse a request whose body no temporary file takes, and free what it takes of the disk."""
        from flask_idempotency.web.body_copies import forget_body  # a copy has failed

        forget_body(context.get().request)
        if self.activity is not None:
            self.activity.count(state.operation, STORE_FAILED)
        if self._body_lines.take("") is not None:
            _log.error(
                "%s was refused with 503: no temporary file takes its body (%s). Bodies above %d KiB need one. Set TMPDIR to "
                "a folder that this process can write to, on a disk with room for the uploads that come at the same time.",
                state.operation,
                error,
                MEMORY_BYTES // 1024,
            )
        detail = "This time the service had no room for its body, and did not start it."
        return self._refuse(state, replace(failure(error), detail=detail))

    def _unknown_caller(self, state: RequestState, error: UnknownCaller) -> Problem:
        """Refuse this request alone: 403 where signing in helps, else 500. Log it once for each endpoint.

        Only the latter is an error of the application. The former is every client whose session has ended.
        """
        if self._unknown_callers.take(state.operation) is not None:
            level = logging.WARNING if error.set_up else logging.ERROR
            _log.log(level, "%s refused a request with a key: %s. %s", state.operation, error, error.remedy)
        detail = f"{error.remedy}\n\n{error.lines}".rstrip() if self.app.debug else ""
        return Problem("principal-required", detail, status=403 if error.set_up else 500)

    # -- after the view

    def capture(
        self,
        state: RequestState,
        response: Response,
        *,
        tee: type[Tee] = Tee,
        on_end: Callable[[RequestState, StreamEnd], None] | None = None,
    ) -> None:
        """Take the response as the view and its `after_this_request` functions left it, before any other hook changes it.

        A stream then passes through a `tee`, and `on_end` is called when it ends: without one, this guard ends the claim.
        """
        state.status = response.status_code
        if state.phase is Phase.ANSWERED and state.reply is not None:
            # Others may have changed our response, or have put another in its place.
            if response is not state.response or looks(response) != state.looks:
                overlay(response, self.replies.build(state.reply, state.policy), policy=state.policy)
        elif state.phase is Phase.UNPROTECTED:
            response.headers[STATUS] = "unprotected"
        if state.phase is not Phase.CLAIMED:
            return
        earlier = state.tee() if state.tee is not None else None
        if earlier is not None and response.response is not earlier:
            # A later hook failed, and this is the response for its error: the end of the first one's stream counts no more.
            earlier.mute()
            if tee.changes:
                earlier.close()
        state.end = state.result = None
        taken = capture(
            response,
            state.policy,
            on_end=partial(on_end or self._stream_ended, state),
            abandoned=self.abandoned_streams,
            tee=tee,
        )
        state.tee, state.capture = None, taken
        if taken.tee is not None:
            state.tee, state.capture = weakref.ref(taken.tee), replace(taken, tee=None)

    def finish(self, state: RequestState, response: Response) -> None:
        """End the claim: all hooks have run and the session is saved. Replace a response that must not be sent."""
        claim = state.claim
        if claim is None:
            return
        judgement, steps = judge_response(state, response, self.lost_fields), claim.steps
        if judgement is UNCAPTURED:
            _log.error("%s was answered without after_request functions, so it was not committed", state.operation)
            state.decision = Decision.RELEASE
            self._settle_quietly(state, judgement)
            self.rows.replace_rolled_back(state, response, None, has_written=True)
            return
        if judgement is None:
            released = state.phase is Phase.STREAMING and state.decision is Decision.RELEASE
            if released and steps is not None and steps.has_effects and not steps.in_doubt:
                response.headers[STATUS] = "paused"
            return
        transactional = claim.transactional
        # As known before the rows are rolled back.
        has_written = transactional and judgement.decision is Decision.RELEASE and claim.has_written()
        state.phase = Phase.DONE
        try:
            ended = settle(state, judgement.decision, judgement.stored, reason=judgement.reason, rows=judgement.rows)
        except errors.LeaseLost:
            self._replace_lost(state, response, claim)
        except (errors.NotCommitted, errors.StoreUnavailable) as error:
            self.rows.replace_uncommitted(state, response, error)
        else:
            if ended is Decision.QUARANTINE and state.unstated:
                log_quarantine(state, judgement.reason, self._quarantines)
            if transactional and judgement.decision is not Decision.KEEP:
                self.rows.replace_rolled_back(state, response, judgement.error, has_written=has_written)
            if judgement.held:
                self.replies.replace(state, response, refusal(Unknown(judgement.held)))
            elif state.escaped_refusal is not None and steps is not None:
                self._replace_refusal(state, response, state.escaped_refusal, in_doubt=steps.in_doubt)
            if claim.paused:
                response.headers[STATUS] = "paused"
        if self.activity is not None:
            self.activity.timed((state.operation, NEW_TIME, perf_counter() - state.began))

    def refused_step(self, state: RequestState, error: errors.IdempotencyError) -> Response:
        """Build the response for an error of ours that a step raised and the view let through."""
        state.escaped_refusal = error
        problem = step_problem(error)
        return self.replies.build(self.replies.with_status_url(state, problem), state.policy)

    def _replace_refusal(
        self, state: RequestState, response: Response, error: errors.IdempotencyError, *, in_doubt: bool
    ) -> None:
        """Replace the response to an error of a step if the request has not ended as that response says."""
        if in_doubt and not isinstance(error, errors.StepInDoubt):
            # Another step of it had begun: no retry goes on.
            self.replies.replace(state, response, refusal(Unknown(IN_DOUBT)))
        elif isinstance(error, errors.LeaseLost):
            # Its release went through, so it was not lost: the request took longer than max_runtime.
            paused = Problem("request-paused", retry_after=CONFLICT_RETRY_SECONDS)
            self.replies.replace(state, response, paused)

    def abandon(self, state: RequestState, error: BaseException | None) -> None:
        """End the claim of a request without a response of its view: an error propagated, or a later hook failed."""
        self._settle_quietly(state, judge_unanswered(state, error))

    def _settle(self, state: RequestState, judgement: Judgement) -> None:
        """End the claim once, however often this is called.

        Raises `LeaseLost`; if the work is transactional, also `NotCommitted` and `StoreUnavailable`; and no other error.
        """
        state.phase = Phase.DONE
        ended = settle(state, judgement.decision, judgement.stored, reason=judgement.reason)
        if ended is Decision.QUARANTINE and state.unstated:
            log_quarantine(state, judgement.reason, self._quarantines)

    def _settle_quietly(self, state: RequestState, judgement: Judgement) -> None:
        """End the claim where no response is left to replace."""
        try:
            self._settle(state, judgement)
        except errors.LeaseLost:
            pass  # published when the engine found it
        except (errors.NotCommitted, errors.StoreUnavailable) as error:
            # The text of the former is ours, and may name a remedy.
            why = str(error) if isinstance(error, errors.NotCommitted) else cause_of(error)
            _log.warning("%s was not committed (%s)", state.operation, why)

    # -- streams

    def _stream_ended(self, state: RequestState, end: StreamEnd) -> None:
        """Note how a stream ended, possibly before the request is finished: then `finish` goes on from here.

        Raises `LeaseLost` where the end of a whole response would follow, and the claim is no longer ours.
        """
        judgement = judge_stream(state, end)
        if judgement is None:
            return
        # Only what was produced to the end can be broken off: elsewhere the transfer is broken already.
        settle_it = self._settle if end is StreamEnd.EXHAUSTED else self._settle_quietly
        settle_it(state, judgement)
        if self.activity is not None:
            self.activity.timed((state.operation, NEW_TIME, perf_counter() - state.began))

    def settle_abandoned(self, *, most: int = 100) -> None:
        """End the claims of streams that were dropped without being closed. Destructors cannot: see `Tee.__del__`."""
        for _ in range(min(most, len(self.abandoned_streams))):
            try:
                ended = self.abandoned_streams.popleft()
            except IndexError:  # another thread was faster
                return
            ended()

    # -- responses that must not be sent

    def _replace_lost(self, state: RequestState, response: Response, claim: Claim) -> None:
        """Replace the response of a claim that was lost: it may contradict what other clients get from now on."""
        try:
            successor = self._outcome(state, self.engine.successor(claim))
        except (errors.StoreUnavailable, errors.CorruptRecord) as error:
            successor = self.reply(state, failure(error))
        overlay(response, successor, policy=state.policy, lost=state.capture)


def judge_response(state: RequestState, response: Response, lost_fields: LostFields) -> Judgement | None:
    """Judge a request whose hooks have all run. None: its stream goes on, and is judged when it ends."""
    captured, claim = state.capture, state.claim
    if claim is None or captured is None:
        return UNCAPTURED if state.transactional else None
    # A hook that turns a 200 into a 500 means it: what it commits, for one, is not committed.
    status = max(captured.head.status, response.status_code)
    # An error that was only reported, and got a response below 500 or a 503, was dealt with: that status was chosen.
    chosen = status < 500 or status in RELEASED_BY_DEFAULT
    failed = state.error if state.escaped or not chosen or state.end is StreamEnd.ERROR else None
    # A status that a hook put over a final response does not say what the view has done.
    overruled = status != captured.head.status not in RELEASED_BY_DEFAULT
    decision = decide(state, response=response, status=status, error=failed, overruled=overruled)
    too_large = failed is None and captured.head.status == status == RequestEntityTooLarge.code
    if too_large and state.body is not None and state.body.unread:
        # The body was not read, so a retry cannot be recognised as one: it shall get 413 again, not `key-reused`.
        decision = Decision.RELEASE
    if state.escaped_refusal is not None:
        decision = Decision.RELEASE  # the response is ours, and keeps nothing
    steps, held = claim.steps, ""
    if steps is not None:
        if state.finishing is not None and stopped_short(state, decision):
            decision, state.finishing.reason = Decision.RELEASE, NOT_REACHED
        held = steps.hold() if decision is Decision.KEEP else steps.poisoned
    if captured.lost and decision is Decision.KEEP and not held:
        lost_fields.note(state.operation, captured, state.policy)
    state.decision = decision
    if state.tee is not None and state.end is None:
        tee = state.tee()
        if tee is not None and not claim.transactional and not held:
            state.phase = Phase.STREAMING
            return None
        if tee is not None:
            # The rows are committed before the first byte leaves. The body is not known then.
            tee.mute()
        state.end = StreamEnd.CLOSED
    stored = captured.result if state.tee is None else state.result
    # A hook has the last word on how it ended: what it made an error of must not be replayed as a success.
    if stored is None or status >= (400 if claim.transactional else 500) > stored.status:
        stored = replace(captured.tombstone, status=status)
    rows = claim.transactional and with_rows(state, status=status, error=failed)
    return Judgement(decision, stored, f"status-{status}", rows, failed, held)
