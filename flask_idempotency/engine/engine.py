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
    UnknownRefused,
)
from flask_idempotency.engine.outcome import Claimed, Grant, InFlight, Mismatched, Replayed, Unknown
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.ports import StoreOutcome
from flask_idempotency.engine.record import Record, State
from flask_idempotency.engine.request import ClaimRequest
from flask_idempotency.engine.result import Result

TOKEN_BYTES = 16
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

    def claim(self, request: ClaimRequest, policy: Policy, *, former: Sequence[ClaimRequest] = ()) -> Outcome:
        """Claim the key, waiting for another's answer if the policy says so.

        `former` is the same request under each older secret that is being rotated out, newest first. All are claimed,
        oldest first, so that releases which know only one of the secrets still exclude each other.

        Raises `StoreUnavailable` when nobody can tell, and `CorruptRecord` for a stored answer that cannot be read. In
        neither case may the work be done under this key.
        """
        outcome = self._ask((request, *former), policy)
        if not isinstance(outcome, InFlight):
            return outcome
        waited = 0.0
        if policy.in_flight == "wait":
            outcome, waited = self._wait((request, *former), policy, outcome)
        if isinstance(outcome, InFlight):
            self._around.observers(ConflictRefused(request.key.label, request.about.operation, waited=waited))
        return outcome

    def successor(self, claim: Claim) -> Outcome:
        """What to answer for a claim that was lost: the stored answer, or how the key stands now. Never a new claim."""
        record = self._around.store.read(claim.key)
        match record:
            case Record(state=State.COMPLETED):
                return Replayed(self._opened(record, claim.key.label))
            case Record(state=State.PROCESSING):
                return InFlight(retry_after=max(record.remaining, 0.0))
            case Record() | None:
                return Unknown(reason="lease-lost")

    def _ask(self, requests: tuple[ClaimRequest, ...], policy: Policy) -> Outcome:
        """One classification, under every secret in use."""
        token = secrets.token_bytes(TOKEN_BYTES)
        asked_at = self._around.monotonic()
        granted: list[Grant] = []
        for request in reversed(requests):
            try:
                outcome = self._around.store.claim(request, token=token, lease=policy.lease)
            except StoreUnavailable:
                self._hand_back(requests, token, policy, asked_at)
                raise
            if not isinstance(outcome, Claimed):
                if granted:
                    self._hand_back(requests, token, policy, asked_at)
                return self._refusal(outcome, requests[0])
            granted.append(outcome.held)
        return Claimed(self._won(requests, granted, token, policy, asked_at))

    def _won(
        self, requests: tuple[ClaimRequest, ...], granted: list[Grant], token: bytes, policy: Policy, asked_at: float
    ) -> Claim:
        grant = max(granted, key=lambda grant: grant.fence)
        held = self._held(requests, token, policy)
        self._around.observers(ClaimGranted(held.record, held.operation, fence=grant.fence, attempt=grant.attempt))
        return Claim(held, grant, self._around, asked_at=asked_at)

    def _hand_back(self, requests: tuple[ClaimRequest, ...], token: bytes, policy: Policy, asked_at: float) -> None:
        """Give back what may have been granted: the work was not begun, and will not be."""
        nothing = Grant(token=token, fence=0, attempt=0, lease=0.0)
        Claim(self._held(requests, token, policy), nothing, self._around, asked_at=asked_at).abandon()

    def _held(self, requests: tuple[ClaimRequest, ...], token: bytes, policy: Policy) -> Held:
        newest = requests[0]
        return Held(
            keys=tuple(request.key for request in requests),
            token=token,
            policy=policy,
            on_lapse=newest.on_lapse,
            record=newest.key.label,
            operation=newest.about.operation,
        )

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

    def _wait(self, requests: tuple[ClaimRequest, ...], policy: Policy, outcome: InFlight) -> tuple[Outcome, float]:
        """Look, never write, until the key is settled or the time is up; then ask again, as anybody else would."""
        began = self._around.monotonic()
        with self._around.waiting_room.seat(requests[0].key) as settled:
            if settled is None:
                return outcome, 0.0
            poll = FIRST_POLL_SECONDS
            while (left := began + policy.wait - self._around.monotonic()) > 0:
                settled.wait(min(poll, left))
                settled.clear()
                poll = min(poll * random.uniform(1.3, 1.7), LAST_POLL_SECONDS)  # noqa: S311 - spreads a herd, hides nothing
                record = self._around.store.read(requests[-1].key)
                if record is not None and record.state is State.PROCESSING and record.remaining > 0:
                    outcome = InFlight(retry_after=record.remaining)
                    continue
                asked = self._ask(requests, policy)
                if not isinstance(asked, InFlight):
                    return asked, self._around.monotonic() - began
                outcome = asked
        return outcome, self._around.monotonic() - began
