"""Asking for a key: what every door calls."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from flask_idempotency.engine.claim import Claim, Held, Surroundings
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.events import (
    ClaimGranted,
    ConflictRefused,
    MismatchRefused,
    RecordCorrupt,
    StoreFailed,
    UnknownRefused,
)
from flask_idempotency.engine.outcome import Claimed, Grant, InFlight, Mismatched, Replayed, Unknown
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.ports import StoreOutcome
from flask_idempotency.engine.record import Record, State
from flask_idempotency.engine.request import ClaimRequest
from flask_idempotency.engine.result import Result

TOKEN_BYTES = 16
_NOTHING = Grant(token=b"", fence=0, attempt=0, lease=0.0)
FIRST_POLL_SECONDS = 0.02
LAST_POLL_SECONDS = 0.5
"""A waiter looks after 20 ms, then ever more rarely: an early herd of pollers costs more than a late answer."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A stored answer and the record that it comes from."""

    record: Record
    result: Result


Outcome: TypeAlias = Claimed[Claim] | Replayed[Replay] | InFlight | Mismatched | Unknown


class Engine:
    """Decides what becomes of a keyed request. Holds no state of any request: two threads share nothing through it."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self.transactions = around.transactions

    def claim(self, request: ClaimRequest, policy: Policy, *, former: Sequence[ClaimRequest] = ()) -> Outcome:
        """Claim the key, waiting for another's answer if the policy says so.

        `former` is the same request under each older secret that is being rotated out, newest first. All are claimed,
        oldest first, so that releases which know only one of the secrets still exclude each other.

        Raises `StoreUnavailable` when nobody can tell, and `CorruptRecord` for a stored answer that cannot be read. In
        neither case may the work be done under this key. Raises `ConfigurationError` for a policy that cannot hold here.
        """
        if policy.effects == "transactional":
            policy.check(joint=self.transactions is not None)
            if self.transactions is not None:
                self.transactions.prepare()
        outcome, refused = self._ask((request, *former), policy)
        if not isinstance(outcome, InFlight):
            return outcome
        waited = 0.0
        if policy.in_flight == "wait":
            outcome, waited = self._wait((request, *former), policy, outcome, refused)
        if isinstance(outcome, InFlight):
            self._around.observers(ConflictRefused(request.key.label, request.about.operation, waited=waited))
        return outcome

    def successor(self, claim: Claim) -> Outcome:
        """What to answer for a claim that was lost: the stored answer, or how the key stands now. Never a new claim."""
        record = self._around.store.read(claim.key)
        match record:
            case Record(fingerprint=other) if other != claim.fingerprint:
                # The store has forgotten this claim, and somebody used the key for another request.
                return Unknown(reason="lease-lost")
            case Record(state=State.COMPLETED):
                return Replayed(self._opened(record, claim.key.label))
            case Record(state=State.PROCESSING):
                return InFlight(retry_after=max(record.remaining, 0.0))
            case Record() | None:
                return Unknown(reason="lease-lost")

    def _ask(self, requests: tuple[ClaimRequest, ...], policy: Policy) -> tuple[Outcome, ClaimRequest]:
        """One classification, under every secret in use, and which of these requests decided it."""
        token = secrets.token_bytes(TOKEN_BYTES)
        asked_at = self._around.monotonic()
        granted: list[Grant] = []
        for asked, request in enumerate(reversed(requests), start=1):
            try:
                outcome = self._around.store.claim(request, token=token, lease=policy.lease)
            except CorruptRecord:
                # It was read, so it was not granted.
                if granted:
                    self._claim(requests[-len(granted) :], _NOTHING, token, policy, asked_at).give_back()
                raise
            except BaseException:
                # It may have been granted all the same, and its work will not be begun.
                self._claim(requests[-asked:], _NOTHING, token, policy, asked_at).abandon()
                raise
            if not isinstance(outcome, Claimed):
                if granted:
                    self._claim(requests[-len(granted) :], _NOTHING, token, policy, asked_at).give_back()
                return self._refusal(outcome, requests[0]), request
            granted.append(outcome.held)
        grant = max(granted, key=lambda grant: grant.fence)
        claim = self._claim(requests, grant, token, policy, asked_at)
        return Claimed(self._won(claim, requests[0], policy)), requests[0]

    def _won(self, claim: Claim, request: ClaimRequest, policy: Policy) -> Claim:
        label, operation = request.key.label, request.about.operation
        self._around.observers(ClaimGranted(label, operation, fence=claim.fence, attempt=claim.attempt))
        if policy.effects == "transactional" and self.transactions is not None:
            try:
                claim.join(self.transactions)
            except BaseException:
                claim.give_back()
                raise
        claim.keep_alive()
        return claim

    def _claim(
        self, requests: tuple[ClaimRequest, ...], grant: Grant, token: bytes, policy: Policy, asked_at: float
    ) -> Claim:
        newest = requests[0]
        held = Held(
            keys=tuple(request.key for request in requests),
            token=token,
            fingerprint=newest.fingerprint,
            policy=policy,
            on_lapse=newest.on_lapse,
            record=newest.key.label,
            operation=newest.about.operation,
        )
        return Claim(held, grant, self._around, asked_at=asked_at)

    def _refusal(self, outcome: StoreOutcome, request: ClaimRequest) -> Outcome:
        label, operation = request.key.label, request.about.operation
        match outcome:
            case Replayed(record):
                return Replayed(self._opened(record, label))
            case Mismatched():
                self._around.observers(MismatchRefused(label, operation))
                return outcome
            case Unknown(reason):
                self._around.observers(UnknownRefused(label, operation, reason=reason))
                return outcome
            case InFlight():
                return outcome
            case Claimed():
                raise AssertionError("a granted claim is no refusal")
            case unexpected:
                assert_never(unexpected)

    def _opened(self, record: Record, label: str) -> Replay:
        try:
            if record.payload is None:
                raise CorruptRecord("a completed record has no payload")
            return Replay(record, self._around.codec.open(record.payload.data))
        except CorruptRecord:
            self._around.observers(RecordCorrupt(label, record.about.operation))
            raise

    def _wait(
        self, requests: tuple[ClaimRequest, ...], policy: Policy, outcome: Outcome, refused: ClaimRequest
    ) -> tuple[Outcome, float]:
        """Look, never write, until the key is settled or the time is up; then ask again, as anybody else would.

        A store that stops answering ends the wait with what was known: the work is being done elsewhere.
        """
        began = self._around.monotonic()
        with self._around.waiting_room.seat(requests[0].key) as settled:
            if settled is None:
                return outcome, 0.0
            poll = FIRST_POLL_SECONDS
            while (left := began + policy.wait - self._around.monotonic()) > 0:
                settled.wait(min(poll, left))
                settled.clear()
                poll = min(poll * random.uniform(1.3, 1.7), LAST_POLL_SECONDS)  # noqa: S311 - spreads a herd, hides nothing
                try:
                    record = self._around.store.read(refused.key)
                    if record is not None and record.state is State.PROCESSING and record.remaining > 0:
                        outcome = InFlight(retry_after=record.remaining)
                        continue
                    outcome, refused = self._ask(requests, policy)
                except StoreUnavailable as error:
                    who = requests[0].key.label, requests[0].about.operation
                    self._around.observers(StoreFailed(*who, error=type(error).__name__, unprotected=False))
                    break
                if not isinstance(outcome, InFlight):
                    break
        return outcome, self._around.monotonic() - began
