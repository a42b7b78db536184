"""Asking for a key: what every door calls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from flask_idempotency.engine.claim import Claim, Dependencies, Held
from flask_idempotency.engine.errors import (
    CorruptRecord,
    KeyProviderUnavailable,
    ResponseUnavailable,
    StoreDataLoss,
    StoreUnavailable,
)
from flask_idempotency.engine.events import (
    ClaimGranted,
    ConflictRefused,
    DataLossDetected,
    ErasedRefused,
    MismatchRefused,
    QuotaRefused,
    RecordCorrupt,
    RefusedAfterDataLoss,
    StoreFailed,
    UnknownRefused,
)
from flask_idempotency.engine.keys import StorageKey, new_token
from flask_idempotency.engine.model import (
    CORRUPT,
    ERASED,
    Claimed,
    ClaimRequest,
    Erased,
    Grant,
    InFlight,
    Mismatched,
    OverQuota,
    Record,
    Replayed,
    State,
    StoredResponse,
    Unknown,
)
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import SealContext, StoreOutcome

_NOTHING = Grant(token=b"", fence=0, attempt=0, lease=0.0)
FIRST_POLL_SECONDS = 0.02
LAST_POLL_SECONDS = 0.5
"""A waiter looks after 20 ms, then ever more rarely: an early herd of pollers costs more than a late answer."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A stored answer, the record that it comes from, and the key of that: while secrets rotate it may be an older one."""

    record: Record
    result: StoredResponse
    key: StorageKey


@dataclass(frozen=True, slots=True)
class _Asking:
    """The same request under every secret in use, newest first, and the terms on which it is asked."""

    requests: tuple[ClaimRequest, ...]
    policy: Policy
    quota: Quota | None


Outcome: TypeAlias = Claimed[Claim] | Replayed[Replay] | InFlight | Mismatched | Unknown | OverQuota | Erased


