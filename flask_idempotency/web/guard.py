"""The one place that has keys claimed before views run, and turns ended work into settled claims."""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from flask import Flask, Request
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.wrappers import Response

from flask_idempotency.assembly import is_process_local
from flask_idempotency.engine.engine import Engine, Outcome, Replay
from flask_idempotency.engine.errors import (
    CorruptRecord,
    IdempotencyError,
    InheritedConnection,
    InvalidKey,
    KeyProviderUnavailable,
    LeaseLost,
    NotCommitted,
    ResponseUnavailable,
    StoreDataLoss,
    StoreUnavailable,
)
from flask_idempotency.engine.events import MismatchRefused, Observers, ReplayForbidden, ReplayServed, StoreFailed
from flask_idempotency.engine.keys import Identity, Scope, key_timestamp, one_key, parse_key
from flask_idempotency.engine.model import (
    Claimed,
    ClaimRequest,
    Erased,
    InFlight,
    Mismatched,
    OverQuota,
    Record,
    Replayed,
    RequestInfo,
    State,
    StoredResponse,
    Unknown,
)
from flask_idempotency.engine.policy import RELEASED_BY_DEFAULT, Decision, Policy
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.recovery import releasable_in
from flask_idempotency.operations import handle_of
from flask_idempotency.settings import Settings
from flask_idempotency.web.callbacks import Callbacks, former_names, load_quota, load_tenant
from flask_idempotency.web.janitor import IdentityMonitor, JanitorMonitor
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.principals import Credentials, UnknownCaller, bounded, load_principal
from flask_idempotency.web.problems import CONFLICT_RETRY_SECONDS, OutageLog, Problem, failure, refusal
from flask_idempotency.web.request_body import FORM_TYPES, BodyTooLarge, TruncatedBody, read_body
from flask_idempotency.web.request_state import (
    ELSEWHERE,
    Phase,
    QuarantineLog,
    RequestState,
    decide,
    past_point,
    transactional,
    vanished,
    with_rows,
)
from flask_idempotency.web.requests import CSRF_FIELD, client_keys, fingerprints
from flask_idempotency.web.responses import Answer, Answers, Orphans, StreamEnd, capture

# What one application's guard works with.


@dataclass(frozen=True, slots=True, repr=False)
class Desk:
    """Made once per application, then only read, and never shown: it holds secrets.

    `identities` has one entry per secret in use, the newest first.
    """

    engine: Engine
    identities: tuple[Identity, ...]
    settings: Settings
    policies: Policies
    loaders: Callbacks
    observers: Observers
    counts: bool = False
    """Whether the store can count what each tenant has."""
    watch: JanitorMonitor | None = None
    """None: no janitor is expected."""
    shape: IdentityMonitor | None = None
    """None: the store cannot remember the shape of identity, or no other process sees it."""


# From a request to a claim, or to the answer that it gets in its view's place.

_log = logging.getLogger("flask_idempotency")


