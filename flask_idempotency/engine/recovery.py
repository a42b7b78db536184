"""Resolve, release or reopen records in their worker's place, for resolvers and operators.

Each change applies only to the record that the caller saw. It is published with its actor and reason, and the store's audit
trail keeps it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from flask_idempotency.engine import errors
from flask_idempotency.engine.audit import (
    MOST_SAID,
    RESOLVER,
    SAYS_NEVER,
    AuditEntry,
    AuditTrail,
    all_said,
)
from flask_idempotency.engine.capabilities import Recovery, SeenRecord
from flask_idempotency.engine.claim import SealedResponse
from flask_idempotency.engine.events import Event, Resolved, StepSettled
from flask_idempotency.engine.journal import Effects, Entry, Journal, Journals, JournalWrite, StepState
from flask_idempotency.engine.keys import StorageKey, new_token, successor
from flask_idempotency.engine.model import (
    CORRUPT,
    ERASED,
    Record,
    SealContext,
    State,
    StoredPayload,
    StoredResponse,
    write_sealed,
)
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.store import Codec
from flask_idempotency.engine.values import valueclass

_log = logging.getLogger("flask_idempotency")


@valueclass(frozen=True, slots=True)
class SeenStep:
    """One recorded step of a request, as a resolver or an operator gets it. Its result is not shown."""

    name: str
    """As it is recorded: a step with `was=` has its original name."""
    item: Any = field(repr=False)
    """What tells it from other steps of this name. None: it has none, or it is unreadable."""
    effects: Effects
    """Its kind, as it is recorded."""
    state: StepState
    """Begun or finished."""
    attempt: int | None
    """Which attempt took it. None: one before the last."""
    began_at: float
    """Seconds since the epoch by the store's clock."""
    finished_at: float | None
    """The same clock. None: it has not finished."""
    entry: Entry = field(repr=False)
    """What the journal holds."""
    stored_item: bytes | None = field(repr=False)
    """The item as it is stored, empty if there is none. None: it is unreadable."""
    _downstream: Callable[[], str] = field(repr=False)

    @property
    def in_doubt(self) -> bool:
        """Whether its effect may have happened, so that no retry goes on until it is settled."""
        return self.entry.in_doubt

    @property
    def downstream_key(self) -> str:
        """What `current_step.downstream_key` was in this step. Look the call up by it.

        Raises `ConfigurationError` if the secret of that claim is not listed any more.
        """
        return self._downstream()

    def completed(self, result: Any = None) -> SettledStep:
        """Return from your resolver that the step happened. Retries get this result, and go on after it."""
        return SettledStep(self, happened=True, result=result)

    def never_happened(self) -> SettledStep:
        """Return from your resolver that the step had no effect and none is on its way. The next retry takes it again.

        The janitor waits until the worker cannot run any more, as for `NeverHappened`.
        """
        return SettledStep(self, happened=False)


@valueclass(frozen=True, slots=True)
class SettledStep:
    """What became of one step. `SeenStep.completed` and `never_happened` make it."""

    step: SeenStep
    happened: bool
    result: Any = field(default=None, repr=False)
    """What the step returns to retries. For `Settler.resume` it is tagged JSON."""


@valueclass(frozen=True, slots=True)
class Resume:
    """The next retry may go on after the finished steps.

    Return it without steps for a request that is quarantined as `steps-changed` or `never-resumed`. Return
    `unknown.resume(…)` to settle several steps at once.
    """

    settled: tuple[SettledStep, ...] = ()


@valueclass(frozen=True, slots=True)
class UnknownOutcome:
    """A quarantined record, as your resolver gets it, to look up what happened."""

    record: Record
    """The record: its tenant, principal, method, endpoint, times and reason. It holds no key and no request body."""
    _downstream: Callable[[str], str] = field(repr=False)
    steps: tuple[SeenStep, ...] = ()
    """The recorded steps, in the order in which they began. Empty for an endpoint without steps."""
    _recorded_as: Callable[[str], str] = field(default=str, repr=False)
    """Return the original name of a renamed step."""

    def downstream_key(self, name: str) -> str:
        """Return what `current_claim.downstream_key(name)` was in the view. Look the call up by it."""
        return self._downstream(self._recorded_as(name))

    def step(self, name: str, item: Any = None) -> SeenStep:
        """Return this recorded step, by its name or its former one. Raises `LookupError` if the request has not begun it."""
        for step in self.steps:
            if step.name == self._recorded_as(name) and step.item == item and type(step.item) is type(item):
                return step
        recorded = ", ".join(dict.fromkeys(step.name for step in self.steps)) or "none"
        raise LookupError(
            f"this request has not begun the step {name!r} with that item. Its recorded steps: {recorded}."
        )

    def resume(self, *settled: SettledStep) -> Resume:
        """Return several settled steps from your resolver: `unknown.resume(step.completed(found), other.never_happened())`."""
        return Resume(settled)


