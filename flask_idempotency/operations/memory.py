"""What people are told of a store that may have forgotten keys, and what they can do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final

from flask_idempotency.engine.capabilities import DataLossStatus, Loss, Memory, Unsettled
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import printable
from flask_idempotency.operations.refusal import Refused
from flask_idempotency.operations.spelling import span

_STATUS: Final = "`flask idempotency redis status`"
_ACK: Final = '`flask idempotency redis ack --reason "…"`'
_BEFORE: Final = (
    "Find out what happened, see to it that what was lost does not come back and serve, and look who is at work "
    "(`flask idempotency list --state processing`)"
)
_RISK: Final = "It risks that requests whose records were lost run a second time if their clients retry them."


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """How a store stands, in words."""

    standing: DataLossStatus
    new_keys_run: bool
    """Whether keys run that it does not know."""
    text: str
    remedy: str
    """Empty where there is nothing to do."""

    @property
    def parts(self) -> Mapping[str, int]:
        return self.standing.parts

    @property
    def wait(self) -> float | None:
        """For how many seconds more it should not be acknowledged. None: there is nothing that could be."""
        due = self.standing.may_be_acknowledged_at
        foreign = Loss.FOREIGN.value in self.standing.losses
        return None if due is None or foreign else max(due - self.standing.now, 0.0)


@dataclass(frozen=True, slots=True)
class Initialised:
    """A store that is ready."""

    store_id: str
    anew: bool
    """False: it was before."""


def memory_status(memory: Memory) -> MemoryStatus:
    """How this store stands, and what to do."""
    standing, rules = memory.standing(), memory.rules
    runs = standing.runs_unknown(rules.after_loss)
    losses = standing.losses
    if Loss.FOREIGN.value in losses:
        told = _foreign(standing, rules.store_id)
    elif not losses:
        told = ("What it has forgotten was acknowledged." if standing.since else "It knows what it has promised."), ""
    elif rules.after_loss == "run":
        told = "It has forgotten something, and what it does not know runs: IDEMPOTENCY_AFTER_LOSS is run.", ""
    elif Loss.MISSING.value in losses:
        told = _missing(standing)
    else:
        told = _changed(standing, after_loss=rules.after_loss, runs=runs)
    return MemoryStatus(standing, runs, *told)


def _foreign(standing: DataLossStatus, expected: str | None) -> tuple[str, str]:
    if expected is not None and standing.store_id != expected:
        found = None if standing.store_id is None else printable(standing.store_id)
        it_is = "Its parts are of several stores" if found is None else f"It is the store {found}"
        text = f"{it_is}, and IDEMPOTENCY_STORE_ID names {expected}."
    else:
        text = "Its keys are laid out for another IDEMPOTENCY_TENANT_SHARDS, or for another release."
    remedy = (
        "Point IDEMPOTENCY_STORE to the right Redis; or set IDEMPOTENCY_STORE_ID and IDEMPOTENCY_TENANT_SHARDS to what this "
        "one was made for. There is nothing to acknowledge."
    )
    return text, remedy


def _missing(standing: DataLossStatus) -> tuple[str, str]:
    lacking, parts = standing.parts[Loss.MISSING.value], sum(standing.parts.values())
    if lacking == parts:
        text = "Nothing says that it was ever made ready: it is new, or was emptied."
        return (
            text,
            f"If this Redis is new: `flask idempotency redis init`. If it held keys before, it was emptied: {_ACK}. {_RISK}",
        )
    text = f"{lacking} of its {parts} parts lack what it was made ready with: they were emptied, and all keys in them are gone."
    return text, f"{_BEFORE}; then: {_ACK}. {_RISK}"


def _changed(standing: DataLossStatus, *, after_loss: str, runs: bool) -> tuple[str, str]:
    changed, parts = standing.parts[Loss.CHANGED.value], sum(standing.parts.values())
    since = span(standing.now - (standing.since or standing.now))
    text = (
        f"{since} ago it was noticed that another process keeps {changed} of its {parts} parts: it was restarted, failed "
        "over or restored, and what was written last may be gone."
    )
    if runs:
        return f"{text} New keys run again since.", f"Look at what was lost, and say that somebody has: {_ACK}."
    itself = " New keys run by themselves when that time is over." if after_loss == "hold" else ""
    return text, f"{_BEFORE}; then: {_ACK}. {_RISK}{itself}"


def initialise(memory: Memory, unsettled: Unsettled | None) -> Initialised:
    """Make a new store ready. Raises `Refused` for one that was ready before, or is in use, and has lost its memory."""
    before = memory.standing()
    if before.store_id is None and not before.parts.keys() - {Loss.MISSING.value} and _in_use(unsettled):
        raise Refused(
            "Claims of requests are in this Redis, so it is not new: it was emptied, and their owners have put them back; or "
            f"an earlier release wrote them. {_STATUS} says more, and {_ACK} lets new keys run. Nothing was changed."
        )
    try:
        return Initialised(memory.initialise(), anew=before.store_id is None)
    except ConfigurationError as error:
        raise Refused(" ".join(error.faults)) from error


def _in_use(unsettled: Unsettled | None) -> bool:
    if unsettled is None:
        return False
    standing = unsettled.standing()
    return bool(standing.in_flight or standing.lapsed or standing.quarantined)


def check_acknowledgeable(status: MemoryStatus, *, forced: bool) -> None:
    """Raises `Refused` for a loss that nobody should acknowledge, or not yet."""
    if Loss.FOREIGN.value in status.standing.losses:
        raise Refused(f"{status.text} {status.remedy} Nothing was changed.")
    if status.wait and not forced:
        raise Refused(
            f"Owners that survived have {ceil(status.wait)} s left to put their claims back, and what they are at would run "
            "twice: wait until then. To go before: --force. Nothing was changed."
        )


def acknowledge(memory: Memory, *, seen: DataLossStatus, forced: bool) -> None:
    """From now on keys run that the store does not know. Raises `Refused` where it has changed hands since it was seen."""
    try:
        memory.acknowledge(forced=forced, seen=seen)
    except ConfigurationError as error:
        raise Refused(" ".join(error.faults)) from error
