"""Observe the requests of endpoints in `mode` `observe` or `warn`: count what enforcing would do with each, and change none.

`Observer` is a guard that never answers. It reads a request and judges its ending by the guard's own code, on a state apart:
the shadow. `Watcher` is its engine, and asks `Observations` instead of a store. So the view runs as a request without a key
does, and what is counted is what enforcing would have done. Whatever fails in here is counted as `failed`, and goes no further.

Not judged: quotas, replay guards, erased responses, keys that `remember` refuses, records under older secrets and former
names, recorded steps, and the early commits of transactional views.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sized
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Final, TypeVar, cast

from flask import Request
from werkzeug.wrappers import Response

from flask_idempotency.engine import activity as names
from flask_idempotency.engine.claim import Claim, ClaimEnding, Dependencies
from flask_idempotency.engine.engine import Engine, Outcome
from flask_idempotency.engine.errors import (
    ConfigurationError,
    CorruptRecord,
    IdempotencyError,
    NotCommitted,
    StoreUnavailable,
)
from flask_idempotency.engine.events import Observation, Observers
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import new_token
from flask_idempotency.engine.lease import LeaseRenewer
from flask_idempotency.engine.model import ClaimRequest, Grant, OnExpiry, OverQuota, StoredResponse
from flask_idempotency.engine.observations import Ending, Observations, Observed, Sighting
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.policy import Decision, Policy
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.waiting import Waiters
from flask_idempotency.web.callbacks import Callbacks
from flask_idempotency.web.guard import COUNTED_HERE, Guard
from flask_idempotency.web.principals import UnknownCaller
from flask_idempotency.web.problems import Problem
from flask_idempotency.web.request_body import BodyNotKept
from flask_idempotency.web.request_state import Phase, QuarantineLog, RequestState, session_here
from flask_idempotency.web.responses import StreamEnd, Tee

STATUS: Final = "Idempotency-Status"

WARNINGS: Final = {
    names.REPLAYED: "would-replay",
    names.CONFLICT: "would-conflict",
    names.WAIT: "would-wait",
    names.MISMATCH: "would-mismatch",
    names.UNKNOWN: "would-unknown",
    names.MISSING_KEY: "would-refuse",
    names.BAD_REQUEST: "would-refuse",
}
"""The values of `Idempotency-Status` under `mode="warn"`, by outcome. Other outcomes change no response."""

PAUSE_SECONDS: Final = 5.0
"""How long no request is observed after the store did not answer one, at least. Then one request tries it."""

PAUSE_FACTOR: Final = 20
"""How many times as long as a slow call took no request is observed. So the store takes a twentieth of a thread's time."""

LONGEST_PAUSE_SECONDS: Final = 300.0

SLOW_SECONDS: float = 1.0
"""A call that took longer is followed by a pause, even if the store answered: no request may become slow."""

MOST_OBSERVED: Final = 100_000
"""How many keys of a tenant each process records within one `keep`, without a lower quota of records. A client
that floods an endpoint that is only observed must not fill the store of those that are enforced."""

MOST_TENANTS: Final = 10_000
"""Of how many tenants a process counts this. The count of the one that was not seen for longest is forgotten."""

UNKNOWN_KEPT_SECONDS: Final = float(names.KEPT_SECONDS[names.HOUR])
"""How long a key that enforcing would have quarantined is remembered, at least. A record would stay; counts go after this."""

_SIGHTED: Final = {
    Sighting.REPLAY: names.REPLAYED,
    Sighting.CONFLICT: names.CONFLICT,
    Sighting.MISMATCH: names.MISMATCH,
    Sighting.UNKNOWN: names.UNKNOWN,
}

_UNUSED: Any = None
"""A watch writes no record and seals no response. If it tried to, it would fail."""

T = TypeVar("T")

_log = logging.getLogger("flask_idempotency")


class Shadow(RequestState):
    """The state of an observed request as the guard's code sees it. The view and the hooks see another, without a claim."""

    caller: str = "anonymous"
    outcome: str = ""
    """What enforcing would have done with it: one of `activity.OBSERVED`."""
    apart: float = 0.0
    """Seconds since the first request began, for a concurrent duplicate."""

    def mirror(self, state: RequestState) -> None:
        """Take over what the hooks and the view have noted in the other state."""
        if state.error is not None:
            self.error: BaseException | None = state.error
            self.escaped: bool = state.escaped
        self.keeps_rows: bool = state.keeps_rows


