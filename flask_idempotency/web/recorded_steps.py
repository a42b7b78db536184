"""Show the recorded steps of a request to resolvers and operators, and store what they say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from flask_idempotency.assembly import identities
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import (
    ConfigurationError,
    CorruptRecord,
    IdempotencyError,
    NotStorable,
    ResponseUnavailable,
    ResultNotRebuilt,
    RingMismatch,
)
from flask_idempotency.engine.journal import EMPTY, LARGEST_RESULT, Entry, Journal, Journals
from flask_idempotency.engine.keys import marked
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Resolution, Resume, SeenStep, SettledStep
from flask_idempotency.engine.step_rules import Step
from flask_idempotency.engine.store import Codec
from flask_idempotency.operations.records import Refused, StepView
from flask_idempotency.operations.times import moment
from flask_idempotency.settings import Settings
from flask_idempotency.steps import values

DownstreamKey: TypeAlias = Callable[[SeenRecord, str, bytes], str]
"""Takes a record, the name of a step and its item, as it is stored."""


def read_steps(
    found: SeenRecord, journals: Journals | None, codec: Codec, *, downstream: DownstreamKey
) -> tuple[Journal, tuple[SeenStep, ...]]:
    """Return the journal of this record, and its steps. An item that cannot be opened is None.

    Raises `StoreUnavailable` if the store does not answer.
    """
    if journals is None:
        return EMPTY, ()
    journal = journals.read(found.key)
    return journal, tuple(_seen(found, entry, journal, codec, downstream) for entry in journal.entries if entry.is_step)


def _seen(found: SeenRecord, entry: Entry, journal: Journal, codec: Codec, downstream: DownstreamKey) -> SeenStep:
    stored = b"" if entry.payload is None else None
    if entry.payload is not None and not journal.erased:
        with suppress(CorruptRecord, ResponseUnavailable, RingMismatch):
            opened, _ = codec.steps.open(entry.payload, entry.context(found.key, found.record.fingerprint))
            values.decode_item(opened)
            stored = opened

    def own_key() -> str:
        if stored is None:
            raise ConfigurationError(f"the downstream key of step {entry.name} is unknown: its item cannot be read.")
        return downstream(found, entry.name, stored)

    return SeenStep(
        entry.name,
        None if stored is None else values.decode_item(stored),
        entry.effects,
        entry.state,
        # Fences rise with each claim, but not by one, so only the last attempt is known.
        found.record.attempt if entry.fence == found.record.fence else None,
        entry.began_at,
        entry.finished_at,
        entry,
        stored,
        own_key,
    )


def downstream_key(settings: Settings, found: SeenRecord, name: str, item: bytes = b"") -> str:
    """Return what `current_claim.downstream_key(name)` was for the claim of this record. `item` is that of a step, encoded.

    Raises `ConfigurationError` if the secret of that claim is unknown. Under another secret the key would be one that the
    other service has never seen, so it would look as if no work had been done.
    """
    for who in identities(settings):
        if marked(found.record.token, who.mark(settings.namespace)):
            return who.downstream_key(found.key, name, item)
    raise ConfigurationError(
        "downstream_key(): this key was claimed while two secrets were listed in IDEMPOTENCY_SECRET, or under one that is not "
        "listed any more, so the key that was sent downstream is unknown. Look the request up by other data, or run "
        "`flask idempotency resolve`."
    )


def view_of(step: SeenStep) -> StepView:
    """Return what an operator may know of this step: never its result."""
    return StepView(
        name=step.name,
        item=None if step.item is None else str(step.item),
        effects=step.effects,
        state="in doubt" if step.in_doubt else step.state.value,
        attempt=step.attempt,
        began_at=moment(step.began_at),
        finished_at=None if step.finished_at is None else moment(step.finished_at),
        kept=step.entry.kept,
    )


def as_stored(resolution: Resolution, policy: Policy) -> Resolution:
    """Return this resolution with the results of its steps as tagged JSON. Raises `ConfigurationError` for others."""
    match resolution:
        case SettledStep():
            return _with_result(resolution, policy)
        case Resume(settled):
            if not all(isinstance(each, SettledStep) for each in settled):
                raise TypeError("unknown.resume() takes what step.completed() and step.never_happened() return")
            return Resume(tuple(_with_result(each, policy) for each in settled))
        case _:
            return resolution


def _with_result(settled: SettledStep, policy: Policy) -> SettledStep:
    if not settled.happened:
        return settled
    rule = policy.recorded_step(settled.step.name)
    return replace(settled, result=result_of_step(settled.step.name, settled.result, rule))


def settled_step(step: SeenStep, policy: Policy, result: bytes | None, *, named: str) -> SettledStep:
    """Return what became of this step: it happened with this result, or it never happened (None).

    Raises `Refused` if the code that runs now cannot return the result, which the operator knows by this name.
    """
    rule = policy.recorded_step(step.name)
    if result is not None and rule is not None:
        try:
            values.from_plain(values.decode(result), rule.returns)
        except ResultNotRebuilt as error:
            raise Refused(
                f"{named} cannot be checked now: {error}. Try again in a moment. Nothing was changed."
            ) from None
        except IdempotencyError:
            raise Refused(
                f"{named} does not fit `returns=` of the step, so no retry could go on. Give a dataclass or NamedTuple as an "
                "object with its fields, and other types as their first function returns them. Nothing was changed."
            ) from None
    return SettledStep(step, happened=result is not None, result=result)


def undone(found: Sequence[SeenStep], policy: Policy) -> list[str]:
    """Return the steps with an effect that did not finish, or never began: if the request is settled, they never happen."""
    begun = [
        f"{step.name}{'' if step.item is None else f' of {step.item}'} ({'in doubt' if step.in_doubt else 'not finished'})"
        for step in found
        if step.finished_at is None
    ]
    declared = [step for step in policy.steps if step.effects != "pure"]
    recorded = {step.name for step in found}
    return begun + [f"{step.name} (not begun)" for step in declared if step.recorded_as not in recorded]


def result_of_step(name: str, result: Any, rule: Step | None) -> bytes:
    """Return a result as tagged JSON, if the step would take it back. Raises `ConfigurationError`."""
    returns = None if rule is None else rule.returns
    try:
        encoded = values.encode(values.to_plain(result, returns))
    except NotStorable as error:
        raise ConfigurationError(f"the result of step {name} cannot be stored: {error}.") from error
    if len(encoded) > LARGEST_RESULT:
        raise ConfigurationError(f"the result of step {name} takes {len(encoded)} bytes; {LARGEST_RESULT} are allowed.")
    return encoded