class Asking:
    """Asks for claims, for one application. Nothing of any request stays here."""

    def __init__(self, app: Flask, desk: Desk, answers: Answers) -> None:
        self._app = app
        self._desk = desk
        self._answers = answers
        self._outages = OutageLog()
        self._credentials = Credentials(desk.settings.credential_headers)
        self._unnamed: set[str] = set()
        """Endpoints that have been logged."""

    def ask(self, visit: RequestState, request: Request) -> Answer | None:
        """The answer to give in the view's place. None: the view is to run, and the visit's phase says on what terms."""
        policy = visit.policy
        try:
            client_key = _client_key(request, policy)
            if policy.form_field is not None and request.mimetype in FORM_TYPES:
                # The key was looked for in it.
                visit.body = read_body(request, most=policy.max_request_body)
            if client_key is None:
                visit.phase = Phase.UNKEYED
                return self._answers.problem(Problem("missing-key"), policy) if policy.required else None
            visit.client_key = client_key
            visit.tenant = load_tenant(self._desk.loaders, self._app)
            allowed = self._desk.settings.allow_anonymous
            visit.principal = load_principal(
                self._desk.loaders.principal,
                request,
                self._app,
                credentials=self._credentials,
                allow_anonymous=allowed,
                in_view=visit.deferred,
            )
            if visit.principal is None and allowed is False:
                return self._answers.problem(Problem("principal-required"), policy)
            requests = self._claim_requests(visit, request)
        except UnknownCaller as error:
            return self._unnamed_caller(visit, error)
        except InvalidKey as error:
            return self._answers.problem(failure(error), policy)
        except TruncatedBody:
            return self._answers.problem(Problem("truncated-body"), policy)
        except BodyTooLarge:
            return self._answers.problem(Problem("request-too-large"), policy)
        visit.record = requests[0].key.label
        return self._claimed(visit, requests)

    def answer(self, visit: RequestState, outcome: Outcome) -> Answer:
        """What is said of an outcome that is no claim."""
        match outcome:
            case Replayed(replay):
                return self._replay(visit, replay)
            case InFlight() | Mismatched() | Unknown() | OverQuota() | Erased():
                return self._answers.problem(refusal(outcome), visit.policy)
            case Claimed():
                raise AssertionError("a granted claim has no answer yet")
            case unexpected:
                assert_never(unexpected)

    def _claim_requests(self, visit: RequestState, request: Request) -> list[ClaimRequest]:
        """The same request under every secret in use, newest first; then under its former names, if there are any."""
        policy, operation = visit.policy, visit.operation
        bounded(operation, "endpoint of this view has")
        scope = Scope(
            namespace=self._desk.settings.namespace,
            tenant=visit.tenant,
            principal=visit.principal,
            operation=operation if policy.scope == "operation" else None,
        )
        identities, former = self._desk.identities, self._desk.settings.former_identity
        about = RequestInfo(self._named(visit.tenant), self._named(visit.principal), request.method, operation)
        visit.body = read_body(request, most=policy.max_request_body)
        born_at, awaited = key_timestamp(visit.client_key), policy.in_flight == "wait"
        # Asked each time: an application may set them after the extension was set up.
        by_host = self._app.url_map.host_matching or self._app.subdomain_matching
        csrf_field = self._app.config.get("WTF_CSRF_FIELD_NAME") or CSRF_FIELD
        asked = fingerprints(request, policy, identities, by_host=by_host, csrf_field=csrf_field)
        requests = [
            ClaimRequest(
                identity.storage_key(scope, visit.client_key),
                fingerprint,
                policy.on_expiry,
                about,
                awaited,
                key_timestamp=born_at,
            )
            for identity, fingerprint in zip(identities, asked, strict=True)
        ]
        if former is not None:
            tenant, principal = visit.former = former_names(
                former, visit.tenant, visit.principal, request, self._app, in_view=visit.deferred
            )
            before = replace(scope, namespace=former.namespace or scope.namespace, tenant=tenant, principal=principal)
            if before != scope:
                requests += [
                    replace(
                        request,
                        # The token says whose claim it is: this application's, whatever it was called.
                        key=replace(identity.storage_key(before, visit.client_key), mark=request.key.mark),
                        # Others of today may have that tenant's name as well, and would be counted there together. Under
                        # the same tenant and namespace it is the same ledger, and the key is counted there already.
                        in_quota=tenant == scope.tenant and before.namespace != scope.namespace,
                    )
                    for identity, request in zip(identities, requests, strict=True)
                ]
        return requests

    def _unnamed_caller(self, visit: RequestState, error: UnknownCaller) -> Answer:
        """Refuse this request alone: 403 where signing in helps, else 500. Logged once for each endpoint.

        Only the latter is an error of the application. The former is every client whose session has ended.
        """
        if visit.operation not in self._unnamed:
            self._unnamed.add(visit.operation)
            level = logging.WARNING if error.set_up else logging.ERROR
            _log.log(level, "%s refused a request with a key: %s. %s", visit.operation, error, error.remedy)
        detail = f"{error.remedy}\n\n{error.lines}".rstrip() if self._app.debug else ""
        status = 403 if error.set_up else 500
        return self._answers.problem(Problem("principal-required", detail, status=status), visit.policy)

    def _named(self, name: str | None) -> str:
        """What a record says of a tenant or a principal."""
        if name is None:
            return ""
        return self._desk.identities[0].pseudonym(name) if self._desk.settings.hashed_names else name

    def _claimed(self, visit: RequestState, requests: list[ClaimRequest]) -> Answer | None:
        quota = load_quota(self._desk.loaders, self._desk.settings.quota, visit.tenant, self._app)
        shards = self._desk.settings.tenant_shards
        if quota is not None and shards > 1:
            quota = quota.divided(shards)
        try:
            outcome = self._outcome(visit, requests, quota)
        except StoreUnavailable as error:
            return self._store_failed(visit, error)
        except CorruptRecord as error:
            return self._answers.problem(failure(error), visit.policy)
        if isinstance(outcome, Claimed):
            visit.claim, visit.oldest, visit.phase = outcome.held, self._desk.identities[-1], Phase.CLAIMED
            return None
        if isinstance(outcome, OverQuota):
            # The store knows of one part; a client is told what its tenant may have.
            outcome = replace(outcome, allowed=outcome.allowed * shards)
        if isinstance(outcome, Unknown) and self._app.debug:
            return self._answers.problem(replace(refusal(outcome), detail=self._command(requests, visit)), visit.policy)
        return self.answer(visit, outcome)

    def _command(self, requests: list[ClaimRequest], visit: RequestState) -> str:
        """The command that frees this key, for the developer who is looking at it. Only in debug mode: it names the record."""
        if is_process_local(self._desk.settings):
            return "In debug mode: the records are in this process's memory, so a restart frees the key."
        for request in reversed(requests):
            try:
                record = self._desk.engine.read(request.key)
            except (StoreUnavailable, CorruptRecord):
                continue
            if record is not None and record.state is State.QUARANTINED:
                lives = releasable_in(record, visit.policy)
                early = f" For {math.ceil(lives)} s from now it needs --force." if lives > 0 else ""
                return (
                    "In debug mode: if it was not carried out, free the key by "
                    f"`flask idempotency release {handle_of(request.key)} --reason debug`.{early}"
                )
        return ""

    def _outcome(self, visit: RequestState, requests: list[ClaimRequest], quota: Quota | None) -> Outcome:
        """What becomes of the request under all its names.

        A former name that has no tenant or no principal may be that of several callers. A record that another one of today
        has there does not concern this request: it is asked for again without that name. But a caller without a name has
        no other: there the key is in use.
        """
        engine, secrets = self._desk.engine, len(self._desk.identities)
        outcome = engine.claim(requests[0], visit.policy, former=requests[1:], quota=quota)
        former = self._desk.settings.former_identity
        while former is not None and former.coarse and not isinstance(outcome, Claimed | OverQuota):
            found = {request.key: engine.read(request.key) for request in requests[secrets:]}
            if isinstance(outcome, Replayed):
                found[outcome.answer.key] = outcome.answer.record
            theirs = {
                key: record for key, record in found.items() if record is not None and self._anothers(visit, record)
            }
            if not theirs:
                break
            own = [theirs[request.key] for request in requests[:secrets] if request.key in theirs]
            if own:
                self._desk.observers(MismatchRefused(visit.record, visit.operation))
                return Mismatched(first_seen=own[0].requested_at)
            requests = [request for request in requests if request.key not in theirs]
            outcome = engine.claim(requests[0], visit.policy, former=requests[1:], quota=quota)
        return outcome

    def _anothers(self, visit: RequestState, record: Record) -> bool:
        """Whether this record was made by another caller than this one, as it is named now or was before."""
        before = visit.former
        names = (record.info.tenant, visit.tenant, before[0]), (record.info.principal, visit.principal, before[1])
        return any(stored not in self._spellings(*known) for stored, *known in names)

    def _spellings(self, *names: str | None) -> set[str]:
        """How records may spell these names: in clear, or by a hash under any secret in use."""
        known = [name for name in names if name is not None]
        hashed = {identity.pseudonym(name) for identity in self._desk.identities for name in known}
        return {*known, *hashed} | ({""} if None in names else set())

    def _replay(self, visit: RequestState, replay: Replay) -> Answer:
        observers, who = self._desk.observers, (visit.record, visit.operation)
        guard = self._desk.loaders.replay_guard
        if guard is not None and not self._app.ensure_sync(guard)(replay.record):
            observers(ReplayForbidden(*who))
            return self._answers.problem(Problem("replay-forbidden"), visit.policy)
        try:
            answer = self._answers.replay(replay.result, visit.policy)
        except CorruptRecord as error:
            self._condemn(visit, replay)
            return self._answers.problem(failure(error), visit.policy)
        observers(ReplayServed(*who, status=replay.result.status, kept=replay.result.kept))
        return answer

    def _condemn(self, visit: RequestState, replay: Replay) -> None:
        try:
            self._desk.engine.mark_corrupt(replay, label=visit.record)
        except StoreUnavailable as error:
            # The next retry will find it out again.
            _log.warning("a record that cannot be read could not be quarantined (%s)", type(error).__name__)

    def _store_failed(self, visit: RequestState, error: StoreUnavailable) -> Answer | None:
        if isinstance(error, StoreDataLoss):
            # Told by the engine, and never run.
            self._outages.refused(visit.operation, error)
            return self._answers.problem(failure(error), visit.policy)
        name = type(error.__cause__ or error).__name__
        # Neither of these says that the store is away: what runs past it now, it would let run again.
        known = isinstance(error, ResponseUnavailable | KeyProviderUnavailable)
        allowed = visit.policy.on_store_down == "allow" and not known
        self._desk.observers(StoreFailed(visit.record, visit.operation, error=name, unprotected=allowed))
        if not allowed:
            self._outages.refused(visit.operation, error)
            return self._answers.problem(failure(error), visit.policy)
        visit.phase = Phase.UNPROTECTED
        return None


