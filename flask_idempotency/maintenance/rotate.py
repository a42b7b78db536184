"""Sealing answers anew, so that an old key of the ring may go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Protocol

from flask_idempotency.engine.capabilities import Answer, DataKey, DataKeys, Recovery, Responses, SeenRecord, every
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, DataKeyMissing, KeyProviderUnavailable
from flask_idempotency.engine.keys import successor
from flask_idempotency.engine.model import ERASED, Record, RequestInfo, State, StoredPayload
from flask_idempotency.engine.store import Codec, SealContext
from flask_idempotency.maintenance.janitor import Batcher, BatchResult

# Leaving nothing readable of a tenant's answers, once they are erased.


@dataclass(frozen=True, slots=True)
class WipeReport:
    """What one run has done. It may be run again: what is wiped is passed over."""

    wiped: int = 0
    """There is nothing left of these but that the work was done."""
    passed_over: int = 0
    """Changed or removed by somebody else meanwhile, or wiped already."""
    shrunk: int = 0
    finished: bool = True


def wiped(payload: StoredPayload) -> StoredPayload:
    """What is left of an answer that is wiped: its status and its size."""
    return replace(payload, data=b"", sealed_by=ERASED)


def wipe(
    answers: Responses, tids: Sequence[bytes], *, drain: Batcher, told: Callable[[int], object] = lambda wiped: None
) -> WipeReport:
    """Wipe every answer of this tenant that is erased, sealed or plain; `tids` are all that stands for it.

    What was first used after the tenant was erased is left alone. `told` hears how many are wiped so far, for what was done
    until an error stays done. Raises `StoreUnavailable` when the store does not answer.
    """
    counts: Counter[str] = Counter()
    tenants, cursor = list(tids), b""

    def step(limit: int) -> BatchResult:
        nonlocal cursor
        page = answers.scan(after=cursor, limit=limit, tid=tenants[0])
        for answer in page.answers:
            payload = answer.record.payload
            if payload is None or not answer.record.erased:
                continue
            done = payload.sealed_by != ERASED and answers.replace(answer.key, payload, wiped(payload))
            counts["wiped" if done else "passed_over"] += 1
            told(counts["wiped"])
        cursor = page.after or b""
        if page.after is None:
            tenants.pop(0)
        return BatchResult(len(page.answers), more=bool(tenants))

    drained = drain.run(step)
    return WipeReport(**counts, shrunk=drained.shrunk, finished=drained.finished)


def wipe_condemned(unsettled: Recovery, tids: Sequence[bytes], *, keep_of: Callable[[RequestInfo], float]) -> int:
    """Wipe this tenant's answers that nobody could open, and that are quarantined for it. Returns how many.

    Their work was done, so each is completed again, without an answer, and ends after its endpoint's `keep`.
    """
    count = 0
    for found in every(unsettled, State.QUARANTINED, tids=tids):
        payload = found.record.payload
        if payload is not None:
            keep = keep_of(found.record.info)
            count += unsettled.resolve(found, token=successor(found.record.token), payload=wiped(payload), keep=keep)
    return count


def still_open(unsettled: Recovery, tids: Sequence[bytes]) -> int:
    """Uses of keys that have no answer yet, and may be given one by an owner that is late."""
    tokens = {
        found.record.token
        for state in (State.PROCESSING, State.QUARANTINED)
        for found in every(unsettled, state, tids=tids)
        if found.record.payload is None
    }
    return len(tokens)


GRACE_SECONDS: Final = 300.0
"""How long a closed key stays at least: longer than any completion is on its way that began before it was closed."""


MOST_BLOCKED: Final = 20
"""Tenants one after the other whose data keys cannot be used, and nothing sealed: that is no damage but an outage."""


class Sealed(Protocol):
    """The keys of a ring by their ids, and the one that new answers are sealed under."""

    @property
    def newest(self) -> str: ...

    def kids(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class RotateReport:
    """What one run has done. An old key of the ring may go when `keys status` finds nothing under it any more."""

    resealed: int = 0
    wiped: int = 0
    """Erased before, and now there is nothing left of them but that the work was done."""
    passed_over: int = 0
    """Changed or removed by somebody else meanwhile, or wiped already: nothing to do."""
    plain: int = 0
    """Not encrypted, so they stay as they are: see `seal_plain`."""
    unreadable: int = 0
    """Cannot be opened, so they stay as they are. A retry of their keys quarantines them."""
    blocked: int = 0
    """Of tenants whose data keys cannot be used: they stay as they are. `keys status` and the log say more."""
    closed: int = 0
    """Data keys that seal no more from now on."""
    retired: int = 0
    """Data keys that are gone: nothing was sealed with them any more."""
    shrunk: int = 0
    finished: bool = True
    """False: the budget ended before all answers were looked at. The next run begins anew, and finds fewer."""

    @property
    def done(self) -> bool:
        """Whether everything that can be opened is sealed under the newest key."""
        return self.finished and self.resealed == self.wiped == self.closed == 0


@dataclass(frozen=True, slots=True)
class SealReport:
    """Counts of one run of `seal_plain`."""

    sealed: int = 0
    passed_over: int = 0
    """Erased, or changed or removed by another process in the meantime."""
    unreadable: int = 0
    """Damaged, or the codec opens no plain answer: they stay as they are."""
    blocked: int = 0
    """The data keys of their tenants cannot be used: they stay as they are."""

    @property
    def done(self) -> bool:
        """Return True if no plain answer of this application is left that could be sealed."""
        return self.unreadable == self.blocked == 0


class _Outcome(Enum):
    RESEALED = "resealed"
    WIPED = "wiped"
    PASSED_OVER = "passed_over"
    PLAIN = "plain"
    UNREADABLE = "unreadable"
    BLOCKED = "blocked"


def rotate(
    answers: Responses,
    data_keys: DataKeys,
    codec: Codec,
    ring: Sealed,
    *,
    drain: Batcher,
    unsettled: Recovery | None = None,
    owner: bytes = b"",
    grace: float = GRACE_SECONDS,
) -> RotateReport:
    """Seal every answer anew that is sealed under another key of the ring than the newest; and wipe erased ones.

    Plain answers are counted and stay plain: anyone who can write to the store may have planted them, and a seal would
    make them genuine.

    Requests go on meanwhile and find every answer, sealed in the old way or in the new one; each keeps its expiry. What is
    completed under an old key from now on is sealed with a new one by whoever completes it. Run it once more after `grace`
    seconds, and it retires the data keys that are needed no more.

    A tenant whose data keys cannot be used keeps nobody else's answers from being sealed.

    `unsettled`: where those answers are that nobody could open so far: their data keys stay, or nobody ever will.

    `owner`: what the tokens of this application's claims begin with. Another one's answers in the same store are left
    alone, for it may have no ring, or another; and so are data keys of a ring that is not ours while anything needs them.

    Raises `StoreUnavailable` when the store does not answer; what was done until then stays. Raises `ConfigurationError`
    when the codec does not encrypt: it would store in clear what is sealed.
    """
    newest = ring.newest
    old = data_keys.wrapped_by_other(newest)
    counts: Counter[str] = Counter()

    def close(tid: bytes, key: DataKey) -> None:
        if key.closed_for is None:
            data_keys.disable(tid, key.number)
            counts["closed"] += 1

    for tid, key in old:
        if key.kid in ring.kids():
            close(tid, key)
    used: set[tuple[bytes, int]] = set()
    blocked: set[bytes] = set()
    cursor: bytes | None = b""

    def step(limit: int) -> BatchResult:
        nonlocal cursor
        page = answers.scan(after=cursor or b"", limit=limit, other_than=newest)
        for answer in page.answers:
            if not answer.record.token.startswith(owner):
                used.update(_used_by(answer))
                continue
            outcome = _plain(answer) or _reseal_unless_blocked(answer, answers, codec, blocked, counts)
            counts[outcome.value] += 1
            if outcome not in (_Outcome.RESEALED, _Outcome.WIPED):
                used.update(_used_by(answer))
        cursor = page.after
        return BatchResult(len(page.answers), more=cursor is not None)

    drained = drain.run(step)
    if drained.finished:
        if unsettled is not None:
            for condemned in every(unsettled, State.QUARANTINED):
                used.update(_used_by(condemned))
        for tid, key in old:
            if (tid, key.number) in used:
                continue
            if key.closed_for is not None and key.closed_for >= grace:
                data_keys.delete(tid, key.number)
                counts["retired"] += 1
            if key.kid not in ring.kids():
                # Of a ring that is not ours, or no more: whoever still seals with it makes another.
                close(tid, key)
    return RotateReport(**counts, shrunk=drained.shrunk, finished=drained.finished)


def seal_plain(
    answers: Responses,
    codec: Codec,
    ring: Sealed,
    *,
    drain: Batcher,
    owner: bytes = b"",
    told: Callable[[int], object] = lambda sealed: None,
) -> SealReport:
    """Seal the answers that this application stored before encryption was switched on.

    Only a person calls this. The store cannot tell such an answer from one that somebody planted, and a sealed answer
    counts as genuine from then on. A codec that opens no plain answer (`required`) seals none here either.

    `told` gets the number of sealed answers after each one. `owner` is as for `rotate`. Safe to run again.

    Raises `StoreUnavailable` when the store does not answer; what was sealed until then stays sealed. Raises
    `ConfigurationError` when the codec does not encrypt.
    """
    newest = ring.newest
    counts: Counter[str] = Counter()
    blocked: set[bytes] = set()
    cursor: bytes | None = b""

    def step(limit: int) -> BatchResult:
        nonlocal cursor
        page = answers.scan(after=cursor or b"", limit=limit, other_than=newest)
        for answer in page.answers:
            payload = answer.record.payload
            if payload is None or payload.sealed_by is not None or not answer.record.token.startswith(owner):
                continue
            if answer.record.erased:
                counts["passed_over"] += 1
                continue
            outcome = _reseal_unless_blocked(answer, answers, codec, blocked, counts)
            counts[outcome.value] += 1
            if outcome is _Outcome.RESEALED:
                told(counts[outcome.value])
        cursor = page.after
        return BatchResult(len(page.answers), more=cursor is not None)

    drain.run(step)
    return SealReport(counts["resealed"], counts["passed_over"], counts["unreadable"], counts["blocked"])


def _plain(answer: Answer) -> _Outcome | None:
    payload = answer.record.payload
    return _Outcome.PLAIN if payload is not None and payload.sealed_by is None and not answer.record.erased else None


def _reseal_unless_blocked(
    answer: Answer, answers: Responses, codec: Codec, blocked: set[bytes], counts: Counter[str]
) -> _Outcome:
    # Ask once per tenant: neither one tenant's damage nor an outage of the key service will be over soon.
    outcome = _Outcome.BLOCKED if answer.key.tid in blocked else _reseal(answer, answers, codec)
    if outcome is _Outcome.BLOCKED:
        blocked.add(answer.key.tid)
        if len(blocked) >= MOST_BLOCKED and counts["resealed"] == 0:
            raise KeyProviderUnavailable("no tenant's data keys can be used for now: is the key service away?")
    return outcome


def _reseal(answer: Answer, answers: Responses, codec: Codec) -> _Outcome:
    record, payload = answer.record, answer.record.payload
    if payload is None or payload.sealed_by == ERASED:
        return _Outcome.PASSED_OVER
    if record.erased:
        return _Outcome.WIPED if answers.replace(answer.key, payload, wiped(payload)) else _Outcome.PASSED_OVER
    binding = _binding(answer)
    try:
        result = codec.open(payload, binding)
    except CorruptRecord:
        return _Outcome.UNREADABLE
    except KeyProviderUnavailable:
        return _Outcome.BLOCKED
    for _ in range(2):
        try:
            anew = codec.seal(result, binding)
            if anew.sealed_by is None:
                raise ConfigurationError(
                    "Encryption is off: what is sealed would be stored in clear. Nothing was changed."
                )
            return _Outcome.RESEALED if answers.replace(answer.key, payload, anew) else _Outcome.PASSED_OVER
        except DataKeyMissing:
            codec.forget(answer.key)
        except KeyProviderUnavailable:
            return _Outcome.BLOCKED
    return _Outcome.PASSED_OVER


def _binding(answer: Answer) -> SealContext:
    record: Record = answer.record
    return SealContext(answer.key, record.token, record.fence, record.fingerprint)


def _used_by(answer: Answer | SeenRecord) -> set[tuple[bytes, int]]:
    payload = answer.record.payload
    return set() if payload is None or payload.sealed_by is None else {(answer.key.tid, payload.sealed_by.number)}