@valueclass(frozen=True, slots=True)
class Happened:
    """The request took effect: retries get this response from now on."""

    answer: Any = field(repr=False)
    """The response: anything that a view may return."""


@valueclass(frozen=True, slots=True)
class NeverHappened:
    """The request had no effect and none is on its way: the key may run again.

    Return it only if the other service has *ruled out* the call. If it only does not know the call yet, return `StillUnknown`.
    """


@valueclass(frozen=True, slots=True)
class StillUnknown:
    """The outcome is not known yet: the janitor calls your resolver again later."""


Resolution: TypeAlias = Happened | NeverHappened | StillUnknown | SettledStep | Resume


@dataclass(eq=False, repr=False)
class Settler:
    """Resolves, releases and reopens records as they were seen, and publishes who did it and why.

    Every method returns False if the record has changed: the worker was faster, or another janitor. Then nothing is
    published. Each raises `StoreUnavailable` if the store does not answer, and publishes that the change may have happened.
    You may repeat it.

    What is published also goes into the audit trail. If that fails, the change stands, and an error is logged.
    """

    recovery: Recovery
    codec: Codec
    observers: Callable[[Event], None]
    _: KW_ONLY
    label: Callable[[StorageKey], str]
    journals: Journals | None = None
    audit: AuditTrail | None = None

    def complete(
        self,
        seen: SeenRecord,
        result: StoredResponse,
        *,
        keep: float,
        actor: str,
        reason: str,
        remember: float | None = None,
        verb: str = "completed",
    ) -> bool:
        """Complete the record: retries get this response for `keep` seconds, and are `Expired` until `remember`.

        If the tenant was erased since the key was first used, only the fact of completion is stored. Raises
        `KeyProviderUnavailable` if the response cannot be sealed.
        """
        token = successor(seen.record.token)
        context = SealContext(seen.key, token, seen.record.fence, seen.record.fingerprint)
        publish = partial(self._publish, seen, verb=verb, actor=actor, reason=reason)
        lives = {"keep": keep} if remember is None else {"keep": keep, "remember": remember}

        def store(payloads: Sequence[StoredPayload]) -> bool:
            change = partial(self.recovery.resolve, seen, token=token, payload=payloads[0], **lives)
            return _change_and_publish(change, publish)

        return SealedResponse(self.codec, [context], result).write(store)

    def force_release(self, seen: SeenRecord, *, actor: str, reason: str, forced: bool = False) -> bool:
        """Release the key, so that it may run again. Call it only if the request had no effect and no longer runs."""
        publish = partial(self._publish, seen, verb="released", actor=actor, reason=reason, forced=forced)
        return _change_and_publish(lambda: self.recovery.force_release(seen), publish)

    def reopen(self, seen: SeenRecord, *, keep: float, actor: str, reason: str, remember: float | None = None) -> bool:
        """Complete again a record that was quarantined because its response was unreadable.

        Raises `CorruptRecord` while the response cannot be opened, if it was erased, and if the record has none.
        """
        record = seen.record
        if record.state is not State.QUARANTINED or record.payload is None:
            raise errors.CorruptRecord("this record holds no response to reopen")
        if record.erased or record.payload.sealed_by == ERASED:
            raise errors.CorruptRecord("the response in this record was erased")
        context = SealContext(seen.key, record.token, record.fence, record.fingerprint)
        result = self.codec.open(record.payload, context)
        return self.complete(seen, result, keep=keep, remember=remember, actor=actor, reason=reason, verb="reopened")

    def resume(
        self, seen: SeenRecord, journal: Journal, settled: Sequence[SettledStep] = (), *, actor: str, reason: str
    ) -> bool:
        """Settle these steps, and pause the record if no step is left in doubt: the next retry goes on.

        The result of each is tagged JSON. Raises `ConfigurationError` if that cannot hold, and has then changed nothing; its
        text names the steps, and neither their items nor their results.
        """
        if fault := resume_fault(seen.record, journal, settled):
            raise errors.ConfigurationError(fault)
        journals = self.journals
        if journals is None:
            raise errors.ConfigurationError("the store of this application keeps no steps")
        fresh = successor(seen.record.token)
        gone = {each.step.entry.id for each in settled if not each.happened}
        done = {each.step.entry.id for each in settled if each.happened}
        left = [entry for entry in journal.entries if entry.id not in gone]
        in_doubt = any(entry.in_doubt and entry.id not in done for entry in left)

        def publish(*, certain: bool = True) -> None:
            label, endpoint = self.label(seen.key), seen.record.info.operation
            for each in settled:
                verb, step = "completed" if each.happened else "never-happened", each.step
                item = step.entry.id.hex()[:8] if step.stored_item != b"" else ""
                self.observers(StepSettled(label, endpoint, step.name, item, verb, actor, reason, certain=certain))
                was = seen.record.state.value
                self._keep(seen.key, AuditEntry(verb, was, actor, reason, step.name, certain=certain))
            if not in_doubt:
                self._publish(seen, verb="resumed", actor=actor, reason=reason, certain=certain)

        erased = False

        def settle() -> bool:
            writing = JournalWrite(
                number=0,
                enter=[self._finished(seen, each, erased=erased) for each in settled if each.happened],
                withdraw=sorted(gone),
                steps=sum(entry.has_effect for entry in left),
                in_doubt=in_doubt,
            )
            return _change_and_publish(partial(journals.resume, seen, journal, token=fresh, writing=writing), publish)

        def discard(missing: errors.DataKeyMissing) -> None:
            nonlocal erased
            erased = erased or missing.erased
            self.codec.forget(seen.key)

        return write_sealed(settle, discard)

    def _finished(self, seen: SeenRecord, settled: SettledStep, *, erased: bool) -> Entry:
        entry = replace(settled.step.entry, state=StepState.FINISHED, kept=True, took=0.0)
        if erased:
            payload = StoredPayload(b"", 0, True, 0, ERASED)
        else:
            context = entry.context(seen.key, seen.record.fingerprint)
            payload = self.codec.steps.seal(settled.step.stored_item or b"", settled.result, context)
        return replace(entry, payload=payload)

    def _publish(
        self, seen: SeenRecord, *, verb: str, actor: str, reason: str, forced: bool = False, certain: bool = True
    ) -> None:
        entry = AuditEntry(verb, seen.record.state.value, actor, reason, forced=forced, certain=certain)
        label, operation = self.label(seen.key), seen.record.info.operation
        self.observers(Resolved(label, operation, verb, entry.was, actor, reason, forced, certain))
        self._keep(seen.key, entry)

    def note(self, seen: SeenRecord, verb: str, reason: str = "asked") -> None:
        """Remember what the resolver said of this record, one of `audit.SAYS`, so that `show` and the console can say it.

        After `MOST_SAID` of these, only what concerns a "never happened" is remembered: a resolver that fails now and then
        would push the changes of operators out of the latest entries. Raises `StoreUnavailable` if the store does not answer.
        """
        said = all_said(self.audit, seen.key, since=seen.record.requested_at)
        before = said[-1] if said else None
        is_news = before is None or (before.verb, before.reason) != (verb, reason)
        if is_news and (len(said) < MOST_SAID or SAYS_NEVER in (verb, said[-1].verb)):
            self._keep(seen.key, AuditEntry(verb, seen.record.state.value, RESOLVER, reason))

    def _keep(self, key: StorageKey, entry: AuditEntry) -> None:
        """Add this entry to the audit trail. The change has happened by now, so no error may hide that."""
        if self.audit is None:
            return
        try:
            self.audit.append(key, entry, token=new_token())
        except Exception as error:  # noqa: BLE001 - a custom store may raise anything
            # The event that was published before has the whole change.
            _log.error(
                "the audit trail of record %s lacks a change (%s): the store failed with %s",
                self.label(key),
                entry.verb,
                cause_of(error),
            )


