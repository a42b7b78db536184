"""Administer a store: erase a tenant, report the key ring, handle a data loss, set quotas.

Each function takes the part of the store that it needs and returns a report. Only `shred`, `initialise`, `acknowledge` and
`quota_set` write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from math import ceil
from typing import TYPE_CHECKING, Final

from flask_idempotency.engine.audit import AuditTrail
from flask_idempotency.engine.capabilities import DataKeys, DataLossDetector, Ledger, Recovery, Responses
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord, StoreUnavailable
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.journal import Journals
from flask_idempotency.engine.keys import data_key_context
from flask_idempotency.engine.model import DataLoss, DataLossStatus
from flask_idempotency.engine.quota import Quota, Usage
from flask_idempotency.operations.records import Refused
from flask_idempotency.operations.times import format_duration

if TYPE_CHECKING:
    from flask_idempotency.codec.keyring import KeyProvider  # needs a package that is optional

# Erase a tenant.


def holds_sealed(data_keys: DataKeys, tids: Iterable[bytes]) -> bool:
    """Return whether a response of this tenant was ever encrypted, even if encryption is off now."""
    return any(data_keys.read_keys(tid).last for tid in tids)


def shred(data_keys: DataKeys, tids: Sequence[bytes], *, audit: AuditTrail | None = None) -> int:
    """Erase the responses of a tenant, with all its ids, and the audit trail of its records. Return how many data keys it had.

    Raises `StoreUnavailable` if a data key or an entry may be left, or is still in a cache; the others are erased.
    """
    destroyed, failures = 0, []
    # Every data key first: a database without an audit table yet, or without the right to it, must not keep one.
    for erase in (data_keys.shred, *(() if audit is None else (audit.forget,))):
        for tid in tids:
            try:
                destroyed += erase(tid) or 0
            except StoreUnavailable as error:
                failures.append(error)
    if failures:
        raise StoreUnavailable(" ".join(dict.fromkeys(map(str, failures)))) from failures[0]
    return destroyed


# The key ring.


@dataclass(frozen=True, slots=True)
class KeyStatus:
    """One key of the ring, or one that is missing in it. `records` and `data_keys` count what it protects."""

    kid: str
    records: int
    data_keys: int
    newest: bool
    known: bool
    unopened: int = 0
    """Of a sample of these data keys: how many this key of the ring does not open, though it has the id that they name."""

    @property
    def may_go(self) -> bool:
        """Return whether you can remove it from the ring without loss."""
        return self.known and not self.newest and self.records == self.data_keys == 0


@dataclass(frozen=True, slots=True)
class KeysReport:
    """What each key protects, in the order of the ring; keys that the ring lacks come last."""

    keys: tuple[KeyStatus, ...]
    plain_records: int

    @property
    def in_order(self) -> bool:
        """Return whether every sealed response can be opened, as far as a sample of the data keys shows."""
        return all(key.known and not key.unopened for key in self.keys)


SAMPLE: Final = 10
"""Data keys of each key of the ring. A key service is asked for each, and a wrong ring opens none."""


def keys_status(
    ring: KeyProvider, responses: Responses, data_keys: DataKeys, journals: Journals | None = None
) -> KeysReport:
    """Report the keys of the ring. Its records include the results of steps.

    Raises `StoreUnavailable` if the store does not answer.
    """
    # Count data keys last: a response that a worker seals during the count already has its data key.
    records = Counter(responses.count())
    if journals is not None:
        records.update(journals.count())
    wrapped = dict(data_keys.count())
    plain = records.pop("", 0)
    known = list(ring.kids())
    missing = sorted({kid for counted in (records, wrapped) for kid, n in counted.items() if n} - set(known))
    return KeysReport(
        tuple(
            KeyStatus(
                kid,
                records.get(kid, 0),
                wrapped.get(kid, 0),
                newest=kid == ring.newest,
                known=kid in known,
                unopened=_unopened(ring, data_keys, kid) if kid in known and wrapped.get(kid) else 0,
            )
            for kid in [*known, *missing]
        ),
        plain,
    )


def _unopened(ring: KeyProvider, data_keys: DataKeys, kid: str) -> int:
    """Return how many of a sample of data keys the key of the ring with this id does not open. A service may be away: 0."""
    unopened, sample = 0, getattr(data_keys, "sample", None)  # a store of your own may not have it yet
    for tid, key in () if sample is None else sample(kid, limit=SAMPLE):
        context = data_key_context(tid, key.number, kid, data_keys.read_keys(tid).store)
        try:
            ring.unwrap(kid, key.wrapped, context=context)
        except CorruptRecord:
            unopened += 1
        except Exception:  # noqa: BLE001 - whatever a key service raises, it tells nothing about the key
            break
    return unopened


_STATUS: Final = "`flask idempotency redis status`"
_ACK: Final = '`flask idempotency redis ack --reason "…"`'
_BEFORE: Final = (
    "Find out what happened, make sure that the lost server does not come back and serve, and see which requests run "
    "(`flask idempotency list --state processing`)"
)
_RISK: Final = "It risks that requests whose records were lost run a second time if their clients retry them."


@dataclass(frozen=True, slots=True)
class DataLossReport:
    """Whether a store lost data, in words."""

    standing: DataLossStatus
    new_keys_run: bool
    """Whether keys run that the store does not know."""
    text: str
    remedy: str
    """Empty if you need not act."""

    @property
    def wait(self) -> float | None:
        """Return the seconds until you should acknowledge the loss. None: there is none to acknowledge."""
        due = self.standing.may_be_acknowledged_at
        foreign = DataLoss.FOREIGN.value in self.standing.losses
        return None if due is None or foreign else max(due - self.standing.now, 0.0)


def memory_status(memory: DataLossDetector) -> DataLossReport:
    """Report whether this store lost data, and what to do."""
    standing, rules = memory.status(), memory.rules
    runs = standing.runs_unknown(rules.after_loss)
    losses = standing.losses
    if DataLoss.FOREIGN.value in losses:
        sentences = _foreign(standing, rules.store_id)
    elif not losses:
        sentences = "A data loss was acknowledged." if standing.since else "It has lost no data.", ""
    elif rules.after_loss == "run":
        sentences = "It lost data, and unknown keys run: IDEMPOTENCY_AFTER_LOSS is run.", ""
    elif DataLoss.MISSING.value in losses:
        sentences = _missing(standing)
    else:
        sentences = _changed(standing, after_loss=rules.after_loss, runs=runs)
    return DataLossReport(standing, runs, *sentences)


def _foreign(standing: DataLossStatus, expected: str | None) -> tuple[str, str]:
    text, store_id = (
        "Its keys are laid out for another IDEMPOTENCY_TENANT_SHARDS, or for another release.",
        standing.store_id,
    )
    if expected is not None and store_id != expected:
        it_is = "Its parts are of several stores" if store_id is None else f"It is the store {printable(store_id)}"
        text = f"{it_is}, and IDEMPOTENCY_STORE_ID names {expected}."
    return text, (
        "Point IDEMPOTENCY_STORE to the right Redis; or set IDEMPOTENCY_STORE_ID and IDEMPOTENCY_TENANT_SHARDS as they were "
        "when this one was initialised. There is nothing to acknowledge."
    )


def _missing(standing: DataLossStatus) -> tuple[str, str]:
    lacking, parts = standing.parts[DataLoss.MISSING.value], sum(standing.parts.values())
    if lacking == parts:
        if standing.emptied:
            return "It held keys before, and was emptied.", f"{_BEFORE}; then: {_ACK}. {_RISK}"
        return (
            "It was emptied, or it was never initialised.",
            f"If it held keys before, it was emptied: {_ACK}. {_RISK} Only if this Redis is new: "
            "`flask idempotency redis init`.",
        )
    text = f"{lacking} of its {parts} parts lack their identity: they were emptied, and all keys in them are gone."
    return text, f"{_BEFORE}; then: {_ACK}. {_RISK}"


def _changed(standing: DataLossStatus, *, after_loss: str, runs: bool) -> tuple[str, str]:
    changed, parts = standing.parts[DataLoss.CHANGED.value], sum(standing.parts.values())
    since = format_duration(standing.now - (standing.since or standing.now))
    text = (
        f"{since} ago a worker noticed that another process serves {changed} of its {parts} parts: Redis was restarted, "
        "failed over or restored, and the last writes may be gone."
    )
    if runs:
        return f"{text} New keys run again since.", f"Find out what was lost, then acknowledge it: {_ACK}."
    itself = " New keys run again when that time is over." if after_loss == "hold" else ""
    return text, f"{_BEFORE}; then: {_ACK}. {_RISK}{itself}"


def initialise(
    memory: DataLossDetector, recovery: Recovery | None, *, confirm: Callable[[], object] | None = None
) -> tuple[str, bool]:
    """Initialise a new store. Return its id, and False if it was ready before.

    It calls `confirm` before it gives an empty store the id in the settings: an emptied store may have had that id. Raises
    `Refused` for a store that lost data: one in use, or ready before.
    """
    before = memory.status()
    counts = None if recovery is None or before.store_id is not None else recovery.counts()
    used = counts is not None and bool(counts.in_flight or counts.lapsed or counts.quarantined)
    if used and not before.parts.keys() - {DataLoss.MISSING.value}:
        raise Refused(
            "Claims of requests are in this Redis, so it is not new: it was emptied, and workers have restored their claims; "
            f"or an earlier release wrote them. {_STATUS} shows more, and {_ACK} lets new keys run. Nothing was changed."
        )
    if confirm and before.store_id is None and not before.emptied and memory.rules.store_id is not None:
        confirm()
    try:
        return memory.initialise(), before.store_id is None
    except ConfigurationError as error:
        raise Refused(" ".join(error.faults)) from error


def check_acknowledgeable(status: DataLossReport, *, forced: bool) -> None:
    """Raise `Refused` for a loss that cannot be acknowledged, or not yet."""
    if DataLoss.FOREIGN.value in status.standing.losses:
        raise Refused(f"{status.text} {status.remedy} Nothing was changed.")
    if status.wait and not forced:
        raise Refused(
            f"Workers that survived have {ceil(status.wait)} s left to restore their claims. Until then new keys "
            "could run their requests twice: wait. To acknowledge now: --force. Nothing was changed."
        )


def acknowledge(memory: DataLossDetector, *, seen: DataLossStatus, forced: bool) -> None:
    """Let keys run that the store does not know. Raises `Refused` if the store changed since `seen`."""
    try:
        memory.acknowledge(forced=forced, seen=seen)
    except ConfigurationError as error:
        raise Refused(" ".join(error.faults)) from error


# Quotas.


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The usage of one tenant, and the limits that an operator set for it. `name` is None for no tenant."""

    name: str | None
    usage: Usage
    limits: Quota


