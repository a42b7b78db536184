"""Make the claim requests of one use of a key: one under each secret in use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flask_idempotency.engine.keys import Identity, Scope
from flask_idempotency.engine.model import ClaimRequest, RequestInfo
from flask_idempotency.engine.policy import Policy

MESSAGE_MARK: Final = "\0"
"""Precedes the id of a message in the name of its record. No key of an HTTP client has this character, so a message and a
request never share a record, whatever their operations and callers are called."""

BROKER_MARK: Final = "\1"
"""Precedes a `BrokerId` instead."""


class BrokerId(str):
    """The id of a message without one of its sender: a position, or what else the broker knows of it.

    It is a type and no spelling, because a sender may give its message any text as an id.
    """

    __slots__ = ()


def message_key(message_id: str) -> str:
    """Return what takes the place of the client's key in the name of this message's record."""
    return (BROKER_MARK if isinstance(message_id, BrokerId) else MESSAGE_MARK) + message_id


def claim_requests(
    scope: Scope,
    client_key: str,
    identities: Sequence[Identity],
    prints: Sequence[bytes],
    *,
    policy: Policy,
    method: str,
    operation: str,
    hashed: bool,
    timestamp: float | None,
    in_quota: bool = True,
    former_prints: Sequence[bytes] = (),
    trace: str = "",
) -> list[ClaimRequest]:
    """Return one request for each identity, the newest first, with the fingerprint under that identity.

    `former_prints` are the fingerprints that an earlier release would have computed, if they differ.
    `hashed`: the records name the tenant and the principal by a keyed hash under the newest secret.
    """
    tenant = "" if scope.tenant is None else scope.tenant
    principal = "" if scope.principal is None else scope.principal
    if hashed:
        pseudonym = identities[0].pseudonym
        tenant = "" if scope.tenant is None else pseudonym(tenant)
        principal = "" if scope.principal is None else pseudonym(principal)
    info = RequestInfo(tenant, principal, method, operation, trace)
    on_expiry, waited_for = policy.on_expiry, policy.in_flight == "wait"
    requests = []
    for identity, fingerprint, former in zip(identities, prints, former_prints or (None,) * len(prints), strict=True):
        key = identity.storage_key(scope, client_key)
        requests.append(
            ClaimRequest(key, fingerprint, on_expiry, info, waited_for, timestamp, in_quota, former_fingerprint=former)
        )
    return requests