class Watch(Claim):
    """A claim on a key that refuses no request: its writes go to `Observations`, and never to a record."""

    def __init__(self, watcher: Watcher, policy: Policy, request: ClaimRequest, token: bytes, attempt: int) -> None:
        granted = [(request, Grant(token, fence=1, attempt=attempt, lease=policy.lease))]
        super().__init__(watcher.deps, policy, granted, token=token, requested_at=watcher.monotonic())
        self._watcher = watcher
        self._keep, self._lease = policy.keep, policy.lease
        self._began = watcher.monotonic()
        self.transactional: bool = policy.effects == "transactional"
        self.sets_cookie = False
        self.report: Callable[..., None] = _report_nothing
        """Publish an outcome, and how long the view ran."""

    def point_of_no_return(self) -> None:
        """Note that the view passed its point of no return. Never raises."""
        self._point_passed = True

    def _write(self, ending: ClaimEnding) -> None:
        made_of_it = {"complete": Ending.KEPT, "quarantine": Ending.QUARANTINED}.get(ending.write, Ending.RELEASED)
        keep = max(self._keep, UNKNOWN_KEPT_SECONDS) if made_of_it is Ending.QUARANTINED else self._keep
        self._watcher.end(self.key, self._token, made_of_it, keep=keep)
        self._stored = True
        seconds = self._watcher.monotonic() - self._began
        match ending.write:
            case "complete":
                self.report(names.COMPLETED, seconds)
                if ending.sealed is not None and not ending.sealed.response.kept:
                    self.report(names.NOT_KEPT)
                if self.sets_cookie:
                    self.report(names.SETS_COOKIE)
            case "quarantine":
                self.report(names.QUARANTINED, seconds)
            case "release":
                self.report(names.RELEASED, seconds)
            case _:
                pass  # it may have been noted by a store that did not answer, and was counted as failed
        # It refers to the shadow, and that to this watch: a cycle keeps the request's body until garbage is collected.
        self.report = _report_nothing

    def _renew(self) -> None:
        self._watcher.renew(self.key, self._token, lease=self._lease)


def _report_nothing(outcome: str, seconds: float = 0.0) -> None:
    """The watch of a request that was not observed: no request knows of it."""


class _NotAsked(StoreUnavailable):
    """The store was not called, so it has noted nothing."""


