"""Tell what a claim of a key would find, and void a key that no request has used.

Few applications ask: those with a status view, and operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from flask_idempotency.engine import errors, events, waiting
from flask_idempotency.engine.keys import StorageKey, new_token
from flask_idempotency.engine.model import (
    VOIDED,
    ClaimRequest,
    OnExpiry,
    OtherCaller,
    OverQuota,
    Record,
    SeenRecord,
    State,
    Voided,
)
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.values import valueclass

if TYPE_CHECKING:
    from flask_idempotency.engine.capabilities import Void
    from flask_idempotency.engine.claim import Dependencies
    from flask_idempotency.engine.engine import Engine
    from flask_idempotency.engine.quota import Quota


@valueclass(frozen=True, slots=True)
class KeyStatus:
    """What a claim of a key would find: no record (`absent`), or this one.

    `of-other`: another caller's, so that a claim is `Mismatched`.
    `expired`: the request completed, and only that is remembered, so that a claim is `Expired`.
    `paused`: the lease has expired, and a claim takes over. `outcome-unknown`: it is quarantined, or the next claim or the
    janitor quarantines it. `voided`: no request runs under it.
    """

    state: Literal["absent", "in-flight", "paused", "outcome-unknown", "done", "expired", "voided", "of-other"]
    key: StorageKey | None = None
    """The key of the record: while secrets rotate, it may be an older one."""
    record: Record | None = None
    waited: bool = False
    """Whether this call had a slot to wait in."""
    shown: bool = True
    """Whether the record shows the caller: see `Callers`."""


def status_of(engine: Engine, requests: Sequence[ClaimRequest], *, wait: float = 0.0) -> KeyStatus:
    """Return what a claim of this key would find. Never writes.

    `requests` are as `claim` takes them, one under each secret in use, the newest first; their fingerprints do not count.
    While the key is in flight, wait for up to this many seconds, if a slot is free that requests do not need. It does not
    wait for a record that does not show its caller: how long that takes must not tell what another one does.

    Raises `StoreUnavailable`, and `CorruptRecord` for an unreadable record. Raises `StoreDataLoss` wherever a claim would:
    a store that forgot the key must not call it absent.
    """
    deps = engine._deps
    found = _look(deps, requests)
    if found.state != "in-flight" or not found.shown or wait <= 0:
        return found
    began, poll = deps.monotonic(), waiting.FIRST_POLL_SECONDS
    failed: errors.StoreUnavailable | None = None
    with deps.waiters.slot(*(request.key for request in requests), status=True) as ended:
        if ended is None:
            return found
        while (left := began + wait - deps.monotonic()) > 0:
            ended.wait(min(poll, left))
            ended.clear()
            poll = waiting.next_poll(poll)
            try:
                found, failed = _look(deps, requests), None
            except errors.StoreUnavailable as error:
                # The view runs elsewhere, and the store may be back before the time is up.
                failed = error
                continue
            if found.state != "in-flight":
                break
    if failed is not None:
        raise failed
    return replace(found, waited=True)


def void_key(
    engine: Engine,
    requests: Sequence[ClaimRequest],
    policy: Policy,
    *,
    quota: Quota | None = None,
    actor: str = "client",
    reason: str = "",
) -> KeyStatus | OverQuota:
    """Void a key that no request has used, so that none ever runs under it. Return its status then: `voided`.

    `requests` are those of `status_of`. What a request did, or may still do, is never voided: then the status says how the
    key stands, and nothing was changed. A request whose worker vanished counts as one that did nothing if the policy and the
    store prove that: see `Policy.shows_effects`. `actor` and `reason` are for the event.

    Raises what `status_of` raises, and `ConfigurationError` if the store cannot void keys.
    """
    deps, newest = engine._deps, requests[0]
    if deps.void is None:
        raise errors.ConfigurationError("void=True needs a store that can void keys, and this one has no `void`.")
    found = _look(deps, requests)
    if found.state == "voided":
        return found
    if quota is not None:
        # A voided key is nothing in flight, and what is in flight may be why its client gives up.
        quota = replace(quota, in_flight=None)
    # Other requests may use the key, or give it up, between two of these calls.
    for _ in range(3 * len(requests)):
        if found.state == "paused":
            if not _give_up(deps, found, newest, policy):
                return found
            quota = None  # the record that was freed counted
        elif found.state not in ("absent", "voided"):
            return found
        hindrance = _void_once(deps, deps.void, requests, policy, quota)
        if isinstance(hindrance, OverQuota):
            return hindrance
        if hindrance is None:
            deps.observers(events.KeyVoided(newest.key.label, newest.info.operation, actor=actor, reason=reason))
            return _look(deps, requests)
        found = hindrance
    raise errors.StoreUnavailable("other requests kept using this key while it was voided")


def _void_once(
    deps: Dependencies, void: Void, requests: Sequence[ClaimRequest], policy: Policy, quota: Quota | None
) -> KeyStatus | OverQuota | None:
    """Void the key under every secret in use, in the order in which a claim visits them. None: it is voided.

    A host that knows only one of the secrets may use the key under that one in between. Then nothing of this stays.
    """
    token = new_token(requests[-1].key.mark, several=len(requests) > 1)
    voided: list[StorageKey] = []
    try:
        for request in reversed(requests):
            asked = replace(request, fingerprint=VOIDED, former_fingerprint=None, notify_on_completion=False)
            outcome = void(asked, token=token, keep=policy.lifetime, quota=quota if request.in_quota else None)
            former = request.callers is not None and request.callers.former
            if isinstance(outcome, Voided):
                voided.append(request.key)
            elif not (former and isinstance(outcome, OtherCaller)):
                _undo_voids(deps, voided, token)
                if isinstance(outcome, OverQuota):
                    return outcome
                return _status_under(deps, request)
    except Exception:
        with suppress(errors.StoreUnavailable, errors.CorruptRecord):
            _undo_voids(deps, voided, token)
        raise
    return None


def _undo_voids(deps: Dependencies, keys: Sequence[StorageKey], token: bytes) -> None:
    """Free what this token has voided: the key is not voided under all its names."""
    recovery = deps.recovery
    for key in keys:
        record = deps.store.read(key)
        if recovery is not None and record is not None and record.token == token:
            recovery.force_release(SeenRecord(key, record))


def _give_up(deps: Dependencies, found: KeyStatus, request: ClaimRequest, policy: Policy) -> bool:
    """Free the key of a request whose worker vanished, if it cannot have had an effect, and will not have one.

    Its worker may be slow, and not gone. It learns that it lost its claim before its next effect.
    """
    key, record = found.key, found.record
    if deps.recovery is None or key is None or record is None or not policy.shows_effects:
        return False
    if (record.info.method, record.info.operation) != (request.info.method, request.info.operation):
        return False  # another policy says what its effects are
    if deps.journals is not None and any(entry.has_effect for entry in deps.journals.read(key).entries):
        return False
    # If the record has changed since, it is not freed: a step that begins renews the lease, and the point of no return
    # changes its rule.
    return deps.recovery.force_release(SeenRecord(key, record))


def _look(deps: Dependencies, requests: Sequence[ClaimRequest]) -> KeyStatus:
    """Read the key once, in the order in which a claim visits the secrets. The first that refuses a claim decides.

    It is voided if it is so under each of them: a host that knows one of the others would run the request.
    """
    status, voided, absent = KeyStatus("absent"), None, False
    for request in reversed(requests):
        found = _status_under(deps, request)
        if found.state == "paused":
            status = found
        elif found.state == "voided":
            voided = found
        elif found.state != "absent":
            return found
        elif found.record is None:
            absent = True
    return voided if voided is not None and status.state == "absent" and not absent else status


def _status_under(deps: Dependencies, request: ClaimRequest) -> KeyStatus:
    key, callers, made_at = request.key, request.callers, request.key_timestamp
    record, detector = deps.store.read(key), deps.data_loss
    shown = record is None or callers is None or callers.show(record.info)
    if shown is False and callers is not None and callers.former:
        return KeyStatus("absent", key, record)  # of another caller, which does not concern this one
    if shown is False:
        return KeyStatus("of-other", key, record)
    match record:
        case None:
            if detector is not None:
                detector.would_run(key, key_timestamp=made_at)
            return KeyStatus("absent")
        case Record(state=State.COMPLETED):
            if record.payload is None:
                raise errors.CorruptRecord("a completed record has no payload")
            if record.fingerprint == VOIDED:
                return KeyStatus("voided", key, record)
            return KeyStatus("expired" if record.is_skeleton else "done", key, record)
        case Record(state=State.QUARANTINED):
            return KeyStatus("outcome-unknown", key, record)
        case Record() if record.remaining > 0:
            return KeyStatus("in-flight", key, record, shown=shown is True)
    if shown is None:
        return KeyStatus("outcome-unknown", key, record)
    taken_over = record.on_expiry is OnExpiry.TAKEOVER and (
        detector is None or detector.would_run(key, key_timestamp=made_at, record=record)
    )
    return KeyStatus("paused" if taken_over else "outcome-unknown", key, record)