def resume_fault(record: Record, journal: Journal, settled: Sequence[SettledStep]) -> str:
    """Return why these steps cannot be settled in this record, in a sentence. Empty: they can."""
    if not journal.complete:
        return "The store lost data after this request began, so its journal may lack a step. Settle the request as a whole."
    if record.reason == CORRUPT:
        return "This record is damaged, so no step of it can be settled. Settle the request as a whole."
    if not any(entry.has_effect for entry in journal.entries):
        return "No effect of this request is recorded, so a retry would begin it again. Settle the request as a whole."
    ids = [each.step.entry.id for each in settled]
    if len(set(ids)) < len(ids):
        return "A step is settled twice. Name each once."
    for each in settled:
        if each.step.state is StepState.FINISHED:
            return f"The step {each.step.name} has finished: its result stays as it is."
        if each.happened and each.step.stored_item is None:
            return (
                f"The step {each.step.name} is unreadable, so it cannot take a result. Settle the request as a whole."
            )
    if not settled and (doubtful := [entry.name for entry in journal.entries if entry.in_doubt]):
        return f"The step {doubtful[0]} is in doubt. Settle it: it happened, with its result, or it never happened."
    return ""


def _change_and_publish(change: Callable[[], bool], publish: Callable[..., None]) -> bool:
    """Make a change, and publish it if it happened or may have happened. Return whether it happened."""
    try:
        changed = change()
    except BaseException as error:  # interrupted: the change may have happened too
        # After any other of its errors, the store has not made the change.
        unknown = isinstance(error, errors.StoreUnavailable) and not isinstance(error, errors.NotApplied)
        if unknown or not isinstance(error, errors.IdempotencyError):
            publish(certain=False)
        raise
    if changed:
        publish()
    return changed