class Watcher(Engine):
    """Decide what enforcing would do with a key, from the keys of earlier observed requests."""

    def __init__(
        self,
        observations: Observations | None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        renewer: LeaseRenewer | None = None,
        quota: Quota | None = None,
    ) -> None:
        # A renewer that no real claim uses: a slow call for an observation must not delay a lease.
        renewer = LeaseRenewer() if renewer is None else renewer
        self.deps: Dependencies = Dependencies(_UNUSED, _UNUSED, renewer, Waiters(0), Observers(), monotonic=monotonic)
        super().__init__(self.deps)
        self.monotonic = monotonic
        self._observations = observations
        # Not its limit of new keys, which is for a window that may be a second.
        records = None if quota is None else quota.records
        self._most = MOST_OBSERVED if records is None else min(records, MOST_OBSERVED)
        self._recorded: OrderedDict[bytes, list[float]] = OrderedDict()
        """By tenant: when its count returns to 0, and the count."""
        self._unlock()
        after_fork(self._unlock)
        self._paused_until = float("-inf")
        self._trying = False
        """Whether the store failed last, so that one call tries it after the pause."""

    def claim(
        self,
        request: ClaimRequest,
        policy: Policy,
        *,
        former: Any = (),
        quota: Quota | None = None,
    ) -> Outcome:
        """Note that this request began. Return a watch if enforcing would let it run, else what was seen before.

        `OverQuota`: nothing was noted, because this process has noted as many keys of the tenant as it may.

        Raises `StoreUnavailable`, also in the pause after the store did not answer, or was slow.
        """
        if not self._count(request.key.tid, policy.keep):
            return OverQuota("records", self._most)
        token = new_token(request.key.mark)
        try:
            seen = self._observe(request, policy, token)
            if seen.sighting is Sighting.MISMATCH and (formerly := request.as_formerly) is not None:
                seen = self._observe(formerly, policy, token)
        except _NotAsked as error:
            self._discount(request.key.tid)
            raise StoreUnavailable(str(error)) from None
        except StoreUnavailable:
            # It may have noted the request, which will not be watched.
            Watch(self, policy, request, token, 1).release_later()
            raise
        if seen.sighting in (Sighting.NEW, Sighting.TAKEN_OVER):
            watch = Watch(self, policy, request, token, 1 if seen.sighting is Sighting.NEW else 2)
            self.deps.renewer.add(watch, after=policy.lease / 3)
            if seen.sighting is Sighting.TAKEN_OVER:
                self._discount(request.key.tid)  # its key is recorded already
            return watch
        self._discount(request.key.tid)  # its key is recorded already
        return cast("Outcome", seen)  # only `Observer._outcome` gets it

    def _observe(self, request: ClaimRequest, policy: Policy, token: bytes) -> Observed:
        return self._ask(
            lambda store: store.observe(
                request.key,
                token=token,
                fingerprint=request.fingerprint,
                lease=policy.lease,
                keep=policy.keep,
                hold_lapsed=request.on_expiry is OnExpiry.QUARANTINE,
            )
        )

    def renew(self, key: Any, token: bytes, *, lease: float) -> None:
        """Extend the lease of a watch. Raises `StoreUnavailable`."""
        self._ask(lambda store: store.renew(key, token, lease=lease))

    def end(self, key: Any, token: bytes, ending: Ending, *, keep: float) -> None:
        """Note how an observed request ended. Raises `StoreUnavailable`."""
        self._ask(lambda store: store.end(key, token, ending, keep=keep))
        if ending is Ending.RELEASED:
            self._discount(key.tid)  # the store has forgotten it

    def _unlock(self) -> None:
        self._counting = Lock()

    def _count(self, tid: bytes, keep: float) -> bool:
        """Count one more key of this tenant. Return False if it has as many as it may."""
        with self._counting:
            now = self.monotonic()
            count = self._recorded.get(tid)
            if count is None or count[0] <= now:
                count = self._recorded[tid] = [now + keep, 0]
            self._recorded.move_to_end(tid)
            if len(self._recorded) > MOST_TENANTS:
                self._recorded.popitem(last=False)
            if count[1] >= self._most:
                return False
            count[1] += 1
            return True

    def _discount(self, tid: bytes) -> None:
        with self._counting:
            count = self._recorded.get(tid)
            if count is not None and count[1] > 0:
                count[1] -= 1

    def _ask(self, call: Callable[[Observations], T]) -> T:
        """Call the store, unless it failed or was slow a short while ago. Then raise `StoreUnavailable` at once.

        Requests wait for these calls. After a pause one call tries the store, and no other waits beside it.
        """
        if self._observations is None:
            raise _NotAsked("the store remembers no observed keys: it has no `observations`")
        began = self.monotonic()
        if began < self._paused_until:
            raise _NotAsked("the store did not answer in time a short while ago")
        trying = self._trying
        if trying:
            self._paused_until = began + PAUSE_SECONDS
        failed = False
        try:
            return call(self._observations)
        except StoreUnavailable:
            failed = True
            raise
        finally:
            now = self.monotonic()
            if failed or now - began > SLOW_SECONDS:
                pause = min(max(PAUSE_SECONDS, PAUSE_FACTOR * (now - began)), LONGEST_PAUSE_SECONDS)
                self._paused_until, self._trying = max(self._paused_until, now + pause), True
            elif trying:
                self._paused_until, self._trying = now, False


class _Callers:
    """The loaders that name a caller. Quotas and replays are not judged, so their functions are not called."""

    quota = replay_guard = problem_renderer = None

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks

    @property
    def principal(self) -> Any:
        return self._callbacks.principal

    @property
    def tenant(self) -> Any:
        return self._callbacks.tenant


class _SilentLog(QuarantineLog):
    """No key of an observed request is quarantined."""

    def quarantined(self, state: RequestState, reason: str) -> None:
        pass


