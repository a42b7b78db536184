"""Decide what a keyed request may do: run, get the stored response, or be refused. Every entry point calls this."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never, final

from flask_idempotency.engine import errors, events, waiting
from flask_idempotency.engine.claim import Claim, Dependencies
from flask_idempotency.engine.keys import StorageKey, new_token
from flask_idempotency.engine.model import (
    CORRUPT,
    ERASED,
    VOIDED,
    ClaimRequest,
    Erased,
    Expired,
    Grant,
    InFlight,
    Mismatched,
    OtherCaller,
    OverQuota,
    Record,
    SealContext,
    State,
    StoredResponse,
    Unknown,
    Voided,
)
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.values import valueclass

if TYPE_CHECKING:
    from flask_idempotency.engine.quota import Quota
    from flask_idempotency.engine.store import Transactions

_MAYBE_GRANTED: Final = Grant(token=b"", fence=0, attempt=0, lease=0.0)
"""The placeholder for a grant by a store that did not answer. It may have granted the key."""


@valueclass(frozen=True, slots=True)
class Replay:
    """A stored response, its record, and the key of that: while secrets rotate it may be an older one."""

    record: Record
    response: StoredResponse
    key: StorageKey


Outcome: TypeAlias = Claim | Replay | InFlight | Mismatched | Unknown | OverQuota | Erased | Expired | Voided


@final
class Engine:
    """Decide what becomes of a keyed request. Keeps no state of a request, so threads can share one engine."""

    def __init__(self, deps: Dependencies) -> None:
        self._deps = deps
        self.transactions: Transactions | None = deps.transactions

    def claim(
        self,
        request: ClaimRequest,
        policy: Policy,
        *,
        former: Sequence[ClaimRequest] = (),
        quota: Quota | None = None,
    ) -> Outcome:
        """Claim the key, or wait for the response of another request if the policy says so. A new key stays in the quota.

        `former` is the same request under each older secret that is being rotated out, newest first. The engine claims all
        of them, oldest first, so that releases which know only one of the secrets still exclude each other. A former name
        that has another caller's record (`Callers.former`) is passed over.

        Raises `StoreUnavailable` if the store does not answer, or `ResponseUnavailable` if it knows the request. Raises
        `CorruptRecord` for a stored response that cannot be read. In no case may the work be done under this key. Raises
        `ConfigurationError` for a policy that cannot hold here.
        """
        if policy.effects == "steps":
            policy.check(joint=self.transactions is not None, journals=self._deps.journals is not None)
        elif policy.effects == "transactional":
            # Only this depends on the store. What else may be wrong with a policy was found when it was resolved.
            if self.transactions is None:
                policy.check(joint=False)
            else:
                self.transactions.prepare()
        requests = (request, *former)
        outcome, refused = self.claim_once(requests, policy, quota)
        if not isinstance(outcome, InFlight):
            return outcome
        waited = 0.0
        if policy.in_flight == "wait":
            outcome, waited = self._wait(requests, policy, quota, outcome, refused)
        if isinstance(outcome, InFlight):
            self._deps.observers(events.ConflictRefused(request.key.label, request.info.operation, waited=waited))
        return outcome

    def successor(self, claim: Claim) -> Outcome:
        """Return the outcome for a claim that was lost: the stored response, or the state of the key. Never a new claim."""
        record = self._deps.store.read(claim.key)
        match record:
            case Record(fingerprint=other) if other == VOIDED and claim.did_nothing:
                return Voided(first_seen=record.requested_at)
            case Record(fingerprint=other) if other != claim.contexts[0].fingerprint:
                # The store lost this claim, and another request used the key.
                return Unknown(reason="lease-lost")
            case Record(requested_at=first_seen) if record.is_skeleton:
                return Expired(first_seen)
            case Record(state=State.COMPLETED):
                return self._replay(record, claim.key, claim.label)
            case Record(state=State.PROCESSING):
                return InFlight(retry_after=max(record.remaining, 0.0))
            case Record() | None:
                return Unknown(reason="lease-lost")

    def drain(self, timeout: float) -> int:
        """Repeat the writes that the store has not taken, for at most `timeout` seconds. Return how many are left.

        Call it before a process ends, because the writes would end with it. Their leases expire then.
        """
        return self._deps.repeater.drain(timeout)

    def read(self, key: StorageKey) -> Record | None:
        """Read this key's record, to show it to an operator. Raises `CorruptRecord` for an unreadable one."""
        return self._deps.store.read(key)

    def mark_corrupt(self, replay: Replay, *, label: str) -> None:
        """Quarantine the record of a response that an entry point found impossible to send, and publish that."""
        self._deps.observers(events.RecordCorrupt(label, replay.record.info.operation))
        self._mark_corrupt(replay.key, replay.record)

    def claim_once(
        self, requests: Sequence[ClaimRequest], policy: Policy, quota: Quota | None
    ) -> tuple[Outcome, ClaimRequest]:
        """Classify the key once, under every secret in use. Return the outcome and the request that decided it.

        As `claim`, but it neither checks the policy nor waits.
        """
        deps, newest = self._deps, requests[0]
        granted: list[tuple[ClaimRequest, Grant]] = []
        # Downstream keys come from the oldest: see `Claim.oldest_key`.
        token = new_token(requests[-1].key.mark, several=len(requests) > 1)
        requested_at = deps.monotonic()
        for request in reversed(requests):
            limits = quota if request.in_quota else None
            if limits is not None and request.key != newest.key and deps.store.read(newest.key) is not None:
                limits = None  # while secrets rotate: a key that is known under the newest secret is not new under an older one
            try:
                outcome = deps.store.claim(request, token=token, lease=policy.lease, quota=limits)
                if isinstance(outcome, Mismatched) and (formerly := request.as_formerly) is not None:
                    # During a deployment, and for one `keep` after it, the record may be from an earlier release.
                    request = formerly
                    outcome = deps.store.claim(request, token=token, lease=policy.lease, quota=limits)
            except (errors.CorruptRecord, errors.StoreDataLoss) as error:
                # The store has answered, so this key was not granted.
                if granted:
                    Claim(deps, policy, granted, token=token, requested_at=requested_at).release_unstarted()
                label, operation = newest.key.label, request.info.operation
                if isinstance(error, errors.CorruptRecord):
                    deps.observers(events.RecordCorrupt(label, operation))
                    raise
                if error.noticed:
                    deps.observers(events.DataLossDetected(label, operation, loss=error.loss))
                deps.observers(events.RefusedAfterDataLoss(label, operation, loss=error.loss))
                raise
            except BaseException:
                # It may have been granted, and its work will not begin.
                granted.insert(0, (request, _MAYBE_GRANTED))
                Claim(deps, policy, granted, token=token, requested_at=requested_at).release_later()
                raise
            if isinstance(outcome, OtherCaller) and request.callers is not None and request.callers.former:
                continue  # another caller had this name too: its record does not concern this request
            if not isinstance(outcome, Grant):
                if granted:
                    Claim(deps, policy, granted, token=token, requested_at=requested_at).release_unstarted()
                return self._refuse(outcome, request, newest.key.label), request
            granted.insert(0, (request, outcome))
        claim = Claim(deps, policy, granted, token=token, requested_at=requested_at)
        try:
            # Have the data keys at hand before the work, not after it. Not before the claim either: a replay seals nothing.
            for context in claim.contexts:
                deps.codec.prepare(context.key)
        except BaseException as error:
            claim.release_first_attempt()
            if isinstance(error, errors.StoreUnavailable) and not isinstance(error, errors.KeyProviderUnavailable):
                # The store is up: it has just granted the claim.
                raise errors.KeyProviderUnavailable(str(error)) from error
            raise
        # Whatever the policy is: an earlier release of the application may have recorded steps. A first attempt has none.
        declared = policy.steps or policy.dropped_steps
        first = len(granted) == 1 and granted[0][1].attempt == 1
        held = "" if first and not declared else self._begin_steps(claim)
        if held:
            with suppress(errors.LeaseLost):  # another attempt has taken over since, and finds the same
                claim.quarantine(held)
            return Unknown(held), newest
        try:
            deps.observers(events.ClaimGranted(claim.label, claim.operation, fence=claim.fence, attempt=claim.attempt))
            if policy.effects == "transactional" and self.transactions is not None:
                claim.join(self.transactions)
        except BaseException:
            claim.release_unstarted()
            raise
        deps.renewer.add(claim, after=policy.lease / 3)
        return claim, newest

    def _begin_steps(self, claim: Claim) -> str:
        """Read the steps of earlier attempts. Return why the view must not begin: the quarantine reason, or empty."""
        try:
            return claim.begin_steps()
        except errors.CorruptRecord:
            self._deps.observers(events.RecordCorrupt(claim.label, claim.operation))
            claim.quarantine(CORRUPT)
            raise
        except errors.StoreUnavailable as error:
            # The store is up: it has just granted the claim, to a request that may have recorded effects.
            raise errors.ResponseUnavailable(str(error)) from error
        except Exception:
            # Such as a module that an upgrade of this package has taken away.
            claim.release_first_attempt()
            raise

    def _refuse(
        self,
        outcome: Record | Expired | InFlight | Mismatched | OtherCaller | Unknown | OverQuota | Voided,
        request: ClaimRequest,
        label: str,
    ) -> Outcome:
        """Publish why the store granted nothing, and open the response of a completed record."""
        operation = request.info.operation
        match outcome:
            case Record():
                return self._replay(outcome, request.key, label)
            case OtherCaller(first_seen):
                # A caller without a name, and what others had before they had one: there the key is in use.
                self._deps.observers(events.MismatchRefused(label, operation))
                return Mismatched(first_seen)
            case Expired():
                self._deps.observers(events.ExpiredRefused(label, operation))
            case Mismatched():
                self._deps.observers(events.MismatchRefused(label, operation))
            case Unknown(reason):
                if reason == CORRUPT:
                    raise errors.CorruptRecord("the record was quarantined when it could not be read")
                self._deps.observers(events.UnknownRefused(label, operation, reason=reason))
            case Voided():
                self._deps.observers(events.VoidedRefused(label, operation))
            case OverQuota(limit):
                self._deps.observers(events.QuotaRefused(label, operation, limit=limit))
            case InFlight():
                pass  # published when the request has waited
            case unexpected:
                assert_never(unexpected)
        return outcome

    def _replay(self, record: Record, key: StorageKey, label: str) -> Outcome:
        """Open the response of a completed record.

        A response that does not open may differ from the store's: a damaged cache, a response that was sealed again, an
        erased tenant. If the store holds the same one, this quarantines the record: retries do not get it or run again. A
        copy from before the response was sealed again, by a key that has gone since, is not reported as corrupt.
        """
        store = self._deps.store
        try:
            while True:
                try:
                    if record.payload is None:
                        raise errors.CorruptRecord("a completed record has no payload")
                    if record.erased or record.payload.sealed_by == ERASED:
                        break
                    context = SealContext(key, record.token, record.fence, record.fingerprint)
                    return Replay(record, self._deps.codec.open(record.payload, context), key)
                except (errors.CorruptRecord, errors.RingMismatch) as error:
                    fresh = store.read(key)
                    held = fresh is not None and fresh.state is State.COMPLETED and fresh.token == record.token
                    same = fresh if held else None
                    sealed, now = record.payload, None if same is None else same.payload
                    again = sealed is not None and now is not None and sealed.sealed_by != now.sealed_by
                    mismatch = isinstance(error, errors.RingMismatch)
                    if not (mismatch or again):
                        self._deps.observers(events.RecordCorrupt(label, record.info.operation))
                    if same is not None and same.erased:
                        break
                    differs = same is not None and now != sealed
                    if differs or not mismatch:
                        # The store compares the payload. One that is only in a cache is only dropped there.
                        self._mark_corrupt(key, record)
                    if same is None or not differs:
                        raise
                    record = same
        except errors.StoreUnavailable as error:
            # An application that may go on without a store must learn that this was done before.
            raise errors.ResponseUnavailable(str(error)) from error
        self._deps.observers(events.ErasedRefused(label, record.info.operation))
        return Erased()

    def _mark_corrupt(self, key: StorageKey, record: Record) -> None:
        if record.payload is not None:
            self._deps.store.mark_corrupt(key, record.payload)

    def _wait(
        self,
        requests: Sequence[ClaimRequest],
        policy: Policy,
        quota: Quota | None,
        outcome: Outcome,
        refused: ClaimRequest,
    ) -> tuple[Outcome, float]:
        """Look, never write, until the claim has ended or the time is up; then claim as any other request would.

        If the store stops answering, keep polling: the view runs elsewhere, and its response will be there.
        """
        began = self._deps.monotonic()
        newest, lost, failed = requests[0], False, False
        with self._deps.waiters.slot(*(request.key for request in requests)) as ended:
            if ended is None:
                return outcome, 0.0
            poll = waiting.FIRST_POLL_SECONDS
            while (left := began + policy.wait - self._deps.monotonic()) > 0:
                ended.wait(min(poll, left))
                ended.clear()
                poll = waiting.next_poll(poll)
                try:
                    record = self._deps.store.read(refused.key)
                    if record is None and lost:
                        continue
                    others = (
                        record is not None
                        and refused.callers is not None
                        and refused.callers.show(record.info) is False
                    )
                    if record is not None and record.state is State.PROCESSING and record.remaining > 0 and not others:
                        outcome = InFlight(retry_after=record.remaining)
                        continue
                    outcome, refused = self.claim_once(requests, policy, quota)
                except errors.StoreDataLoss:
                    # Its worker may restore the claim. To claim before that would publish the same refusal again.
                    lost = True
                except errors.StoreUnavailable as error:
                    if not failed:
                        event = events.StoreFailed(
                            newest.key.label,
                            newest.info.operation,
                            error=cause_of(error),
                            unprotected=False,
                            waiting=True,
                        )
                        self._deps.observers(event)
                    failed = True
                else:
                    if not isinstance(outcome, InFlight):
                        break
        return outcome, self._deps.monotonic() - began