def _client_key(request: Request, policy: Policy) -> str | None:
    """The key that the request carries. Raises `InvalidKey` when it is malformed, or when several differ."""
    values = client_keys(request, policy)
    parse = partial(parse_key, max_length=policy.max_key_length, key_format=policy.key_format)
    return one_key(values, parse) if values else None


# The rows of transactional views: whose commit it is without a claim, and what to answer when they are not there.


class Rows:
    """For one application. An answer that says they are there is replaced when they are not."""

    def __init__(self, desk: Desk, answers: Answers) -> None:
        self._desk = desk
        self._answers = answers

    def begin(self, visit: RequestState) -> None:
        """A transactional view is about to run without a claim: without a key, say."""
        transactions = self._desk.engine.transactions
        if transactions is not None and visit.policy.effects == "transactional":
            visit.unclaimed = transactions.join((), b"", operation=visit.operation, told=_nothing)

    def unclaimed(self, visit: RequestState, response: Response) -> None:
        """It has run. Its rows are still ours to commit."""
        visit.phase = Phase.DONE
        if visit.unclaimed is None:
            try:
                self.begin(visit)
            except InheritedConnection as error:
                self.not_committed(visit, response, error)
                return
        transaction = visit.unclaimed
        if transaction is None:
            return
        try:
            if with_rows(visit, status=max(visit.status, response.status_code), error=visit.error):
                transaction.commit()
            else:
                transaction.roll_back()
        except NotCommitted as error:
            self.not_committed(visit, response, error)
        except StoreUnavailable as error:
            self.not_committed(visit, response, error, problem=Problem("commit-unknown"))
        finally:
            transaction.leave()

    def left_over(self, visit: RequestState) -> None:
        """Say so when something was written after the rows were committed: by a stream, say. It will not be."""
        transactions = self._desk.engine.transactions
        if transactions is not None and transactions.unsaved():
            _log.error(
                "%s has written with the session after its rows were committed with its answer: that is lost. What a "
                "stream or a late callback writes must be written before, or committed by itself",
                visit.operation,
            )

    def not_committed(
        self,
        visit: RequestState,
        response: Response,
        error: NotCommitted | StoreUnavailable,
        *,
        problem: Problem | None = None,
    ) -> None:
        """The work is done and not kept, or nobody can tell: its answer would be a false promise."""
        # Not the original's text: it quotes what was to be written, the answer among it.
        _log.error("%s was answered, but is not known to be committed: %s", visit.operation, error)
        if problem is None:
            unknown = isinstance(error, NotCommitted) and past_point(visit)
            problem = refusal(Unknown(reason="not-committed")) if unknown else failure(error)
        self._put_over(visit, response, problem)

    def rolled_back(self, visit: RequestState, response: Response, error: BaseException | None) -> None:
        """Nothing is left of the work. An answer that says otherwise must not leave; an error may, and may say more."""
        if visit.decision is Decision.RELEASE and visit.claim is not None and visit.claim.is_retryable(error):
            conflict = Problem("transaction-conflict", retry_after=CONFLICT_RETRY_SECONDS)
            self._put_over(visit, response, conflict)
        elif response.status_code < 400 and response.status_code not in ELSEWHERE:
            unknown = visit.decision is Decision.QUARANTINE or past_point(visit)
            if not unknown and not visit.has_written:
                return  # a form that is shown again, say: it promises no rows
            if not unknown:
                _log.error(
                    "%s answered %d and its policy released the key, so the rows of the view were rolled back and "
                    "the client got 500 not-committed. Give such a response a status of 400 or above, or write nothing.",
                    visit.operation,
                    response.status_code,
                )
            problem = refusal(Unknown(reason="not-kept")) if unknown else Problem("not-committed")
            self._put_over(visit, response, problem)

    def _put_over(self, visit: RequestState, response: Response, problem: Problem) -> None:
        self._answers.problem(problem, visit.policy).replace_response(response, lost=visit.capture)


