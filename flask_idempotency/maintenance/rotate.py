"""Seal stored responses again so that an old key of the ring can go, seal plain ones, and wipe erased ones.

A data key stays while the store holds a response under it, or while a late completion may still arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from flask_idempotency.engine.capabilities import DataKey, DataKeys, Page, RecordPage, Recovery, Responses, every
from flask_idempotency.engine.errors import (
    ConfigurationError,
    CorruptRecord,
    DataKeyMissing,
    KeyProviderUnavailable,
    RingMismatch,
)
from flask_idempotency.engine.journal import Journals, StepPage
from flask_idempotency.engine.keys import StorageKey, successor
from flask_idempotency.engine.model import ERASED, RequestInfo, SealContext, State, StoredPayload
from flask_idempotency.engine.store import Codec, StepContext
from flask_idempotency.maintenance.janitor import Batcher, BatchResult, RunReport, Step, pages

if TYPE_CHECKING:
    from flask_idempotency.codec.keyring import KeyProvider  # needs a package that is optional

# Wipe: leave no readable response of an erased tenant.


@dataclass(frozen=True, slots=True)
class WipeReport(RunReport):
    """The result of one run of `wipe`. Run it again if you like: it passes over wiped responses."""

    wiped: int = 0
    """Only the fact that the work was done is left of these."""
    passed_over: int = 0
    """Changed or removed by another process during the run, or wiped before."""
    condemned: int = 0
    """Those of `wiped` that were quarantined, because no worker could open them."""


def wiped(payload: StoredPayload) -> StoredPayload:
    """Return what is left of a wiped response: its status and its size."""
    return replace(payload, data=b"", sealed_by=ERASED)


def wipe(
    responses: Responses,
    tids: Sequence[bytes],
    *,
    drain: Batcher,
    recovery: Recovery | None = None,
    keep_of: Callable[[RequestInfo], float] = lambda about: 0.0,
    journals: Journals | None = None,
    on_progress: Callable[[int], object] = lambda wiped: None,
) -> WipeReport:
    """Wipe every erased response of this tenant, sealed or plain. `tids` are the ids of all its parts.

    Leave a response alone whose key was first used after the erasure. `recovery` finds the quarantined responses, which no
    worker could open: their work was done, so each is completed again without a response, and is known for its endpoint's
    `keep` or `remember`. `journals` has the results of steps: the requests that need them are quarantined and never run them
    again.

    `on_progress` gets the number wiped so far: what was done until an error stays done. Raises `StoreUnavailable` if the store
    does not answer.
    """
    counts: Counter[str] = Counter()

    def erase(one: _Stored) -> None:
        if one.erased:
            done = one.payload.sealed_by != ERASED and one.replace(wiped(one.payload))
            counts["wiped" if done else "passed_over"] += 1
            on_progress(counts["wiped"])

    steps = [_through_responses(responses, erase, tid=tid) for tid in tids]
    if recovery is not None:
        resolve = recovery.resolve

        def complete(page: RecordPage) -> int:
            for found in page.found:
                payload, token = found.record.payload, successor(found.record.token)
                if payload is not None:
                    done = resolve(found, token=token, payload=wiped(payload), keep=keep_of(found.record.info))
                    counts.update(wiped=int(done), condemned=int(done))
                    on_progress(counts["wiped"])
            return len(page.found)

        steps += [pages(partial(recovery.scan, State.QUARANTINED, tid=tid), complete) for tid in tids]
    if journals is not None:
        steps += [_through_steps(journals, erase, tid=tid) for tid in tids]

    def step(limit: int) -> BatchResult:
        # As one step, so that the budget ends it between two ids too: a tenant may have many, with few records each.
        result = steps[0](limit)
        if not result.more:
            steps.pop(0)
        return BatchResult(result.touched, more=bool(steps))

    ended = drain.run(step)
    return WipeReport(**counts, shrunk=ended.shrunk, finished=ended.finished)


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


@dataclass(frozen=True, slots=True)
class RotateReport(RunReport):
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


_Outcome: TypeAlias = Literal["resealed", "wiped", "passed_over", "plain", "unreadable", "blocked"]
"""The count of a report that a stored response raises."""

_IN_CLEAR: Final = (
    "Encryption is off: this would store sealed responses in clear. Set IDEMPOTENCY_ENCRYPTION to on. No record was "
    "changed."
)


def rotate(
    responses: Responses,
    data_keys: DataKeys,
    codec: Codec,
    ring: KeyProvider,
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
    reseal = _Resealing(codec)
    counts = reseal.counts

    def disable(tid: bytes, key: DataKey) -> None:
        if key.closed_for is None:
            data_keys.disable(tid, key.number)
            counts["closed"] += 1

    for tid, key in old:
        if key.kid in ring.kids():
            disable(tid, key)
    used: set[tuple[bytes, int]] = set()

    def look(one: _Stored) -> None:
        outcome: _Outcome | None = None
        if one.token.startswith(owner):
            plain = one.payload.sealed_by is None and not one.erased
            outcome = reseal.count("plain") if plain else reseal(one)
        if outcome not in ("resealed", "wiped"):
            used.update(_used_by(one.key, one.payload))

    steps = [_through_responses(responses, look, other_than=newest)]
    if journals is not None:
        steps.append(_through_steps(journals, look, other_than=newest))
    ended = drain.run(*steps)
    if ended.finished:
        if recovery is not None:
            for quarantined in every(recovery, State.QUARANTINED):
                used.update(_used_by(quarantined.key, quarantined.record.payload))
        for tid, key in old:
            if (tid, key.number) in used:
                continue
            if key.closed_for is not None and key.closed_for >= grace:
                data_keys.delete(tid, key.number)
                counts["retired"] += 1
            if key.kid not in ring.kids():
                # Its ring is foreign or gone. A process that still seals with it makes another data key.
                disable(tid, key)
    return RotateReport(**counts, shrunk=ended.shrunk, finished=ended.finished)


def seal_plain(
    responses: Responses,
    codec: Codec,
    ring: KeyProvider,
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
    reseal = _Resealing(codec)

    def look(one: _Stored) -> None:
        if one.payload.sealed_by is not None or not one.token.startswith(owner):
            return
        if one.erased:
            reseal.count("passed_over")
        elif reseal(one) == "resealed":
            on_progress(reseal.counts["resealed"])

    drain.run(_through_responses(responses, look, other_than=ring.newest))
    counts = reseal.counts
    return SealReport(counts["resealed"], counts["passed_over"], counts["unreadable"], counts["blocked"])


@dataclass(frozen=True, slots=True)
class _Stored:
    """A stored response or the result of a step, what it is sealed for, and how it is replaced."""

    key: StorageKey
    token: bytes
    erased: bool
    payload: StoredPayload
    context: SealContext | StepContext
    replace: Callable[[StoredPayload], bool]


def _through_responses(responses: Responses, look: Callable[[_Stored], object], **only: Any) -> Step:
    """Return the step of a task that looks at stored responses: those of a `tid`, or those `other_than` under this key."""

    def handle(page: Page) -> int:
        for answer in page.answers:
            key, record, payload = answer.key, answer.record, answer.record.payload
            if payload is not None:
                context = SealContext(key, record.token, record.fence, record.fingerprint)
                replaced = partial(responses.replace, key, payload)
                look(_Stored(key, record.token, record.erased, payload, context, replaced))
        return len(page.answers)

    return pages(partial(responses.scan, **only), handle)


def _through_steps(journals: Journals, look: Callable[[_Stored], object], **only: Any) -> Step:
    """Return the step of a task that looks at the results of steps in the same way."""

    def handle(page: StepPage) -> int:
        for answer in page.answers:
            key, entry, payload = answer.key, answer.entry, answer.entry.payload
            if payload is not None:
                context = entry.context(key, answer.fingerprint)
                replaced = partial(journals.replace, key, entry.id, payload)
                look(_Stored(key, answer.token, answer.erased, payload, context, replaced))
        return len(page.answers)

    return pages(partial(journals.walk, **only), handle)


class _Resealing:
    """Seals one after the other, and counts what became of each."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._blocked: set[bytes] = set()
        self.counts: Counter[str] = Counter()

    def __call__(self, one: _Stored) -> _Outcome:
        # Try each tenant once: neither its damage nor an outage of the key service ends soon.
        outcome = "blocked" if one.key.tid in self._blocked else self._reseal(one)
        if outcome == "blocked":
            self._blocked.add(one.key.tid)
            if len(self._blocked) >= MOST_BLOCKED and self.counts["resealed"] == 0:
                raise KeyProviderUnavailable(
                    f"The data keys of {MOST_BLOCKED} tenants cannot be used: see whether the key service is away."
                )
        return self.count(outcome)

    def count(self, outcome: _Outcome) -> _Outcome:
        self.counts[outcome] += 1
        return outcome

    def _reseal(self, one: _Stored) -> _Outcome:
        codec, context = self._codec, one.context
        if one.payload.sealed_by == ERASED:
            return "passed_over"
        if one.erased:
            return "wiped" if one.replace(wiped(one.payload)) else "passed_over"
        try:
            if isinstance(context, StepContext):
                seal = partial(codec.steps.seal, *codec.steps.open(one.payload, context), context)
            else:
                seal = partial(codec.seal, codec.open(one.payload, context), context)
        except (CorruptRecord, RingMismatch):
            return "unreadable"
        except KeyProviderUnavailable:
            return "blocked"
        for _ in range(2):
            try:
                resealed = seal()
                if resealed.sealed_by is None:
                    raise ConfigurationError(_IN_CLEAR)
                return "resealed" if one.replace(resealed) else "passed_over"
            except DataKeyMissing:
                codec.forget(one.key)
            except KeyProviderUnavailable:
                return "blocked"
        return "passed_over"


def _used_by(key: StorageKey, payload: StoredPayload | None) -> set[tuple[bytes, int]]:
    return set() if payload is None or payload.sealed_by is None else {(key.tid, payload.sealed_by.number)}
