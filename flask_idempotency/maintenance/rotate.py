"""Seal stored responses again so that an old key of the ring can go, seal plain ones, and wipe erased ones.

A data key stays while the store holds a response under it, or while a late completion may still arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Final, Protocol

from flask_idempotency.engine.capabilities import (
    PAGE,
    Answer,
    DataKey,
    DataKeys,
    Recovery,
    Responses,
    SeenRecord,
    every,
)
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, DataKeyMissing, KeyProviderUnavailable
from flask_idempotency.engine.journal import Journals, StepAnswer
from flask_idempotency.engine.keys import successor
from flask_idempotency.engine.model import ERASED, Record, RequestInfo, State, StoredPayload
from flask_idempotency.engine.store import Codec, SealContext
from flask_idempotency.maintenance.janitor import Batcher, BatchResult

# Wipe: leave no readable response of an erased tenant.


@dataclass(frozen=True, slots=True)
class WipeReport:
    """The result of one run of `wipe`. Run it again if you like: it passes over wiped responses."""

    wiped: int = 0
    """Only the fact that the work was done is left of these."""
    passed_over: int = 0
    """Changed or removed by another process during the run, or wiped before."""
    shrunk: int = 0
    finished: bool = True


def wiped(payload: StoredPayload) -> StoredPayload:
    """Return what is left of a wiped response: its status and its size."""
    return replace(payload, data=b"", sealed_by=ERASED)


def wipe(
    responses: Responses,
    tids: Sequence[bytes],
    *,
    drain: Batcher,
    on_progress: Callable[[int], object] = lambda wiped: None,
) -> WipeReport:
    """Wipe every erased response of this tenant, sealed or plain. `tids` are the ids of all its parts.

    Leave a response alone whose key was first used after the erasure. `on_progress` gets the number wiped so far: what was done
    until an error stays done. Raises `StoreUnavailable` if the store does not answer.
    """
    counts: Counter[str] = Counter()
    tenants, cursor = list(tids), b""

    def step(limit: int) -> BatchResult:
        nonlocal cursor
        page = responses.scan(after=cursor, limit=limit, tid=tenants[0])
        for answer in page.answers:
            payload = answer.record.payload
            if payload is None or not answer.record.erased:
                continue
            done = payload.sealed_by != ERASED and responses.replace(answer.key, payload, wiped(payload))
            counts["wiped" if done else "passed_over"] += 1
            on_progress(counts["wiped"])
        cursor = page.after or b""
        if page.after is None:
            tenants.pop(0)
        return BatchResult(len(page.answers), more=bool(tenants))

    drained = drain.run(step)
    return WipeReport(**counts, shrunk=drained.shrunk, finished=drained.finished)


def wipe_steps(
    journals: Journals,
    tids: Sequence[bytes],
    *,
    on_progress: Callable[[int], object] = lambda wiped: None,
) -> int:
    """Wipe the erased results of steps of this tenant. Return how many.

    The requests that need them are quarantined and never run them again. `on_progress` is as for `wipe`.
    """
    count = 0
    for tid in tids:
        after: bytes | None = b""
        while after is not None:
            page = journals.walk(after=after, limit=PAGE, tid=tid)
            for answer in page.answers:
                payload = answer.entry.payload
                if payload is not None and answer.erased and payload.sealed_by != ERASED:
                    count += journals.replace(answer.key, answer.entry.id, payload, wiped(payload))
                    on_progress(count)
            after = page.after
    return count


def wipe_condemned(
    recovery: Recovery,
    tids: Sequence[bytes],
    *,
    keep_of: Callable[[RequestInfo], float],
    on_progress: Callable[[int], object] = lambda wiped: None,
) -> int:
    """Wipe this tenant's quarantined responses, which no worker could open. Return how many.

    Their work was done, so each is completed again without a response, and expires after its endpoint's `keep`.
    `on_progress` is as for `wipe`.
    """
    count = 0
    for found in every(recovery, State.QUARANTINED, tids=tids):
        payload = found.record.payload
        if payload is not None:
            keep = keep_of(found.record.info)
            count += recovery.resolve(found, token=successor(found.record.token), payload=wiped(payload), keep=keep)
            on_progress(count)
    return count


def still_open(recovery: Recovery, tids: Sequence[bytes]) -> int:
    """Return how many uses of keys have no response yet, and may get one from a late worker."""
    tokens = {
        found.record.token
        for state in (State.PROCESSING, State.QUARANTINED)
        for found in every(recovery, state, tids=tids)
        if found.record.payload is None
    }
    return len(tokens)


# Rotate and seal.

GRACE_SECONDS: Final = 300.0
"""How long a disabled data key stays at least: longer than a completion that began before takes to arrive."""

MOST_BLOCKED: Final = 20
"""Tenants in a row with unusable data keys, and no response sealed: this is an outage and no damage."""


class Sealed(Protocol):
    """The keys of a ring by their ids, and the one that seals new responses."""

    @property
    def newest(self) -> str: ...

    def kids(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class RotateReport:
    """The result of one run of `rotate`. Remove an old key of the ring when `keys status` finds no use of it."""

    resealed: int = 0
    wiped: int = 0
    """Erased before; now only the fact that the work was done is left."""
    passed_over: int = 0
    """Changed or removed by another process during the run, or wiped before."""
    plain: int = 0
    """Plain responses, which stay as they are: see `seal_plain`."""
    unreadable: int = 0
    """Responses that cannot be opened, so they stay as they are. A retry quarantines their keys."""
    blocked: int = 0
    """Responses of tenants with unusable data keys, which stay as they are. See `keys status` and the log."""
    closed: int = 0
    """Data keys that seal no new response from now on."""
    retired: int = 0
    """Data keys that were deleted: no stored response used them."""
    shrunk: int = 0
    finished: bool = True
    """False: the budget ended first. The next run starts from the beginning, and finds fewer."""

    @property
    def done(self) -> bool:
        """Return True if every response that can be opened is sealed under the newest key."""
        return self.finished and self.resealed == self.wiped == self.closed == 0


@dataclass(frozen=True, slots=True)
class SealReport:
    """The result of one run of `seal_plain`."""

    sealed: int = 0
    passed_over: int = 0
    """Erased, or changed or removed by another process during the run."""
    unreadable: int = 0
    """Damaged, or the codec opens no plain response: they stay as they are."""
    blocked: int = 0
    """The data keys of their tenants cannot be used: they stay as they are."""

    @property
    def done(self) -> bool:
        """Return True if no plain response of this application is left that could be sealed."""
        return self.unreadable == self.blocked == 0


class _Outcome(Enum):
    RESEALED = "resealed"
    WIPED = "wiped"
    PASSED_OVER = "passed_over"
    PLAIN = "plain"
    UNREADABLE = "unreadable"
    BLOCKED = "blocked"


_IN_CLEAR: Final = (
    "Encryption is off: this would store sealed responses in clear. Set IDEMPOTENCY_ENCRYPTION to on. No record was "
    "changed."
)


def rotate(
    responses: Responses,
    data_keys: DataKeys,
    codec: Codec,
    ring: Sealed,
    *,
    drain: Batcher,
    recovery: Recovery | None = None,
    journals: Journals | None = None,
    owner: bytes = b"",
    grace: float = GRACE_SECONDS,
) -> RotateReport:
    """Seal every response again that an old key of the ring protects, and wipe erased ones.

    Leave plain responses plain and count them: anyone who can write to the store may have planted one, and a seal would
    make it genuine.

    Requests go on during the run: they open every response, before and after, and each keeps its expiry. A worker that
    completes under an old key seals with a new one. Run this again after `grace` seconds to delete data keys that no
    response needs. Unusable data keys of one tenant do not stop the others.

    `recovery` finds the quarantined responses that no worker could open: their data keys stay. `journals` has the results of
    steps, which are sealed again too, also those of quarantined requests. The counts include them. `owner` is the prefix of
    this application's tokens. Responses of other applications in the store stay alone, because those may have another ring
    or none; so do data keys of a foreign ring while a response needs them.

    Raises `StoreUnavailable` if the store does not answer; what was done until then stays. Raises `ConfigurationError` if
    the codec does not encrypt: it would store sealed responses in clear.
    """
    newest = ring.newest
    old = data_keys.wrapped_by_other(newest)
    counts: Counter[str] = Counter()

    def disable(tid: bytes, key: DataKey) -> None:
        if key.closed_for is None:
            data_keys.disable(tid, key.number)
            counts["closed"] += 1

    for tid, key in old:
        if key.kid in ring.kids():
            disable(tid, key)
    used: set[tuple[bytes, int]] = set()
    blocked: set[bytes] = set()
    cursor: bytes | None = b""

    def step(limit: int) -> BatchResult:
        nonlocal cursor
        page = responses.scan(after=cursor or b"", limit=limit, other_than=newest)
        for answer in page.answers:
            if not answer.record.token.startswith(owner):
                used.update(_used_by(answer))
                continue
            outcome = _plain(answer) or _reseal_unless_blocked(answer, responses, codec, blocked, counts)
            counts[outcome.value] += 1
            if outcome not in (_Outcome.RESEALED, _Outcome.WIPED):
                used.update(_used_by(answer))
        cursor = page.after
        return BatchResult(len(page.answers), more=cursor is not None)

    def step_results(known: Journals, limit: int) -> BatchResult:
        nonlocal cursor
        page = known.walk(after=cursor or b"", limit=limit, other_than=newest)
        for answer in page.answers:
            payload = answer.entry.payload
            if payload is None:
                continue
            if not answer.token.startswith(owner):
                used.update(_step_uses(answer))
                continue
            outcome = _reseal_step_unless_blocked(answer, known, codec, blocked, counts)
            counts[outcome.value] += 1
            if outcome not in (_Outcome.RESEALED, _Outcome.WIPED):
                used.update(_step_uses(answer))
        cursor = page.after
        return BatchResult(len(page.answers), more=cursor is not None)

    began = drain.monotonic()
    drained = drain.run(step)
    if drained.finished and journals is not None:
        cursor, first = b"", drained
        drained = drain.rest(first, began=began).run(partial(step_results, journals))
        drained = replace(drained, shrunk=drained.shrunk + first.shrunk)
    if drained.finished:
        if recovery is not None:
            for quarantined in every(recovery, State.QUARANTINED):
                used.update(_used_by(quarantined))
        for tid, key in old:
            if (tid, key.number) in used:
                continue
            if key.closed_for is not None and key.closed_for >= grace:
                data_keys.delete(tid, key.number)
                counts["retired"] += 1
            if key.kid not in ring.kids():
                # Its ring is foreign or gone. A process that still seals with it makes another data key.
                disable(tid, key)
    return RotateReport(**counts, shrunk=drained.shrunk, finished=drained.finished)


def seal_plain(
    responses: Responses,
    codec: Codec,
    ring: Sealed,
    *,
    drain: Batcher,
    owner: bytes = b"",
    on_progress: Callable[[int], object] = lambda sealed: None,
) -> SealReport:
    """Seal the responses that this application stored before you switched encryption on.

    Only an operator calls this: the store cannot tell such a response from a planted one, and a sealed response counts as
    genuine. A codec that opens no plain response (`required`) seals none here either. `on_progress` gets the number
    sealed after each one. `owner` is as for `rotate`. Safe to run again.

    Raises `StoreUnavailable` if the store does not answer; what was sealed until then stays sealed. Raises
    `ConfigurationError` if the codec does not encrypt.
    """
    newest = ring.newest
    counts: Counter[str] = Counter()
    blocked: set[bytes] = set()
    cursor: bytes | None = b""

    def step(limit: int) -> BatchResult:
        nonlocal cursor
        page = responses.scan(after=cursor or b"", limit=limit, other_than=newest)
        for answer in page.answers:
            payload = answer.record.payload
            if payload is None or payload.sealed_by is not None or not answer.record.token.startswith(owner):
                continue
            if answer.record.erased:
                counts["passed_over"] += 1
                continue
            outcome = _reseal_unless_blocked(answer, responses, codec, blocked, counts)
            counts[outcome.value] += 1
            if outcome is _Outcome.RESEALED:
                on_progress(counts[outcome.value])
        cursor = page.after
        return BatchResult(len(page.answers), more=cursor is not None)

    drain.run(step)
    return SealReport(counts["resealed"], counts["passed_over"], counts["unreadable"], counts["blocked"])


def _plain(answer: Answer) -> _Outcome | None:
    payload = answer.record.payload
    return _Outcome.PLAIN if payload is not None and payload.sealed_by is None and not answer.record.erased else None


def _reseal_unless_blocked(
    answer: Answer, responses: Responses, codec: Codec, blocked: set[bytes], counts: Counter[str]
) -> _Outcome:
    # Try each tenant once: neither its damage nor an outage of the key service ends soon.
    outcome = _Outcome.BLOCKED if answer.key.tid in blocked else _reseal(answer, responses, codec)
    if outcome is _Outcome.BLOCKED:
        blocked.add(answer.key.tid)
        _check_service(blocked, counts)
    return outcome


def _check_service(blocked: set[bytes], counts: Counter[str]) -> None:
    if len(blocked) >= MOST_BLOCKED and counts["resealed"] == 0:
        raise KeyProviderUnavailable(
            f"The data keys of {MOST_BLOCKED} tenants cannot be used: see whether the key service is away."
        )


def _reseal(answer: Answer, responses: Responses, codec: Codec) -> _Outcome:
    record, payload = answer.record, answer.record.payload
    if payload is None or payload.sealed_by == ERASED:
        return _Outcome.PASSED_OVER
    if record.erased:
        return _Outcome.WIPED if responses.replace(answer.key, payload, wiped(payload)) else _Outcome.PASSED_OVER
    context = _seal_context(answer)
    try:
        result = codec.open(payload, context)
    except CorruptRecord:
        return _Outcome.UNREADABLE
    except KeyProviderUnavailable:
        return _Outcome.BLOCKED
    for _ in range(2):
        try:
            resealed = codec.seal(result, context)
            if resealed.sealed_by is None:
                raise ConfigurationError(_IN_CLEAR)
            return _Outcome.RESEALED if responses.replace(answer.key, payload, resealed) else _Outcome.PASSED_OVER
        except DataKeyMissing:
            codec.forget(answer.key)
        except KeyProviderUnavailable:
            return _Outcome.BLOCKED
    return _Outcome.PASSED_OVER


def _reseal_step_unless_blocked(
    answer: StepAnswer, journals: Journals, codec: Codec, blocked: set[bytes], counts: Counter[str]
) -> _Outcome:
    payload = answer.entry.payload
    if payload is not None and payload.sealed_by is None and not answer.erased:
        return _Outcome.PLAIN
    outcome = _Outcome.BLOCKED if answer.key.tid in blocked else _reseal_step(answer, journals, codec)
    if outcome is _Outcome.BLOCKED:
        blocked.add(answer.key.tid)
        _check_service(blocked, counts)
    return outcome


def _reseal_step(answer: StepAnswer, journals: Journals, codec: Codec) -> _Outcome:
    entry, payload = answer.entry, answer.entry.payload
    if payload is None or payload.sealed_by == ERASED:
        return _Outcome.PASSED_OVER
    if answer.erased:
        replaced = journals.replace(answer.key, entry.id, payload, wiped(payload))
        return _Outcome.WIPED if replaced else _Outcome.PASSED_OVER
    context = entry.context(answer.key, answer.fingerprint)
    try:
        item, result = codec.steps.open(payload, context)
    except CorruptRecord:
        return _Outcome.UNREADABLE
    except KeyProviderUnavailable:
        return _Outcome.BLOCKED
    for _ in range(2):
        try:
            sealed = codec.steps.seal(item, result, context)
            if sealed.sealed_by is None:
                raise ConfigurationError(_IN_CLEAR)
            replaced = journals.replace(answer.key, entry.id, payload, sealed)
            return _Outcome.RESEALED if replaced else _Outcome.PASSED_OVER
        except DataKeyMissing:
            codec.forget(answer.key)
        except KeyProviderUnavailable:
            return _Outcome.BLOCKED
    return _Outcome.PASSED_OVER


def _step_uses(answer: StepAnswer) -> set[tuple[bytes, int]]:
    payload = answer.entry.payload
    return set() if payload is None or payload.sealed_by is None else {(answer.key.tid, payload.sealed_by.number)}


def _seal_context(answer: Answer) -> SealContext:
    record: Record = answer.record
    return SealContext(answer.key, record.token, record.fence, record.fingerprint)


def _used_by(answer: Answer | SeenRecord) -> set[tuple[bytes, int]]:
    payload = answer.record.payload
    return set() if payload is None or payload.sealed_by is None else {(answer.key.tid, payload.sealed_by.number)}