class Engine:
    """Decides what becomes of a keyed request. Holds no state of any request: two threads share nothing through it."""

    def __init__(self, around: Dependencies) -> None:
        self._deps = around
        self.transactions = around.transactions

    def claim(
        self,
        request: ClaimRequest,
        policy: Policy,
        *,
        former: Sequence[ClaimRequest] = (),
        quota: Quota | None = None,
    ) -> Outcome:
        """Claim the key, waiting for another's answer if the policy says so. A new key has to stay within the quota.

        `former` is the same request under each older secret that is being rotated out, newest first. All are claimed,
        oldest first, so that releases which know only one of the secrets still exclude each other.

        Raises `StoreUnavailable` when nobody can tell, and `CorruptRecord` for a stored answer that cannot be read. In
        neither case may the work be done under this key. Raises `ConfigurationError` for a policy that cannot hold here.
        """
        if policy.effects == "transactional":
            policy.check(joint=self.transactions is not None)
            if self.transactions is not None:
                self.transactions.prepare()
        asking = _Asking((request, *former), policy, quota)
        outcome, refused = self._ask(asking)
        if not isinstance(outcome, InFlight):
            return outcome
        waited = 0.0
        if policy.in_flight == "wait":
            outcome, waited = self._wait(asking, outcome, refused)
        if isinstance(outcome, InFlight):
            self._deps.observers(ConflictRefused(request.key.label, request.info.operation, waited=waited))
        return outcome

    def successor(self, claim: Claim) -> Outcome:
        """What to answer for a claim that was lost: the stored answer, or how the key stands now. Never a new claim."""
        record = self._deps.store.read(claim.key)
        match record:
            case Record(fingerprint=other) if other != claim.fingerprint:
                # The store has forgotten this claim, and somebody used the key for another request.
                return Unknown(reason="lease-lost")
            case Record(state=State.COMPLETED):
                return self._replayed(record, claim.key)
            case Record(state=State.PROCESSING):
                return InFlight(retry_after=max(record.remaining, 0.0))
            case Record() | None:
                return Unknown(reason="lease-lost")

    def read(self, key: StorageKey) -> Record | None:
        """How this key stands, for people who look at it. Raises `CorruptRecord` for a record that cannot be read."""
        return self._deps.store.read(key)

    def mark_corrupt(self, replay: Replay, *, label: str) -> None:
        """Whoever was to give this answer again found that it cannot be given: quarantine its record, and tell."""
        self._deps.observers(RecordCorrupt(label, replay.record.info.operation))
        self._condemn(replay.key, replay.record)

    def _ask(self, asking: _Asking) -> tuple[Outcome, ClaimRequest]:
        """One classification, under every secret in use, and which of these requests decided it."""
        # Downstream keys come from the oldest: see `Claim.oldest_key`.
        token = new_token(asking.requests[-1].key.mark, several=len(asking.requests) > 1)
        asked_at = self._deps.monotonic()
        granted: list[Grant] = []
        for request in reversed(asking.requests):
            quota = self._quota(request, asking)
            try:
                outcome = self._deps.store.claim(request, token=token, lease=asking.policy.lease, quota=quota)
            except CorruptRecord:
                # It was read, so it was not granted.
                if granted:
                    self._claim(asking, granted, token, asked_at).release_unstarted()
                self._deps.observers(RecordCorrupt(asking.requests[0].key.label, request.info.operation))
                raise
            except StoreDataLoss as error:
                # It was not granted: the store does not know it, and says that it should.
                if granted:
                    self._claim(asking, granted, token, asked_at).release_unstarted()
                self._lost(request, error, label=asking.requests[0].key.label)
                raise
            except BaseException:
                # It may have been granted all the same, and its work will not be begun.
                self._claim(asking, [*granted, _NOTHING], token, asked_at).release_later()
                raise
            if not isinstance(outcome, Claimed):
                if granted:
                    self._claim(asking, granted, token, asked_at).release_unstarted()
                return self._refusal(outcome, request, label=asking.requests[0].key.label), request
            granted.append(outcome.held)
        claim = self._claim(asking, granted, token, asked_at)
        self._prepare(claim, fresh=all(grant.attempt == 1 for grant in granted))
        return Claimed(self._won(claim, asking)), asking.requests[0]

    def _lost(self, request: ClaimRequest, error: StoreDataLoss, *, label: str) -> None:
        who = label, request.info.operation
        if error.noticed:
            self._deps.observers(DataLossDetected(*who, loss=error.loss))
        self._deps.observers(RefusedAfterDataLoss(*who, loss=error.loss))

    def _quota(self, request: ClaimRequest, asking: _Asking) -> Quota | None:
        """While secrets rotate: what is known under the newest one is no new key under the older either."""
        newest = asking.requests[0].key
        if not request.in_quota:
            return None
        if asking.quota is None or request.key == newest or self._deps.store.read(newest) is None:
            return asking.quota
        return None

    def _prepare(self, claim: Claim, *, fresh: bool) -> None:
        """Have at hand what storing the result needs: before the work and not after it.

        Not before the claim, for what is known already needs no sealing; and the store, which has just granted this, is
        not what is away, whatever it is. Of work that nobody has begun the key is free again. What was taken over may
        have been done: it lapses, and is taken over once more when its keys are there.
        """
        try:
            claim.prepare()
        except BaseException as error:
            if fresh:
                claim.release_unstarted()
            if isinstance(error, StoreUnavailable) and not isinstance(error, KeyProviderUnavailable):
                raise KeyProviderUnavailable(str(error)) from error
            raise

    def _won(self, claim: Claim, asking: _Asking) -> Claim:
        request = asking.requests[0]
        who = request.key.label, request.info.operation
        try:
            self._deps.observers(ClaimGranted(*who, fence=claim.fence, attempt=claim.attempt))
            if asking.policy.effects == "transactional" and self.transactions is not None:
                claim.join(self.transactions)
        except BaseException:
            claim.release_unstarted()
            raise
        claim.keep_alive()
        return claim

    def _claim(self, asking: _Asking, grants: list[Grant], token: bytes, asked_at: float) -> Claim:
        """The claim of what was granted: of the oldest secrets first, as they were asked for."""
        granted = tuple(zip(asking.requests[-len(grants) :], reversed(grants), strict=True))
        newest = granted[0][0]
        held = Held(
            bindings=tuple(
                SealContext(request.key, token, grant.fence, request.fingerprint) for request, grant in granted
            ),
            granted=granted,
            token=token,
            policy=asking.policy,
            on_expiry=newest.on_expiry,
            record=newest.key.label,
            operation=newest.info.operation,
        )
        grant = max(grants, key=lambda grant: grant.fence)
        return Claim(held, grant, self._deps, asked_at=asked_at)

    def _refusal(self, outcome: StoreOutcome, request: ClaimRequest, *, label: str) -> Outcome:
        who = label, request.info.operation
        match outcome:
            case Replayed(record):
                return self._replayed(record, request.key, label=label)
            case Mismatched():
                self._deps.observers(MismatchRefused(*who))
                return outcome
            case Unknown(reason):
                if reason == CORRUPT:
                    raise CorruptRecord("the record was quarantined when it could not be read")
                self._deps.observers(UnknownRefused(*who, reason=reason))
                return outcome
            case OverQuota(limit):
                self._deps.observers(QuotaRefused(*who, limit=limit))
                return outcome
            case InFlight():
                return outcome
            case Claimed():
                raise AssertionError("a granted claim is no refusal")
            case unexpected:
                assert_never(unexpected)

    def _replayed(self, record: Record, key: StorageKey, *, label: str = "") -> Outcome:
        who = label or key.label, record.info.operation
        try:
            try:
                return self._opened(record, key) or self._erased(who)
            except CorruptRecord as error:
                self._deps.observers(RecordCorrupt(*who))
                return self._looked_again(record, key, who, error)
        except StoreUnavailable as error:
            # Whoever may go on without a store must hear that this was done already.
            raise ResponseUnavailable(str(error)) from error

    def _looked_again(self, record: Record, key: StorageKey, who: tuple[str, str], error: CorruptRecord) -> Outcome:
        """What cannot be opened may not be what the store holds, or no longer: a cache was damaged, the answer was sealed
        anew, its tenant was erased. If it is, nobody shall be given it, and nobody run it again."""
        store = self._deps.store
        fresh = store.read(key)
        if fresh is not None and fresh.state is State.COMPLETED and fresh.token == record.token:
            if fresh.erased:
                return self._erased(who)
            if fresh.payload != record.payload:
                # Compared by the store, so that this only makes a cache forget.
                self._condemn(key, record)
                return self._replayed(fresh, key, label=who[0])
        self._condemn(key, record)
        raise error

    def _condemn(self, key: StorageKey, record: Record) -> None:
        if record.payload is not None:
            self._deps.store.mark_corrupt(key, record.payload)

    def _erased(self, who: tuple[str, str]) -> Erased:
        self._deps.observers(ErasedRefused(*who))
        return Erased()

    def _opened(self, record: Record, key: StorageKey) -> Replayed[Replay] | None:
        """The answer of a completed record. None: it was erased."""
        payload = record.payload
        if payload is None:
            raise CorruptRecord("a completed record has no payload")
        if record.erased or payload.sealed_by == ERASED:
            return None
        binding = SealContext(key, record.token, record.fence, record.fingerprint)
        return Replayed(Replay(record, self._deps.codec.open(payload, binding), key))

    def _wait(self, asking: _Asking, outcome: Outcome, refused: ClaimRequest) -> tuple[Outcome, float]:
        """Look, never write, until the key is settled or the time is up; then ask again, as anybody else would.

        A store that stops answering is looked at again: the work is being done elsewhere, and its answer will be there.
        """
        began = self._deps.monotonic()
        newest, forgotten, failed = asking.requests[0], False, False
        with self._deps.waiters.slot(*(request.key for request in asking.requests)) as settled:
            if settled is None:
                return outcome, 0.0
            poll = FIRST_POLL_SECONDS
            while (left := began + asking.policy.wait - self._deps.monotonic()) > 0:
                settled.wait(min(poll, left))
                settled.clear()
                poll = min(poll * random.uniform(1.3, 1.7), LAST_POLL_SECONDS)  # noqa: S311 - spreads a herd, hides nothing
                try:
                    record = self._deps.store.read(refused.key)
                    if record is None and forgotten:
                        continue
                    if record is not None and record.state is State.PROCESSING and record.remaining > 0:
                        outcome = InFlight(retry_after=record.remaining)
                        continue
                    outcome, refused = self._ask(asking)
                except StoreDataLoss:
                    # Its owner may put it back; to ask again until then would only tell the same once more.
                    forgotten = True
                except StoreUnavailable as error:
                    if not failed:
                        who = newest.key.label, newest.info.operation
                        self._deps.observers(StoreFailed(*who, error=type(error).__name__, unprotected=False))
                    failed = True
                else:
                    if not isinstance(outcome, InFlight):
                        break
        return outcome, self._deps.monotonic() - began
