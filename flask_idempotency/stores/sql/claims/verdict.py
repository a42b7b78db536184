"""What a claim is told, given the row that is there: the same for every strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.model import (
    Claimed,
    ClaimRequest,
    Grant,
    InFlight,
    Mismatched,
    OnLapse,
    Replayed,
    Unknown,
)
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import StoreOutcome
from flask_idempotency.stores.sql.limits import is_narrow, within
from flask_idempotency.stores.sql.rows import Row, escape, unescape
from flask_idempotency.stores.sql.schema import COMPLETED, FAILED, QUARANTINE, QUARANTINED, RELEASED, TAKEOVER

RETRY_SECONDS = 1.0
"""What a claim is told that could not see to the end who holds the key: whoever does is at it this very moment."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A claim as statements need it."""

    request: ClaimRequest
    token: bytes
    lease: int
    parameters: dict[str, Any]
    quota: Quota | None = None

    @property
    def must_wait(self) -> bool:
        """Whether no new key can be granted from afar: some limit is no higher than the margin below it."""
        return self.quota is not None and self.parameters["my_margin"] > 0 and is_narrow(self.quota)

    def closely(self) -> Asked:
        """The same, under the tenant's lock."""
        return replace(self, parameters={**self.parameters, "my_margin": 0})

    def granted(self, fence: int, *, attempt: int) -> Claimed[Grant]:
        return Claimed(Grant(self.token, fence, attempt, self.lease / 1_000_000))


class Move(Enum):
    """What has to be written before there is an answer."""

    RECLAIM = "reclaim"
    TAKE_OVER = "take over"
    QUARANTINE = "quarantine"


def ask(request: ClaimRequest, token: bytes, *, lease: int, now: int | None, quota: Quota | None = None) -> Asked:
    about = request.about
    parameters = {
        "my_record_id": request.key.rid,
        "my_tenant_id": request.key.tid,
        "my_token": token,
        "my_fingerprint": request.fingerprint,
        "my_on_expiry": TAKEOVER if request.on_lapse is OnLapse.TAKEOVER else QUARANTINE,
        "my_tenant": escape(about.tenant),
        "my_principal": escape(about.principal),
        "my_method": escape(about.method),
        "my_endpoint": escape(about.operation),
        "my_in_quota": 0 if quota is None else 1,
        "lease": lease,
        "now": now,
        **({} if quota is None else within(request.key, quota)),
    }
    return Asked(request, token, lease, parameters, quota)


def judge(row: Row, asked: Asked) -> StoreOutcome | Move:
    """In the order that `Store.claim` promises, by the row and the time it was read at."""
    if row.absent:
        if row.token == asked.token and row.state == RELEASED:
            raise StoreUnavailable("this claim came after it was given up")
        return Move.RECLAIM
    if row.fingerprint != asked.request.fingerprint:
        return Mismatched(first_seen=row.requested_at / 1_000_000)
    if row.state in (COMPLETED, FAILED):
        return Replayed(row.record())
    if row.state == QUARANTINED:
        return Unknown(unescape(row.reason or ""))
    if row.token == asked.token:
        return Claimed(Grant(row.token, row.fence, row.attempt, max(row.left, 0) / 1_000_000))
    if not row.lapsed:
        return InFlight(retry_after=row.left / 1_000_000)
    return Move.TAKE_OVER if row.on_expiry == TAKEOVER else Move.QUARANTINE
