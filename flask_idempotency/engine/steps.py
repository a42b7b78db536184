"""Take one claim through the steps of its view: pass finished ones, record the others, and stop before a second effect.

See `journal.py` for what a store keeps. Writes of one claim follow each other under a lock, which no function of a step holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from threading import RLock

from flask_idempotency.engine import errors, events
from flask_idempotency.engine.journal import (
    KEPT_REQUEST,
    LARGEST_JOURNAL,
    LARGEST_RESULT,
    MEMORY_LOST,
    MOST_STEPS,
    STEPS_CHANGED,
    TRY,
    Entry,
    Journals,
    JournalWrite,
    StepState,
    StepTransaction,
    StepTransactions,
)
from flask_idempotency.engine.keys import step_digest
from flask_idempotency.engine.model import ERASED, IN_DOUBT, SealContext, write_sealed
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.outages import cause_of
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.step_journal import ClaimJournal
from flask_idempotency.engine.step_rules import Step, UndeclaredStep
from flask_idempotency.engine.store import Codec, StepCodec


@dataclass(eq=False, repr=False)
class Steps:
    """The steps of one claim. Threads and tasks of its view may share it."""

    granted: InitVar[Sequence[tuple[SealContext, int]]]
    """Each record of the claim and its attempt, the newest secret first."""
    policy: Policy
    journals: Journals
    codec: Codec
    observers: Observers
    operation: str
    monotonic: Callable[[], float]
    refuse: Callable[[], None]
    """Raises if no step may begin any more, because the claim was lost, has ended or runs for too long."""
    transactions: StepTransactions | None = None
    poisoned: str = ""
    """The quarantine reason of a request that must not go on, or empty."""
    has_gap: bool = False
    """Whether a record lacked the steps that another has. It may have ended since, perhaps completed, and was claimed
    again."""
    refusals: list[errors.IdempotencyError] = field(default_factory=list)
    """The errors of this package that steps raised, in threads and tasks too. The one that ends the work decides the
    response."""

    def __post_init__(self, granted: Sequence[tuple[SealContext, int]]) -> None:
        sealer: StepCodec | None = getattr(self.codec, "steps", None)
        if sealer is None:
            raise TypeError(f"{type(self.codec).__name__} cannot seal steps: it has no `steps`")
        self._records = [ClaimJournal(context, attempt, sealer) for context, attempt in granted]
        self._label = granted[0][0].key.label
        self.attempt: int = max(attempt for _, attempt in granted)
        self._lock = RLock()
        self._depth = 0
        """How often the thread that holds the lock has taken it."""
        self._events: list[events.Event] = []
        """Events from while the lock was held. They are published when it is free."""
        self._asked: dict[str, set[bytes]] = {}
        """The items of each step that this attempt has asked for."""
        self._asked_ids: set[bytes] = set()
        self._line: StepRun | None = None
        self._bytes = 0
        self._lost: errors.LeaseLost | None = None

    def recall(self) -> None:
        """Read what earlier attempts recorded. Raises `LeaseLost`, `StoreUnavailable` and `CorruptRecord`.

        `poisoned` is set if the recorded steps do not fit the endpoint: then the view must not begin.
        """
        declared = self.policy.dropped_steps | {step.recorded_as for step in self.policy.steps}
        with self._locked():
            for record in self._records:
                if record.attempt == 1:
                    continue
                context = record.context
                journal = self.journals.recall(context.key, context.token, fence=context.fence)
                record.entries = {entry.id: entry for entry in journal.entries if entry.is_step}
                record.keeps, record.tries = {entry.id for entry in journal.kept_requests}, len(journal.tries)
                record.earlier, record.erased = frozenset(record.entries), journal.erased
                if not journal.complete:
                    self.poisoned = MEMORY_LOST
                elif unknown := [each.name for each in record.entries.values() if each.name not in declared]:
                    self._poison(unknown[0], "undeclared")
            if len(self._records) > 1 and not self.poisoned:
                self.has_gap = not all(record.earlier for record in self._records)
                self._reconcile()
            for entry in self._records[-1].entries.values():
                self._bytes += 0 if entry.payload is None else entry.payload.byte_size

    def keep(self, request: bytes) -> None:
        """Keep the request beside the steps, from the first one that is recorded on, so that the janitor may finish it.

        `request` names the records of this claim. An earlier attempt may have had fewer of them, because a secret was added
        since: then it is kept again, in each journal. Its entry has a keyed digest of it: what another writes into the store
        is never run.
        """
        with self._lock:
            names = blake2b(
                b"".join(sorted(record.context.key.rid for record in self._records)), digest_size=16
            ).digest()
            for record in self._records:
                if record.id_of(KEPT_REQUEST, names) not in record.keeps:
                    digest = step_digest(record.context.key, request)
                    record.put_aside(KEPT_REQUEST, names, request, digest)

    @property
    def tries(self) -> int:
        """How often the janitor has tried to finish the request, in all attempts before this one."""
        return max(record.tries for record in self._records)

    def note_try(self) -> None:
        """Record that the janitor tries to finish the request: its process may be killed in the try, which counts then too.

        Raises `LeaseLost` and `StoreUnavailable`: the try must not begin then.
        """
        with self._lock:
            for record in self._records:
                record.put_aside(TRY, b"%d" % (self.tries + 1), None)
            self._send(every=True)

    @property
    def recorded(self) -> bool:
        """Whether any record of the claim has a journal."""
        return any(record.entries for record in self._records)

    @property
    def has_effects(self) -> bool:
        """Whether an effect is recorded, so that a release pauses the request."""
        with self._lock:
            return any(record.effects for record in self._records)

    @property
    def in_doubt(self) -> bool:
        """Whether a plain step has begun, and it is unknown whether it happened."""
        with self._lock:
            return any(record.in_doubt for record in self._records)

    @property
    def unasked(self) -> tuple[str, ...]:
        """The recorded effects that the view has not asked for, by name."""
        with self._lock:
            return tuple(dict.fromkeys(entry.name for entry in self._unasked()))

    def rule(self, name: str) -> Step:
        """Return the declared step of this name. Raises `UndeclaredStep`."""
        step = self.policy.step(name)
        if step is None:
            raise UndeclaredStep(
                f"this endpoint does not list the step {name!r}, so it did not run. Add it to steps= of the endpoint, or call "
                "the function outside of a step."
            )
        return step

    def hold(self) -> str:
        """Return why a response that is to be kept must be a quarantine instead. Empty: it may be kept."""
        with self._locked():
            if not self.poisoned and (left := self.unasked):
                self._poison(left[0], "not-reached")
            return self.poisoned

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, and publish afterwards what happened: an observer may be slow, or wait for another step."""
        due: list[events.Event] = []
        try:
            with self._lock:
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
                    if not self._depth:
                        due, self._events = self._events, []
        finally:
            for event in due:
                self.observers(event)

    def enter(
        self,
        name: str,
        item: bytes = b"",
        *,
        alike: bytes = b"",
        digest: bytes = b"",
        former: Callable[[], Iterable[bytes]] = tuple,
        in_line: bool = True,
        own: Step | None = None,
    ) -> StepRun:
        """Begin this step, or return it as recalled. On return its function may run: the store has its begin, if it needs one.

        `item` is encoded, and so is `alike`: the item of another type that prints the same, empty if there is none.
        `digest` is one of the arguments, and not keyed: this method keys it for each record. `former` returns what earlier
        releases would have passed as `digest`, because they may have recorded the step.
        `in_line`: the view's own thread asks for it. `own`: what holds instead of the declared step of this name, with the
        same effects and identity. Raises `StepsChanged`, `StepInDoubt`, `LeaseLost`, `StoreUnavailable`
        and, for misuse, `RuntimeError`. In all these cases the function must not run.
        """
        with self._locked():
            if self._lost is not None:
                raise self._lost
            if self.poisoned:
                raise errors.StepsChanged(f"no further step begins: this request is held as {self.poisoned}")
            self.refuse()
            declared = self.rule(name)
            step = declared if own is None else own
            if in_line and self._line is not None:
                raise RuntimeError(
                    f"the step {name!r} was called inside of {self._line.step.name!r}, and steps do not nest: finish one "
                    "before the next"
                )
            if item in self._asked.get(step.recorded_as, ()):
                raise RuntimeError(f"the step {name!r} was asked for twice in one attempt: give each call its own item")
            ids = [record.id_of(step.recorded_as, item) for record in self._records]
            digests = [step_digest(record.context.key, digest) for record in self._records]
            found = [record.entries.get(id) for record, id in zip(self._records, ids, strict=True)]
            run = StepRun(self, step, item, ids, digests, in_line)
            known = any(found)
            if not known:
                self._refuse_new(step, item, alike, in_line=in_line)
            elif self._recalled(run, found, former):
                return run
            self._begin(run, known)
            self._ask(run)
            run.began = self.monotonic()
            if in_line:
                self._line = run
            return run

    def _recalled(self, run: StepRun, found: Sequence[Entry | None], former: Callable[[], Iterable[bytes]]) -> bool:
        """Return whether this recorded step has finished; then the run has its result.

        Raises `StepsChanged` if it was recorded with other arguments, and `StepInDoubt` if it may have happened.
        """
        step = run.step
        for record, entry, keyed in zip(self._records, found, run.digests, strict=True):
            if entry is None or not entry.digest or not keyed or entry.digest == keyed:
                continue
            if all(entry.digest != step_digest(record.context.key, each) for each in former()):
                raise self._changed(step.name, "arguments", "was recorded with other arguments")
        for record, entry in zip(self._records, found, strict=True):
            if entry is not None and entry.state is StepState.FINISHED:
                self._ask(run)
                run.recalled = run.ended = True
                run.result = self._open(record, entry, step)[1] if entry.kept else None
                self._note_event(events.StepRecalled, run)
                return True
        # A step that began as another kind is in doubt too: what its new kind promises does not hold for that run.
        if any(entry is not None and (entry.in_doubt or entry.effects != step.effects) for entry in found):
            self.poisoned = self.poisoned or IN_DOUBT
            raise errors.StepInDoubt(
                f"the step {step.name!r} has begun before, and it is unknown whether it happened: settle it with a resolver, "
                "or with `flask idempotency resolve --step`"
            )
        return False

    def _refuse_new(self, step: Step, item: bytes, alike: bytes, *, in_line: bool) -> None:
        """Raise if a step that is not recorded may not begin: beside another item, out of order, or as one too many.

        A name has items in all calls or in none, and no item beside `alike`. Another id hides that both may be one effect: the
        code has changed between two attempts. And no operator could tell items apart that print alike.
        """
        name, fault = step.recorded_as, "takes an item" if item else "takes no item"
        known = self._asked.get(name)
        if known and (not item or b"" in known or alike in known):
            raise RuntimeError(
                f"the step {step.name!r} {fault}, and this attempt has asked for it otherwise: a name has an item in each "
                "call or in none, and two items of it never print alike"
            )
        for record in self._records:
            if item:
                others = {record.id_of(name, other) for other in (b"", alike)}
                met = not others.isdisjoint(record.entries)
            else:
                met = any(entry.name == name for entry in record.entries.values())
            if met:
                raise self._changed(step.name, "item", f"{fault}, and is recorded otherwise")
        if step.effects != "pure" and in_line and not self.policy.steps_in_any_order:
            for left in self._unasked():
                if left.in_line and left.name != name:
                    raise self._changed(
                        left.name, "order", f"is recorded, and this attempt takes {step.name!r} without asking for it"
                    )
        if max(len(record.entries) for record in self._records) >= MOST_STEPS:
            raise RuntimeError(
                f"a request has at most {MOST_STEPS} steps, so {step.name!r} did not run: split the work into several requests"
            )

    def flush(self) -> None:
        """Write what the store has not confirmed. Call it before the claim ends without a response to keep."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if self.has_effects or any(record.withdrawn for record in self._records):
                self._send()

    def let_others_go_on(self) -> None:
        """Say that nothing is in doubt, before a claim whose own policy quarantines a lapse is released."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if not self.in_doubt:
                self._send(every=True)

    def _begin(self, run: StepRun, again: bool) -> None:
        step = run.step
        if step.effects == "transactional":
            if self.transactions is None:
                raise RuntimeError(
                    f"the step {step.name!r} is transactional, and the store is not the session's database: set "
                    "IDEMPOTENCY_STORE to flask-sqlalchemy://, or use another kind of step"
                )
            run.transaction = self.transactions.join_step(
                [record.context.key for record in self._records],
                self._records[0].context.token,
                fences=[record.context.fence for record in self._records],
                lease=self.policy.lease,
                operation=self.operation,
                early=lambda: self._early(run),
                on_early_commit=lambda: self.observers(events.CommittedEarly(self._label, self.operation)),
            )
        elif step.effects != "pure":
            # With a pure value, record that an effect may depend on it: a release without an effect would forget the value.
            has_pure = any(record.effects < len(record.entries) for record in self._records)
            if (step.intent or has_pure) and not again:
                self._note(run, StepState.BEGUN, None)
            try:
                self._send()
            except BaseException:
                # The function does not run. If the write arrives all the same, the next one takes the step out again.
                self._withdraw(run)
                raise

    def _early(self, run: StepRun) -> list[JournalWrite]:
        """Return the writes that a commit of the function itself must contain: from there on it is at most once."""
        with self._lock:
            run.early = True
            self._note(run, StepState.BEGUN, None)
            return [record.writing() for record in self._records]

    def _finish(self, run: StepRun, result: bytes | None) -> bool:
        with self._locked():
            self._end(run)
            why = ""
            if result is None:
                why = "type"
            elif len(result) > LARGEST_RESULT:
                why = "size"
            elif self._bytes + len(result) > LARGEST_JOURNAL:
                why = "total-size"
            if why:
                result = None
            size = 0 if result is None else len(result)
            self._bytes += size
            took = self.monotonic() - run.began
            self._note(run, StepState.FINISHED, result, took=took)
            if run.transaction is not None:
                self._commit(run, run.transaction)
            if why:
                # After the commit: what was rolled back has not finished.
                self._note_event(events.StepResultNotKept, run, why)
            if run.transaction is None and run.step.effects != "pure":
                try:
                    self._send()
                except errors.StoreUnavailable as error:
                    # The next write carries it, and no effect begins before one arrives.
                    self._events.append(events.CompletionRetrying(self._label, self.operation, error=cause_of(error)))
                    return result is not None
            self._note_event(events.StepFinished, run, took, size)
            return result is not None

    def _commit(self, run: StepRun, transaction: StepTransaction) -> None:
        def writing(store: Callable[[Sequence[JournalWrite]], None]) -> None:
            write_sealed(
                lambda: store([record.writing() for record in self._records]),
                partial(self._seal_again, self._records),
            )

        try:
            transaction.commit_step(writing)
        except errors.LeaseLost as error:
            self._lost = error
            raise
        except (errors.NotCommitted, errors.ConfigurationError):
            if run.early:
                self._undecided(run)
            else:
                self._withdraw(run)
            raise
        except BaseException:
            self._undecided(run)
            raise
        else:
            for record in self._records:
                record.sent()
        finally:
            transaction.leave()

    def _undecided(self, run: StepRun) -> None:
        """Leave it to the store whether a transactional step is recorded. A later write must not enter it, nor forget it."""
        for record, id in zip(self._records, run.ids, strict=True):
            record.unsent.pop(id, None)
            if run.early and id in record.entries:
                # The function has committed a part by itself, and the rest may be rolled back.
                record.entries[id] = replace(record.entries[id], state=StepState.BEGUN, kept=True)

    def _fail(self, run: StepRun, error: BaseException | None) -> None:
        with self._locked():
            self._end(run)
            step, name = run.step, "" if error is None else type(error).__name__
            nothing = error is None or step.is_harmless(error)
            if run.transaction is not None:
                run.transaction.roll_back()
                run.early = run.early or run.transaction.committed_early
                run.transaction.leave()
            if run.early or (step.effects == "plain" and not nothing):
                self._note_event(events.StepDoubtful, run, name)
            else:
                if nothing:
                    self._asked[step.recorded_as].discard(run.item)
                if nothing or step.effects == "transactional":
                    self._withdraw(run)
                self._note_event(events.StepFailed, run, name)

    def _end(self, run: StepRun) -> None:
        if run.ended:
            raise RuntimeError(f"the step {run.step.name!r} has ended")
        run.ended = True
        if self._line is run:
            self._line = None

    def _ask(self, run: StepRun) -> None:
        self._asked.setdefault(run.step.recorded_as, set()).add(run.item)
        self._asked_ids.update(run.ids)

    def _unasked(self) -> Iterator[Entry]:
        for record in self._records:
            for id in record.earlier:
                entry = record.entries.get(id)
                if entry is None or id in self._asked_ids or not entry.has_effect:
                    continue
                if entry.name not in self.policy.dropped_steps:
                    yield entry

    def _note(self, run: StepRun, state: StepState, result: bytes | None, *, took: float = 0.0) -> None:
        """Enter this step in each journal here. The next write tells the stores."""
        for record, id, digest in zip(self._records, run.ids, run.digests, strict=True):
            entry = Entry(
                id=id,
                name=run.step.recorded_as,
                effects="plain" if run.early else run.step.effects,
                state=state,
                in_line=run.in_line,
                digest=digest,
                kept=state is StepState.BEGUN or result is not None,
                took=took,
                fence=record.context.fence,
            )
            record.enter(entry, run.item, result)

    def _withdraw(self, run: StepRun) -> None:
        for record, id in zip(self._records, run.ids, strict=True):
            record.withdraw(id)

    def _send(self, *, every: bool = False) -> None:
        """Tell each store what it does not know yet, the oldest secret first. `every`: those too that know all."""
        for record in reversed(self._records):
            if not (record.is_behind or (every and record.entries)):
                continue
            try:
                write_sealed(partial(self._write, record), partial(self._seal_again, [record]))
            except errors.LeaseLost as error:
                self._lost = error
                raise
            record.sent()

    def _write(self, record: ClaimJournal) -> None:
        context, writing = record.context, record.writing()
        self.journals.write(context.key, context.token, fence=context.fence, writing=writing, lease=self.policy.lease)

    def _seal_again(self, records: Sequence[ClaimJournal], missing: errors.DataKeyMissing) -> None:
        for record in records:
            self.codec.forget(record.context.key)
            record.seal_again(erased=missing.erased)

    def _open(self, record: ClaimJournal, entry: Entry, step: Step | None) -> tuple[bytes, bytes | None]:
        """Return item and result of a recorded entry. What cannot be opened holds the request: it never runs again."""
        if entry.id in record.unsent:
            unsent = record.unsent[entry.id]
            return unsent.item, unsent.result
        name = entry.name if step is None else step.name
        if entry.payload is None or entry.payload.sealed_by == ERASED or record.erased:
            raise self._changed(name, "result", "has finished, and its result was erased")
        try:
            return record.sealer.open(entry.payload, entry.context(record.context.key, record.context.fingerprint))
        except (errors.CorruptRecord, errors.ResponseUnavailable) as error:
            raise self._changed(name, "result", "has finished, and its result cannot be opened") from error

    def _reconcile(self) -> None:
        """Carry finished steps into the journals that lack them: a worker may have vanished between two writes."""
        for source in self._records:
            for entry in list(source.entries.values()):
                if entry.state is not StepState.FINISHED:
                    continue
                try:
                    item, result = self._open(source, entry, None)
                except errors.StepsChanged:
                    return  # the request is held
                for other in self._records:
                    id = other.id_of(entry.name, item)
                    known = other.entries.get(id)
                    if known is not None and known.state is StepState.FINISHED:
                        continue
                    # Arguments are not compared there: their digest is keyed for one record.
                    digest = b"" if known is None else known.digest
                    copy = replace(entry, id=id, digest=digest, payload=None, fence=other.context.fence)
                    other.enter(copy, item, result)
                    other.earlier |= {id}

    def _poison(self, step: str, why: str) -> None:
        if not self.poisoned:
            self.poisoned = STEPS_CHANGED
            self._events.append(events.StepsChangedHeld(self._label, self.operation, step, why))

    def _note_event(self, kind: Callable[..., events.Event], run: StepRun, *facts: object) -> None:
        step = run.step
        self._events.append(kind(self._label, self.operation, step.name, step.effects, run.item_label, *facts))

    def _changed(self, step: str, why: str, text: str) -> errors.StepsChanged:
        self._poison(step, why)
        return errors.StepsChanged(f"the step {step!r} {text}")


