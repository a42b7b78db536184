"""Observe the requests of endpoints in `mode` `observe` or `warn`: count what enforcing would do with each, and change none.

An observed request has a state apart, its shadow: the view and the hooks find no claim in their own. The shadow has a claim of
the engine like any other, whose store (`ObservingStore`) only remembers which keys were seen. It is read and judged by the code
that enforces, so what is counted is what enforcing would have done. No response is made or replaced here. Whatever fails in
here is counted as `failed`, and goes no further.

Not judged: quotas, replay guards, erased responses, keys that `remember` refuses, records under older secrets and former
names, recorded steps, and the early commits of transactional views.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from math import inf
from threading import Lock
from typing import Any, Final, TypeVar, cast

from flask import Request
from werkzeug.wrappers import Response

from flask_idempotency.activity import COUNTERS
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine import activity as names
from flask_idempotency.engine import model
from flask_idempotency.engine.claim import Claim, Dependencies
from flask_idempotency.engine.ending import settle
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import IdempotencyError, InvalidKey, StoreUnavailable
from flask_idempotency.engine.events import Completed, Event, Observation, Quarantined, Released
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.lease import LeaseRenewer
from flask_idempotency.engine.observations import Ending, Observations, Observed, Sighting
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.outages import LogLimit, cause_of
from flask_idempotency.engine.policy import Decision
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.engine.waiting import Waiters
from flask_idempotency.web.guard import STATUS, Guard, judge_response
from flask_idempotency.web.judging import NO_RESPONSE, Judgement, judge_stream, judge_unanswered
from flask_idempotency.web.principals import AnonymousCaller, UnknownCaller
from flask_idempotency.web.request_body import BodyTooLarge, TruncatedBody
from flask_idempotency.web.request_state import Phase, RequestState, session_here
from flask_idempotency.web.responses import StreamEnd, Tee

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

_REFUSALS: Final[Mapping[Sighting, StoreOutcome]] = {
    Sighting.REPLAY: model.Expired(first_seen=0.0),
    Sighting.CONFLICT: model.InFlight(retry_after=0.0),
    Sighting.MISMATCH: model.Mismatched(first_seen=0.0),
    Sighting.UNKNOWN: model.Unknown(reason=""),
}
"""Why a key is not granted, by what was found under it. Of a response, only the fact of completion is remembered."""

_CODEC: Final = EnvelopeCodec(compression=None)
"""Seals a response as enforcing would, to find out whether it can be kept. The sealed bytes go nowhere."""

T = TypeVar("T")

_log = logging.getLogger("flask_idempotency")


class PacedObservations:
    """Asks the store about observed keys, for one application, without making its requests slow or filling the store."""

    def __init__(self, observations: Observations | None, *, most: int) -> None:
        """`most`: how many keys of a tenant it records within one `keep`."""
        self.most: int = most
        self.monotonic: Callable[[], float] = time.monotonic
        self._observations = observations
        self._recorded: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        """By tenant: when its count returns to 0, and the count."""
        self._resumes_at = -inf
        """Until then no request is observed, and then one call tries the store. Not finite as long as the store answers."""
        self._unlock()
        after_fork(self._unlock)

    def _unlock(self) -> None:
        self._counting = Lock()

    def ready(self) -> Observations:
        """Return the store to ask. Raises `StoreUnavailable` if there is none, or it failed or was slow a short while ago."""
        if self._observations is None:
            raise StoreUnavailable("the store remembers no observed keys: it has no `observations`")
        if self.monotonic() < self._resumes_at:
            raise StoreUnavailable("the store did not answer in time a short while ago")
        return self._observations

    def ask(self, call: Callable[[Observations], T]) -> T:
        """Call the store, if it is ready. Requests wait for these calls, so one that fails or is slow is followed by a pause.

        After a pause one call tries the store, and no other waits beside it. Raises `StoreUnavailable`.
        """
        store, began, failed = self.ready(), self.monotonic(), False
        trying = self._resumes_at > -inf
        if trying:
            self._resumes_at = began + PAUSE_SECONDS
        try:
            return call(store)
        except StoreUnavailable:
            failed = True
            raise
        finally:
            now = self.monotonic()
            if failed or now - began > SLOW_SECONDS:
                pause = min(max(PAUSE_SECONDS, PAUSE_FACTOR * (now - began)), LONGEST_PAUSE_SECONDS)
                self._resumes_at = max(self._resumes_at, now + pause)
            elif trying:
                self._resumes_at = -inf

    def count(self, tid: bytes, keep: float, more: int) -> bool:
        """Add this to the number of keys that are recorded of a tenant. Return False if it has too many now."""
        with self._counting:
            now = self.monotonic()
            ends, number = self._recorded.pop(tid, (now, 0))
            if ends <= now:
                ends, number = now + keep, 0
            fits = number + more <= self.most
            self._recorded[tid] = ends, max(number + more, 0) if fits else number
            if len(self._recorded) > MOST_TENANTS:
                self._recorded.popitem(last=False)
            return fits


class ObservingStore:
    """Implements `engine.store.Store` for the claim of one observed request. It keeps no record, and refuses no write."""

    def __init__(self, paced: PacedObservations, *, keep: float) -> None:
        self._paced = paced
        self._keep = keep
        self.found: Observed | None = None
        """What the request found under its key."""
        self.began = 0.0
        """When it had found that, and its view could begin."""
        self.sets_cookie = False
        """Whether its view has set a cookie: reported with the completion."""

    def claim(
        self, request: model.ClaimRequest, *, token: bytes, lease: float, quota: Quota | None = None
    ) -> StoreOutcome:
        paced, tid = self._paced, request.key.tid
        if not paced.count(tid, self._keep, 1):
            return model.OverQuota("records", paced.most)
        # If it fails, the store may have noted the key: the engine releases it later.
        self.found = paced.ask(
            lambda store: store.observe(
                request.key,
                token=token,
                fingerprint=request.fingerprint,
                lease=lease,
                keep=self._keep,
                hold_lapsed=request.on_expiry is model.OnExpiry.QUARANTINE,
            )
        )
        self.began, sighting = paced.monotonic(), self.found.sighting
        if sighting is not Sighting.NEW:
            paced.count(tid, self._keep, -1)
        return _REFUSALS.get(sighting) or model.Grant(
            token, fence=1, attempt=1 + (sighting is not Sighting.NEW), lease=lease
        )

    def renew(self, key: StorageKey, token: bytes, *, lease: float) -> None:
        self._paced.ask(lambda store: store.renew(key, token, lease=lease))

    def mark_point_of_no_return(self, key: StorageKey, token: bytes) -> None:
        """Do nothing: the claim itself knows that its view passed the point."""

    def complete(
        self, key: StorageKey, token: bytes, payload: model.StoredPayload, *, keep: float, remember: float | None = None
    ) -> None:
        self._end(key, token, Ending.KEPT, keep)

    def release(self, key: StorageKey, token: bytes) -> None:
        self._end(key, token, Ending.RELEASED, self._keep)
        self._paced.count(key.tid, self._keep, -1)  # the store has forgotten it

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        self._end(key, token, Ending.QUARANTINED, max(self._keep, UNKNOWN_KEPT_SECONDS))

    def read(self, key: StorageKey) -> None:
        """Return None: there is no record."""

    def mark_corrupt(self, key: StorageKey, payload: model.StoredPayload) -> None:
        """Do nothing: there is no record."""

    def _end(self, key: StorageKey, token: bytes, ending: Ending, keep: float) -> None:
        self._paced.ask(lambda store: store.end(key, token, ending, keep=keep))


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
        chunk = self._taken()
        # Some servers take whatever has bytes.
        self.byte_size += len(chunk.encode("utf-8", "replace")) if isinstance(chunk, str) else len(chunk)
        return cast("bytes", chunk)

    def _within(self, call: Callable[[], T]) -> T:
        """Call this code of a stream as it is: no claim is open, so it may do what it does without us."""
        return call()


class Observer:
    """Observes the requests of one application."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._publish = guard.observers
        # Not its limit of new keys, which is for a window that may be a second.
        records = None if guard.settings.quota is None else guard.settings.quota.records
        most = MOST_OBSERVED if records is None else min(records, MOST_OBSERVED)
        self.paced: PacedObservations = PacedObservations(guard.built.observations, most=most)
        # A renewer that no real claim uses: a slow call for an observation must not delay a lease.
        self.renewer: LeaseRenewer = LeaseRenewer()
        self._waiters = Waiters(0)
        self._logged = LogLimit()

    def watch(self, state: RequestState, request: Request) -> None:
        """Note that this request began, and what enforcing would do with it."""
        if self._guard.abandoned_streams:
            self._guard.settle_abandoned()  # one of them may have this key
        shadow = RequestState(state.policy, state.operation, state.scope, state.deferred)
        state.shadow = shadow
        session = session_here()
        unread = session is not None and getattr(session, "accessed", None) is False
        try:
            with self._counting_failures(shadow):
                shadow.caller = self._guard.reader.credentials.kind_of(request)
                shadow.observed, apart = self._outcome(shadow, request)
                self._report(shadow, shadow.observed, apart)
                if shadow.claim is not None:
                    state.watch, state.body = shadow.claim, shadow.body
        finally:
            if unread and session is not None:
                # Flask adds `Vary: Cookie` for a session that was read, and only our loaders may have read it.
                session.accessed = False

    def _outcome(self, shadow: RequestState, request: Request) -> tuple[str, float]:
        """Claim the key of a request, if it has one. Return what enforcing would do with it, and `Observation.apart`."""
        policy = shadow.policy
        try:
            requests = self._guard.reader.read(shadow, request)
        except UnknownCaller as error:
            if self._logged.take(f"{shadow.operation} without a caller") is not None:
                _log.warning("%s would refuse a request with a key: %s. %s", shadow.operation, error, error.remedy)
            return names.BAD_REQUEST, 0.0
        except (InvalidKey, AnonymousCaller, TruncatedBody, BodyTooLarge):
            return names.BAD_REQUEST, 0.0
        if not requests:
            return (names.MISSING_KEY if policy.required else names.UNKEYED), 0.0
        shadow.record = requests[0].key.label
        self.paced.ready()
        store = shadow.watching = ObservingStore(self.paced, keep=policy.keep)
        ended = partial(self._ended, shadow.caller, store)
        deps = Dependencies(store, _CODEC, self.renewer, self.renewer, self._waiters, Observers([ended]))
        outcome, _ = Engine(deps).claim_once(requests[:1], policy, None)
        if isinstance(outcome, Claim):
            outcome.transactional = policy.effects == "transactional"
            shadow.claim, shadow.phase = outcome, Phase.CLAIMED
        match store.found:
            case None:
                return names.OVER_QUOTA, 0.0
            case Observed(Sighting.REPLAY):
                return names.REPLAYED, 0.0
            case Observed(Sighting.CONFLICT, apart):
                return (names.WAIT if policy.in_flight == "wait" else names.CONFLICT), apart
            case Observed(sighting):
                return sighting.value, 0.0

    def look(self, state: RequestState, shadow: RequestState, response: Response) -> None:
        """Look at the response as the view left it. Under `warn`, mark what enforcing would have done."""
        if state.policy.mode == "warn" and shadow.observed in WARNINGS:
            response.headers[STATUS] = WARNINGS[shadow.observed]
        if shadow.phase is Phase.CLAIMED:
            with self._counting_failures(shadow):
                self._guard.capture(shadow, response, tee=Meter, on_end=self._stream_ended)
                if shadow.watching is not None and shadow.capture is not None:
                    shadow.watching.sets_cookie = state.session_changed() or shadow.capture.sets_cookie

    def end(
        self,
        state: RequestState,
        shadow: RequestState,
        response: Response | None,
        *,
        committed: bool = True,
        error: BaseException | None = None,
    ) -> None:
        """Judge how the request ended: all hooks have run, and the rows of a transactional view are committed, or not.

        Without a response of its view, an error propagated, or a later hook failed.
        """
        if shadow.phase is not Phase.CLAIMED:
            return
        with self._counting_failures(shadow):
            # What the hooks and the view have noted in their state.
            if state.error is not None:
                shadow.error, shadow.escaped = state.error, state.escaped
            shadow.keeps_rows = state.keeps_rows
            if response is None:
                self._settle(shadow, judge_unanswered(shadow, error))
            elif committed:
                self._settle(shadow, judge_response(shadow, response, self._guard.lost_fields))
            else:
                self._settle(shadow, Judgement(Decision.RELEASE, NO_RESPONSE, "not-committed"))

    def _stream_ended(self, shadow: RequestState, end: StreamEnd) -> None:
        with self._counting_failures(shadow):
            self._settle(shadow, judge_stream(shadow, end))

    def _settle(self, shadow: RequestState, judgement: Judgement | None) -> None:
        """End the claim. None: a stream goes on, and ends it."""
        if judgement is None:
            return
        shadow.phase = Phase.DONE
        settle(shadow, judgement.decision, judgement.stored, reason=judgement.reason)

    # -- what is published

    def _ended(self, caller: str, store: ObservingStore, event: Event) -> None:
        """Publish how a claim ended, when the store has noted it. It refers to no request, which may be over by then."""
        if isinstance(event, Completed | Released | Quarantined):
            cookie = (names.SETS_COOKIE,) if isinstance(event, Completed) and store.sets_cookie else ()
            for outcome in COUNTERS[type(event)](event) + cookie:
                seconds = self.paced.monotonic() - store.began if outcome in names.ENDINGS else 0.0
                self._publish(Observation(event.record, event.operation, outcome, caller, 0.0, seconds))

    def _report(self, shadow: RequestState, outcome: str, apart: float = 0.0) -> None:
        self._publish(Observation(shadow.record, shadow.operation, outcome, shadow.caller, apart))

    @contextmanager
    def _counting_failures(self, shadow: RequestState) -> Iterator[None]:
        """Count a request that cannot be observed or judged, whatever fails: a loader may raise anything, and it goes on.

        The store forgets its key, so that the next one counts as new. Each kind of failure is logged once for each endpoint.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            shadow.phase, shadow.observed = Phase.DONE, names.FAILED
            self._report(shadow, names.FAILED)
            kind = cause_of(error)
            if self._logged.take(f"{shadow.operation} {kind}") is not None:
                _log.warning(
                    "%s could not observe a request (%s). The request was not affected.",
                    shadow.operation,
                    kind,
                    exc_info=None if isinstance(error, IdempotencyError) else error,
                )
            if shadow.claim is not None and not shadow.claim.ended:
                shadow.claim.release_later()