def quota_show(ledger: Ledger, theirs: Sequence[Sequence[bytes]], *, name: str | None) -> TenantUsage:
    """Return the usage of a tenant. `theirs` are the ids of its parts under each secret, the newest first.

    A host counts a key under its newest secret. During a rotation hosts differ, and a recount finds a key under both
    secrets. So this returns the larger of each number.
    """
    usages = [asdict(Usage.together(map(ledger.usage, parts))) for parts in theirs]
    most = {count: max(usage[count] for usage in usages) for count in usages[0]}
    return TenantUsage(name, Usage(**most), _own_limits(ledger, theirs))


def quota_set(ledger: Ledger, theirs: Sequence[Sequence[bytes]], named: Quota, *, clear: bool = False) -> Quota:
    """Set the named limits of a tenant, and keep its others. `clear`: remove the others. Return the limits that hold now.

    They may be a little higher than named, because each part gets its share, rounded up. Raises `Refused` for limits that
    cannot be divided. After an interruption run it again: it has changed some of the parts.
    """
    parts = len(theirs[0])
    if small := named.less_than(parts):
        too_small = ", ".join(f"{name.replace('_', '-')} {limit}" for name, limit in small.items())
        raise Refused(
            f"The keys of each tenant are spread over {parts} parts (IDEMPOTENCY_TENANT_SHARDS), and this cannot be divided "
            f"over so many: {too_small}. Set it to {parts} or more, or to 0. Nothing was changed."
        )
    limits = (named if clear else _own_limits(ledger, theirs).overlaid(named)).divided(parts)
    for tid in chain.from_iterable(theirs):
        ledger.limit(tid, limits)
    return limits.multiplied(parts)


def _own_limits(ledger: Ledger, theirs: Sequence[Sequence[bytes]]) -> Quota:
    """Return the limits under the newest secret that has any: `quota_set` writes them under all, alike for every part."""
    every = map(ledger.limits, chain.from_iterable(theirs))
    return next((limits for limits in every if not limits.unlimited), Quota()).multiplied(len(theirs[0]))