@dataclass(eq=False, repr=False)
class StepRun:
    """One step that was asked for. Call exactly one of `finish`, `fail` and `withdraw`, unless it is `recalled`."""

    steps: Steps
    step: Step
    item: bytes
    ids: Sequence[bytes]
    digests: Sequence[bytes]
    in_line: bool
    recalled: bool = False
    """Whether it has finished before. Then its function must not run."""
    result: bytes | None = None
    """The result of a recalled step, as tagged JSON. None: it was not kept."""
    transaction: StepTransaction | None = None
    began: float = 0.0
    early: bool = False
    """Whether its function has committed by itself. Then it is recorded as plain: it must not run again."""
    ended: bool = False
    """Whether nothing is left to record of it."""

    @property
    def item_label(self) -> str:
        """A keyed hash of the item for events, empty if there is none."""
        return self.ids[-1][:4].hex() if self.item else ""

    def finish(self, result: bytes | None) -> bool:
        """Record that the function returned this. Return whether the result is kept: it may be too large.

        None: the result has a type that cannot be kept. If the store does not answer, the next write
        carries it. Raises `LeaseLost`; a transactional step also raises `NotCommitted` and `StoreUnavailable`.
        """
        return self.steps._finish(self, result)

    def fail(self, error: BaseException) -> None:
        """Record that the function raised: a plain step is in doubt, unless the exception is harmless. Never raises."""
        self.steps._fail(self, error)

    def withdraw(self) -> None:
        """Record that nothing was done. The step may be asked for again."""
        self.steps._fail(self, None)

    def misfits(self) -> errors.StepsChanged:
        """Hold the request, because the recalled result does not fit the code. Return the error to raise."""
        with self.steps._locked():
            return self.steps._changed(
                self.step.name, "result", "has a result that does not fit the code that runs now"
            )