def _nothing() -> None:
    """What work without a claim commits by itself is its own affair."""


UNPROTECTED = ("Idempotency-Status", "unprotected")


class Guard:
    """Asks for claims and settles them, for one application. What belongs to one request is in its visit."""

    def __init__(self, app: Flask, desk: Desk) -> None:
        self._desk = desk
        self._answers = Answers(app, desk.loaders, docs_url=desk.settings.docs_url)
        self.rows = Rows(desk, self._answers)
        self._asking = Asking(app, desk, self._answers)
        self._quarantines = QuarantineLog()
        self.abandoned_streams: Orphans = deque()

    def enter(self, visit: RequestState, request: Request) -> Response | None:
        """The answer to give in the view's place, or None: the view is to run."""
        self.settle_abandoned()
        if not self._desk.settings.enabled:
            visit.phase = Phase.UNKEYED
        answer = self._asking.ask(visit, request) if self._desk.settings.enabled else None
        if answer is None:
            if visit.phase is not Phase.UNKEYED:
                return None
            try:
                self.rows.begin(visit)
            except InheritedConnection as error:
                answer = self._answers.problem(failure(error), visit.policy)
            else:
                return None
        visit.phase, visit.answer = Phase.ANSWERED, answer
        return answer.response

    def problem(self, problem: Problem, policy: Policy) -> Response:
        """The response that says why a request is not even looked at."""
        return self._answers.problem(problem, policy).response

    def again(self, visit: RequestState) -> Response | None:
        """The answer that was given in the view's place, made anew: what became of the first is not known. None: there
        was none, and the view may run."""
        if visit.answer is None:
            return None
        visit.phase = Phase.ANSWERED
        return visit.answer.rebuild()

    def captured(self, visit: RequestState, response: Response) -> None:
        """The answer as the view and its `after_this_request` functions leave it, before any other hook has touched it."""
        visit.status = response.status_code
        if visit.phase is Phase.ANSWERED and visit.answer is not None:
            visit.answer.replace_response(response)
        elif visit.phase is Phase.UNPROTECTED:
            response.headers[UNPROTECTED[0]] = UNPROTECTED[1]
        elif visit.phase is Phase.CLAIMED:
            self._capture(visit, response)

    def finish(self, visit: RequestState, response: Response) -> None:
        """All hooks have run and the session is saved: settle, or put another answer over one that is not ours to give."""
        if visit.capture is None:
            if transactional(visit):
                self._uncaptured(visit, response)
            return
        # A hook that turns a 200 into a 500 means it: what it commits, for one, is not committed.
        status = max(visit.capture.head.status, response.status_code)
        # An error that was only reported, and answered with less than a 500 or with a 503, was dealt with: that was chosen.
        chosen = status < 500 or status in RELEASED_BY_DEFAULT
        failed = visit.error if visit.escaped or not chosen or visit.end is StreamEnd.ERROR else None
        # A status that a hook put over an answer which was final says nothing of what the view has done.
        overruled = status != visit.capture.head.status not in RELEASED_BY_DEFAULT
        visit.decision = decide(visit, response=response, status=status, error=failed, overruled=overruled)
        too_large = failed is None and visit.capture.head.status == status == RequestEntityTooLarge.code
        if too_large and visit.body is not None and visit.body.unread:
            # Nobody has read it, so a retry cannot be recognised as one: it shall hear 413 again, not `key-reused`.
            visit.decision = Decision.RELEASE
        if visit.tee is not None and visit.end is None:
            tee = visit.tee()
            if tee is not None and not transactional(visit):
                visit.phase = Phase.STREAMING
                return
            if tee is not None:
                # Its rows are committed before its first byte leaves. What it will say is not known then, so not kept.
                tee.mute()
            visit.end = StreamEnd.CLOSED
        result = visit.capture.result if visit.tee is None else visit.result
        # A hook has the last word on how it ended: what it made an error of must not be replayed as a success.
        if result is None or status >= (400 if transactional(visit) else 500) > result.status:
            result = replace(visit.capture.tombstone, status=status)
        if visit.decision is Decision.RELEASE and visit.claim is not None and visit.claim.transactional:
            visit.has_written = visit.claim.has_written()
        try:
            rows = with_rows(visit, status=status, error=failed)
            self._settle(visit, visit.decision, result, reason=f"status-{status}", rows=rows)
        except LeaseLost:
            self._answer_instead(visit, response)
        except (NotCommitted, StoreUnavailable) as error:
            self.rows.not_committed(visit, response, error)
        else:
            if transactional(visit) and visit.decision is not Decision.KEEP:
                self.rows.rolled_back(visit, response, failed)

    def abandon(self, visit: RequestState, error: BaseException | None) -> None:
        """The request ended without an answer of the view's: it was propagated, torn down, or a later hook failed.

        Without an error either, nothing tells whether the view was entered: Flask says nothing between our last hook and
        the view. An application may have left out its after_request functions, hidden an interrupt from its teardown
        functions, or driven a context by hand; so the key is left as a worker that vanished would leave it.
        """
        if error is None and visit.escaped:
            error = visit.error  # hidden from teardown functions, but not from us
        if error is None:
            decision, reason = vanished(visit), "unanswered"
        elif isinstance(error, Exception):
            decision, reason = decide(visit, response=None, status=500, error=error), "error"
        else:
            decision, reason = vanished(visit), "worker-interrupted"
        self._settle_quietly(visit, decision, StoredResponse(status=500, kept=False), reason=reason)

    def _capture(self, visit: RequestState, response: Response) -> None:
        earlier = visit.tee() if visit.tee is not None else None
        if earlier is not None and response.response is not earlier:
            # A later hook failed, and this is the error's answer: how the first one's stream ends is of no interest now.
            earlier.mute()
            earlier.close()
        visit.end = visit.result = None
        taken = capture(
            response, visit.policy, on_end=partial(self._stream_ended, visit), orphans=self.abandoned_streams
        )
        visit.tee = None if taken.tee is None else weakref.ref(taken.tee)
        visit.capture = taken.without_tee()

    def _stream_ended(self, visit: RequestState, end: StreamEnd) -> None:
        """Told by the tee, possibly before the request is finished: then `finished` goes on from here.

        Raises `LeaseLost` where the end of a whole answer would follow, and the claim is no longer ours.
        """
        if visit.phase not in (Phase.CLAIMED, Phase.STREAMING) or visit.capture is None:
            return
        visit.end = end
        tee = visit.tee() if visit.tee is not None else None
        visit.result = replace(visit.capture, tee=tee).result or visit.capture.tombstone
        if end is StreamEnd.ERROR:
            visit.error = sys.exc_info()[1]
        if visit.phase is Phase.STREAMING:
            self._settle_stream(visit, visit.result, end)

    def _settle_stream(self, visit: RequestState, result: StoredResponse, end: StreamEnd) -> None:
        error = visit.error if end is StreamEnd.ERROR else None
        if error is None:
            decision, reason = visit.decision or Decision.QUARANTINE, f"status-{result.status}"
        elif isinstance(error, Exception):
            decision, reason = decide(visit, response=None, status=result.status, error=error), "stream-failed"
        else:
            decision, reason = vanished(visit), "worker-interrupted"
        # Only what was produced to the end can be broken off: elsewhere the transfer is broken already.
        settle = self._settle if end is StreamEnd.EXHAUSTED else self._settle_quietly
        settle(visit, decision, result, reason=reason)

    def settle_abandoned(self, *, most: int = 100) -> None:
        """Settle streams that were dropped without being closed. Their destructors could not: see `Tee.__del__`."""
        for _ in range(min(most, len(self.abandoned_streams))):
            try:
                ended = self.abandoned_streams.popleft()
            except IndexError:  # another thread was faster
                return
            ended()

    def _settle_quietly(self, visit: RequestState, decision: Decision, result: StoredResponse, *, reason: str) -> None:
        """Settle where there is no answer left to change."""
        try:
            self._settle(visit, decision, result, reason=reason)
        except LeaseLost:
            pass  # told as an event when it was found
        except (NotCommitted, StoreUnavailable) as error:
            _log.warning("%s was not committed (%s)", visit.operation, type(error).__name__)

    def _settle(
        self, visit: RequestState, decision: Decision, result: StoredResponse, *, reason: str, rows: bool = False
    ) -> None:
        """Settle once, whatever is called again. Raises `LeaseLost`; if the work is transactional, also `NotCommitted` and
        `StoreUnavailable`; and nothing else."""
        visit.phase = Phase.DONE
        if visit.claim is None:
            return
        if decision is Decision.RELEASE and visit.claim.past_point:
            decision = Decision.QUARANTINE
        try:
            match decision:
                case Decision.KEEP:
                    visit.claim.complete(result, with_rows=rows)
                case Decision.RELEASE:
                    visit.claim.release(reason)
                case Decision.QUARANTINE:
                    visit.claim.quarantine(reason)
                    if visit.unstated:
                        self._quarantines.quarantined(visit, reason)
                case unexpected:
                    assert_never(unexpected)
        except (LeaseLost, NotCommitted, StoreUnavailable):
            raise
        except Exception as error:
            if visit.claim.transactional:
                why = error if isinstance(error, IdempotencyError) else type(error).__name__
                raise StoreUnavailable(f"the work could not be settled: {why}") from error
            # The record stays claimed, and lapses as its policy says.
            _log.exception("%s could not be settled", visit.operation)

    def _uncaptured(self, visit: RequestState, response: Response) -> None:
        """The application has left out its after_request functions, and with them ours: what it answers is not known."""
        _log.error("%s was answered without after_request functions, so it was not committed", visit.operation)
        visit.decision = Decision.RELEASE
        self._settle_quietly(visit, Decision.RELEASE, StoredResponse(status=500, kept=False), reason="uncaptured")
        self.rows.rolled_back(visit, response, None)

    def _answer_instead(self, visit: RequestState, response: Response) -> None:
        """This claim was lost: what its view answered may contradict what the key's callers are told from now on."""
        if visit.claim is None:
            return
        try:
            answer = self._asking.answer(visit, self._desk.engine.successor(visit.claim))
        except (StoreUnavailable, CorruptRecord) as error:
            answer = self._answers.problem(failure(error), visit.policy)
        answer.replace_response(response, lost=visit.capture)
