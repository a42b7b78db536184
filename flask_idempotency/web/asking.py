"""From a request to a claim, or to the answer that it gets in its view's place."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from typing import assert_never

from flask import Flask, Request

from flask_idempotency.assembly import in_one_process
from flask_idempotency.engine.engine import Outcome, Replay
from flask_idempotency.engine.errors import (
    AnswerUnavailable,
    CorruptRecord,
    InvalidKey,
    KeysUnavailable,
    MemoryLost,
    StoreUnavailable,
)
from flask_idempotency.engine.events import MismatchRefused, ReplayForbidden, ReplayServed, StoreFailed
from flask_idempotency.engine.keys import Scope, born, one_key, parse_key
from flask_idempotency.engine.model import (
    About,
    Claimed,
    ClaimRequest,
    Erased,
    InFlight,
    Mismatched,
    OverQuota,
    Record,
    Replayed,
    State,
    Unknown,
)
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.recovery import releasable_in
from flask_idempotency.operations import handle_of
from flask_idempotency.web.answers import Answer, Answers
from flask_idempotency.web.bodies import FORM_TYPES, BodyTooLarge, TruncatedBody, read_body
from flask_idempotency.web.desk import Desk
from flask_idempotency.web.forms import CSRF_FIELD
from flask_idempotency.web.loaders import former_names, load_quota, load_tenant
from flask_idempotency.web.outages import OutageLog
from flask_idempotency.web.principals import Credentials, Unnamed, bounded, load_principal
from flask_idempotency.web.problems import Problem, failure, refusal
from flask_idempotency.web.requests import client_keys, fingerprints
from flask_idempotency.web.visit import Phase, Visit

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

    def ask(self, visit: Visit, request: Request) -> Answer | None:
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
        except Unnamed as error:
            return self._unnamed_caller(visit, error)
        except InvalidKey as error:
            return self._answers.problem(failure(error), policy)
        except TruncatedBody:
            return self._answers.problem(Problem("truncated-body"), policy)
        except BodyTooLarge:
            return self._answers.problem(Problem("request-too-large"), policy)
        visit.record = requests[0].key.label
        return self._claimed(visit, requests)

    def answer(self, visit: Visit, outcome: Outcome) -> Answer:
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

    def _claim_requests(self, visit: Visit, request: Request) -> list[ClaimRequest]:
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
        about = About(self._named(visit.tenant), self._named(visit.principal), request.method, operation)
        visit.body = read_body(request, most=policy.max_request_body)
        born_at, awaited = born(visit.client_key), policy.in_flight == "wait"
        # Asked each time: an application may set them after the extension was set up.
        by_host = self._app.url_map.host_matching or self._app.subdomain_matching
        csrf_field = self._app.config.get("WTF_CSRF_FIELD_NAME") or CSRF_FIELD
        asked = fingerprints(request, policy, identities, by_host=by_host, csrf_field=csrf_field)
        requests = [
            ClaimRequest(
                identity.storage_key(scope, visit.client_key),
                fingerprint,
                policy.on_lapse,
                about,
                awaited,
                born=born_at,
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
                        counted=tenant == scope.tenant and before.namespace != scope.namespace,
                    )
                    for identity, request in zip(identities, requests, strict=True)
                ]
        return requests

    def _unnamed_caller(self, visit: Visit, error: Unnamed) -> Answer:
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

    def _claimed(self, visit: Visit, requests: list[ClaimRequest]) -> Answer | None:
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

    def _command(self, requests: list[ClaimRequest], visit: Visit) -> str:
        """The command that frees this key, for the developer who is looking at it. Only in debug mode: it names the record."""
        if in_one_process(self._desk.settings):
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

    def _outcome(self, visit: Visit, requests: list[ClaimRequest], quota: Quota | None) -> Outcome:
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

    def _anothers(self, visit: Visit, record: Record) -> bool:
        """Whether this record was made by another caller than this one, as it is named now or was before."""
        before = visit.former
        names = (record.about.tenant, visit.tenant, before[0]), (record.about.principal, visit.principal, before[1])
        return any(stored not in self._spellings(*known) for stored, *known in names)

    def _spellings(self, *names: str | None) -> set[str]:
        """How records may spell these names: in clear, or by a hash under any secret in use."""
        known = [name for name in names if name is not None]
        hashed = {identity.pseudonym(name) for identity in self._desk.identities for name in known}
        return {*known, *hashed} | ({""} if None in names else set())

    def _replay(self, visit: Visit, replay: Replay) -> Answer:
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

    def _condemn(self, visit: Visit, replay: Replay) -> None:
        try:
            self._desk.engine.condemn(replay, label=visit.record)
        except StoreUnavailable as error:
            # The next retry will find it out again.
            _log.warning("a record that cannot be read could not be quarantined (%s)", type(error).__name__)

    def _store_failed(self, visit: Visit, error: StoreUnavailable) -> Answer | None:
        if isinstance(error, MemoryLost):
            # Told by the engine, and never run.
            self._outages.refused(visit.operation, error)
            return self._answers.problem(failure(error), visit.policy)
        name = type(error.__cause__ or error).__name__
        # Neither of these says that the store is away: what runs past it now, it would let run again.
        known = isinstance(error, AnswerUnavailable | KeysUnavailable)
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