class Meter(Tee):
    """Pass a body on as it is, and count its bytes. It keeps no copy, and looks at nothing before it is asked for.

    A hook finds the length and the attributes of the body that it replaces.
    """

    changes = False

    def __len__(self) -> int:
        return len(cast("Sized", self._source))

    def __bool__(self) -> bool:
        return bool(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def __next__(self) -> bytes:
        try:
            chunk = next(self._chunks)
        except StopIteration:
            self._ended(StreamEnd.EXHAUSTED)
            raise
        except BaseException:
            self._ended(StreamEnd.ERROR)
            raise
        # Some servers take whatever has bytes.
        self._byte_size += len(chunk.encode("utf-8", "replace")) if isinstance(chunk, str) else len(chunk)
        return cast("bytes", chunk)

    def close(self) -> None:
        try:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()
        finally:
            self._ended(StreamEnd.CLOSED)


class Observer(Guard):
    """A guard that changes no request. `observations` is None if the store cannot remember them: then each counts as failed."""

    def __init__(self, guard: Guard, observations: Observations | None) -> None:
        super().__init__(
            guard._app,
            engine=Watcher(observations, quota=guard._settings.quota),
            identities=guard._identities[:1],
            settings=replace(guard._settings, former_identity=None, quota=None),
            callbacks=cast("Callbacks", _Callers(guard._callbacks)),
            observers=Observers(),
            lost_fields=guard.lost_fields,
        )
        self.abandoned_streams = guard.abandoned_streams
        self._publish = guard._observers
        self._quarantines = _SilentLog()
        self._failures: set[tuple[str, str]] = set()
        """Endpoints with the kind of failure that has been logged."""

    # -- what the guard calls

    def watch(self, state: RequestState, request: Request) -> None:
        """Note that this request began, and what enforcing would do with it."""
        shadow = Shadow(state.policy, state.operation, state.scope, state.deferred, state.from_view)
        state.shadow, shadow.context = shadow, state.context
        session = session_here()
        unread = session is not None and getattr(session, "accessed", None) is False
        try:
            shadow.caller = self._credentials.kind_of(request)
            super().begin(shadow, request)
            if (claim := shadow.claim) is not None:
                shadow.outcome = names.NEW if claim.attempt == 1 else names.TAKEN_OVER
                if isinstance(claim, Watch):
                    claim.report = partial(self._report, shadow)
                state.watch, state.body = claim, shadow.body
        except Exception as error:  # noqa: BLE001 - a loader may raise anything, and the request goes on
            self._failed(shadow, error)
        else:
            self._report(shadow, shadow.outcome, apart=shadow.apart)
        finally:
            if unread and session is not None:
                # Flask adds `Vary: Cookie` for a session that was read, and only our loaders may have read it.
                session.accessed = False

    def look(self, state: RequestState, response: Response) -> None:
        """Look at the response as the view left it. Under `warn`, mark what enforcing would have done."""
        shadow = cast("Shadow", state.shadow)
        if state.policy.mode == "warn" and shadow.outcome in WARNINGS:
            response.headers[STATUS] = WARNINGS[shadow.outcome]
        if shadow.phase is not Phase.CLAIMED:
            return
        try:
            self.capture(shadow, response, tee=Meter)
            if isinstance(shadow.claim, Watch) and shadow.capture is not None:
                shadow.claim.sets_cookie = state.session_changed() or shadow.capture.sets_cookie
        except Exception as error:  # noqa: BLE001 - as in `watch`
            self._give_up(shadow, error)

    def end(self, state: RequestState, response: Response, *, committed: bool) -> None:
        """Judge how the request ended: all hooks have run, and the rows of a transactional view are committed, or not."""
        shadow = cast("Shadow", state.shadow)
        if shadow.phase is not Phase.CLAIMED:
            return
        try:
            shadow.mirror(state)
            if committed:
                self.finish(shadow, response)
            else:
                lost = StoredResponse(status=500, kept=False)
                self._settle_quietly(shadow, Decision.RELEASE, lost, reason="not-committed")
        except Exception as error:  # noqa: BLE001 - as in `watch`
            self._give_up(shadow, error)

    def drop(self, state: RequestState, error: BaseException | None) -> None:
        """Judge a request without a response of its view: an error propagated, or a later hook failed."""
        shadow = cast("Shadow", state.shadow)
        if shadow.phase is not Phase.CLAIMED:
            return
        try:
            shadow.mirror(state)
            self.abandon(shadow, error)
        except Exception as failure:  # noqa: BLE001 - as in `watch`
            self._give_up(shadow, failure)

    # -- what the guard's own code does with a shadow

    def _run_without_key(self, state: RequestState, *, required: bool = False) -> Response | None:
        state.phase = Phase.UNKEYED
        cast("Shadow", state).outcome = names.MISSING_KEY if required else names.UNKEYED
        return None

    def _refuse(self, state: RequestState, problem: Problem) -> Response:
        state.phase = Phase.ANSWERED
        cast("Shadow", state).outcome = COUNTED_HERE.get(problem.code, names.FAILED)
        return cast("Response", None)  # `watch` sends no response

    def _not_claimed(
        self, state: RequestState, error: StoreUnavailable | ConfigurationError | CorruptRecord
    ) -> Response | None:
        raise error

    def _body_failed(self, state: RequestState, error: BodyNotKept) -> Response:
        raise error

    def _outcome(self, state: RequestState, outcome: Any) -> Response:
        if isinstance(outcome, OverQuota):
            cast("Shadow", state).outcome = names.OVER_QUOTA
            return cast("Response", None)
        shadow, seen = cast("Shadow", state), cast("Observed", outcome)
        shadow.outcome = _SIGHTED[seen.sighting]
        if seen.sighting is Sighting.CONFLICT:
            shadow.apart = seen.first_seen_ago
            if shadow.policy.in_flight == "wait":
                shadow.outcome = names.WAIT
        return cast("Response", None)

    def _unknown_caller(self, state: RequestState, error: UnknownCaller) -> Problem:
        if state.operation not in self._unknown_callers:
            self._unknown_callers.add(state.operation)
            _log.warning("%s would refuse a request with a key: %s. %s", state.operation, error, error.remedy)
        return Problem("principal-required")

    def _stream_ended(self, state: RequestState, end: StreamEnd) -> None:
        try:
            super()._stream_ended(state, end)
        except Exception as error:  # noqa: BLE001 - as in `watch`
            self._give_up(cast("Shadow", state), error)

    def _replace_response(self, state: RequestState, response: Response, problem: Problem) -> None:
        """Leave the response as it is."""

    def _replace_lost(self, state: RequestState, response: Response) -> None:
        """Leave the response as it is."""

    def _replace_uncommitted(
        self,
        state: RequestState,
        response: Response,
        error: NotCommitted | StoreUnavailable,
        *,
        problem: Problem | None = None,
    ) -> None:
        """Leave the response as it is. `settle` raised, so the watch did not end."""
        self._give_up(cast("Shadow", state), error)

    def _replace_rolled_back(self, state: RequestState, response: Response, error: BaseException | None) -> None:
        """Leave the response as it is."""

    def _uncaptured(self, state: RequestState, response: Response) -> None:
        self._settle_quietly(state, Decision.RELEASE, StoredResponse(status=500, kept=False), reason="uncaptured")

    # -- what is published

    def _report(self, shadow: Shadow, outcome: str, seconds: float = 0.0, *, apart: float = 0.0) -> None:
        self._publish(Observation(shadow.record, shadow.operation, outcome, shadow.caller, apart, seconds))

    def _failed(self, shadow: Shadow, error: Exception) -> None:
        """Count a request that could not be observed. Log each kind of failure once for each endpoint."""
        shadow.phase = Phase.DONE
        shadow.outcome = names.FAILED
        self._report(shadow, names.FAILED)
        kind = cause_of(error)
        if (shadow.operation, kind) not in self._failures:
            self._failures.add((shadow.operation, kind))
            _log.warning(
                "%s could not observe a request (%s). The request was not affected.",
                shadow.operation,
                kind,
                exc_info=None if isinstance(error, IdempotencyError) else error,
            )

    def _give_up(self, shadow: Shadow, error: Exception) -> None:
        """Count a request whose ending could not be judged, and forget its key, so that the next one counts as new."""
        self._failed(shadow, error)
        if shadow.claim is not None and not shadow.claim.ended:
            shadow.claim.release_later()
