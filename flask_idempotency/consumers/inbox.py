"""The inbox: claim a message before its work, end the claim after it, and say what to do with the message."""

from __future__ import annotations

import atexit
import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from threading import get_ident
from typing import Any, Final, Self
from weakref import WeakSet

from flask_idempotency.consumers.services import ConsumerServices, services_of_current_app, standalone_services
from flask_idempotency.consumers.verdicts import Dead, Later, MissingMessageId, Processed, Verdict
from flask_idempotency.engine import ending, errors, model
from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.ending import Running, decide, running, settle, vanished, with_rows
from flask_idempotency.engine.engine import Engine, Outcome, Replay
from flask_idempotency.engine.events import ReplayServed, StoreFailed
from flask_idempotency.engine.fingerprint import fingerprint, raw_digest
from flask_idempotency.engine.keys import LONGEST_NAME, MAX_CACHED, Scope, key_timestamp, message_key
from flask_idempotency.engine.operations import MESSAGE, Operation
from flask_idempotency.engine.outages import cause_of, outage_of
from flask_idempotency.engine.policy import Decision
from flask_idempotency.settings.consumers import ConsumerPolicy, load_consumer_policy

TOO_MANY_ATTEMPTS: Final = "too-many-attempts"
"""The reason of a quarantine because too many workers vanished at one message."""

IN_FLIGHT_CAP_SECONDS: Final = 5.0
"""A lease may last for minutes, and its work may end in a second: ask again after this time at the latest."""
SHORTEST_WAIT_SECONDS: Final = 0.1
DRAIN_SECONDS: Final = 10.0
"""How long a process that ends repeats writes. Process managers kill after 10 to 30 seconds."""
STORE_RETRY_SECONDS: Final = 2.0
LOSS_RETRY_SECONDS: Final = 30.0
CONFLICT_RETRY_SECONDS: Final = 1.0

_log = logging.getLogger("flask_idempotency")

Shield = Callable[[], AbstractContextManager[object]]
"""Makes the context in which an inbox claims and settles. Celery holds signals off in it."""


class Inbox:
    """One consumer's memory of its messages. Threads can share it.

    Make it with `idempotency.inbox(name, …)` in a Flask application, or with `Inbox.standalone(…)` without one. The name is
    that of the consumer, and not of a queue: two consumers of one topic each do the work once.

    Raises `ConfigurationError` for a wrong name, keyword or value.
    """

    def __init__(
        self,
        name: str,
        *,
        services: Callable[[], ConsumerServices] | None = None,
        operation: str | None = None,
        owner: str = "",
        shield: Shield = nullcontext,
        unfinished: tuple[type[Exception], ...] = (),
        dump: Callable[[Any], bytes] | None = None,
        load: Callable[[bytes], Any] = json.loads,
        **policy: Any,
    ) -> None:
        """`services` finds the application when a message is processed. Default: Flask's current application.

        `unfinished`: exceptions by which work says that the message has to run again. No policy makes a failure of them.
        `dump` and `load` write and read a value. Default: JSON. `dump` raises as `json.dumps` does, `load` raises `ValueError`.
        """
        given: Any = name
        self.name = name
        self.operation: str = f"inbox:{name}" if operation is None else operation
        where = f"inbox({name!r})" if operation is None else operation
        if not isinstance(given, str) or not name or len(self.operation) > LONGEST_NAME:
            raise errors.ConfigurationError(
                f"inbox(…): the name of a consumer is a string of 1 to {LONGEST_NAME - len('inbox:')} characters."
            )
        self.policy: ConsumerPolicy = load_consumer_policy(policy, where=where)
        self._services = services or services_of_current_app
        self._shield = shield
        self._unfinished = unfinished
        self._dump = dump or _to_json
        self._load = load
        self._warned = False
        self._unstored: dict[bytes, tuple[int, Claim]] = {}
        """Claims whose end the store has not taken yet, by record, and the process that repeats the write."""
        self._paused: dict[bytes, int] = {}
        """How often this process has paused a message, by record."""
        self.catalogued: Operation = Operation(self.operation, self.policy, self._stored, owner)

    @classmethod
    def standalone(
        cls, config: Mapping[str, Any], name: str, *, session: Any = None, shield: Shield = nullcontext, **policy: Any
    ) -> Self:
        """Make an inbox without a Flask application, from `IDEMPOTENCY_*` configuration.

        `session` is the `scoped_session` that the work writes with: `effects="transactional"` needs it, and
        `IDEMPOTENCY_STORE` must be the URL of its database. Raises `ConfigurationError` with every fault.
        """
        services = standalone_services(config, session)
        inbox = cls(name, services=lambda: services, shield=shield, **policy)
        if session is None and inbox.policy.effects == "transactional":
            raise errors.ConfigurationError(
                f'inbox({name!r}): effects="transactional" without a Flask application needs session=…, the scoped_session '
                "that the work writes with."
            )
        inbox.check()
        return inbox

    def lasting(self, max_runtime: float) -> Self:
        """Return this inbox for a message that may take longer than the others: its worker renews the lease as long."""
        if max_runtime <= self.policy.max_runtime:
            return self
        longer = copy(self)
        longer.policy = replace(self.policy, max_runtime=max_runtime)
        return longer

    def check(self) -> None:
        """Raise `ConfigurationError` if the policy cannot hold in the application, or if its name has another policy there."""
        services = self._services()
        services.check(self.policy)
        services.operations.add(self.catalogued)

    def process(
        self,
        message_id: str,
        work: Callable[[], Any],
        *,
        payload: bytes | None = None,
        tenant: str | None = None,
        born: float | None = None,
    ) -> Verdict:
        """Do the work of this message, unless it was done. Return what to do with the message.

        `message_id` stays the same when the *sender* repeats the message. Messages of equal id and other `payload` are
        refused as `message-reused`. `born` is when the message was made, in seconds since the epoch.

        What `work` raises is raised here when the claim has ended. Raises `MissingMessageId` without an id, and
        `ConfigurationError` if the policy cannot hold in this application.
        """
        _check_arguments(message_id, work, payload, tenant, born)
        services = self._services()
        state = Running()
        state.policy, state.operation, state.client_key, state.tenant = self.policy, self.operation, message_id, tenant
        if not services.settings.enabled or services.built is None:
            return self._run_unprotected(services, state, work)
        engine = services.built.engine
        if self.policy.effects == "steps":
            services.check(self.policy)
        services.operations.add(self.catalogued)
        requests = self._claim_requests(services, message_id, payload, tenant, born)
        if self._unstored and self._is_unstored(requests[0].key.rid):
            return Later(STORE_RETRY_SECONDS, "result-not-stored")
        state.oldest, state.shield = services.identities[-1], self._shield
        begun = False
        try:
            with self._shield():
                outcome = engine.claim(requests[0], self.policy, former=requests[1:])
                if not isinstance(outcome, Claim):
                    return self._verdict(services, outcome, requests[0].key.label)
                claim = state.claim = outcome
                if claim.steps is not None:
                    state.thread, state.strict = get_ident(), services.strict()
                if claim.attempt - self._paused.get(claim.key.rid, 0) > self.policy.max_attempts:
                    # Too many workers have vanished at this message.
                    with suppress(errors.LeaseLost):
                        claim.quarantine(TOO_MANY_ATTEMPTS)
                        return Dead("too-many-attempts")
                    return Later(CONFLICT_RETRY_SECONDS, "in-flight")
            token = running.set((state, ending.request_context()))
            try:
                begun = True
                value = _call(work)
            finally:
                running.reset(token)
            with self._shield():
                return self._returned(engine, services, state, claim, value)
        except BaseException as error:
            # A signal may raise between any two lines. A claim that is granted must end all the same.
            if state.claim is None:
                verdict = self._not_granted(services, error, requests[0].key.label)
            elif state.claim.ended:
                raise
            else:
                with self._shield():
                    if not begun:
                        state.claim.release_unstarted()
                        raise
                    verdict = self._failed(engine, services, state, state.claim, error)
            if verdict is None:
                raise
            return verdict

    def _claim_requests(
        self, services: ConsumerServices, message_id: str, payload: bytes | None, tenant: str | None, born: float | None
    ) -> list[model.ClaimRequest]:
        settings = services.settings
        scope = Scope(settings.namespace, tenant, None, self.operation)
        # Without a payload, equal ids are equal messages. No digest of a payload begins with this letter.
        body = b"N" if payload is None else raw_digest((payload,))
        path = self.operation.encode("utf-8", "surrogatepass")
        prints = [
            fingerprint(identity, method=MESSAGE, path=path, query=b"", media_type="", body=body)
            for identity in services.identities
        ]
        requests = self.policy.claim_requests(
            scope,
            message_key(message_id),
            services.identities,
            prints,
            method=MESSAGE,
            operation=self.operation,
            hashed=settings.hash_identities,
            timestamp=key_timestamp(message_id) if born is None else born,
            in_quota=False,
        )
        former = settings.former_identity
        if former is None or former.namespace in (None, settings.namespace):
            return requests
        before = replace(scope, namespace=former.namespace)
        return requests + [
            # The token says whose claim it is: this application's, under whatever name it was made.
            replace(each, key=replace(identity.storage_key(before, message_key(message_id)), mark=each.key.mark))
            for identity, each in zip(services.identities, requests, strict=True)
        ]

    def _returned(
        self, engine: Engine, services: ConsumerServices, state: Running, claim: Claim, value: Any
    ) -> Verdict:
        """End the claim of work that returned, and return the verdict when the record is durable."""
        decision = decide(state, response=value, status=200, error=None)
        stored = self._stored_or_tombstone(value)
        rows = with_rows(state, status=200, error=None)
        try:
            decision = settle(state, decision, stored, reason="returned", rows=rows)
            written = claim.stored_within(self.policy.settle_wait)
        except errors.LeaseLost:
            return self._successor(engine, services, claim)
        except errors.NotCommitted as error:
            if claim.past_point:
                return Dead("outcome-unknown")
            if error.retryable:
                return Later(CONFLICT_RETRY_SECONDS, "transaction-conflict")
            raise
        except errors.KeyProviderUnavailable as error:
            return _unavailable(error)
        except errors.StoreUnavailable:
            return Later(STORE_RETRY_SECONDS, "commit-unknown")
        if not written:
            self._note_unstored(engine, claim)
            return Later(STORE_RETRY_SECONDS, "result-not-stored")
        match decision:
            case Decision.KEEP:
                return Processed(self._load(stored.body) if claim.kept else value, replayed=False, kept=claim.kept)
            case Decision.RELEASE:
                return self._note_paused(claim) or Later(CONFLICT_RETRY_SECONDS, "released")
            case Decision.QUARANTINE:
                return Dead("outcome-unknown")

    def _failed(
        self, engine: Engine, services: ConsumerServices, state: Running, claim: Claim, error: BaseException
    ) -> Verdict | None:
        """End the claim of work that raised. Return the verdict that replaces the error, or None to raise it again."""
        if isinstance(error, self._unfinished):
            decision, reason = Decision.RELEASE, "unfinished"
        elif state.is_refusal(error):
            decision, reason = Decision.RELEASE, "error"  # the work has not failed: it could not go on here
        elif isinstance(error, Exception):
            decision, reason = decide(state, response=None, status=500, error=error), "error"
        else:
            decision, reason = vanished(state), "worker-interrupted"
        conflict = decision is Decision.RELEASE and claim.is_retryable(error)
        try:
            decision = settle(state, decision, model.StoredResponse(500, kept=False), reason=reason)
            if isinstance(error, Exception) and not claim.stored_within(self.policy.settle_wait):
                self._note_unstored(engine, claim)
        except errors.LeaseLost:
            return self._successor(engine, services, claim) if isinstance(error, errors.LeaseLost) else None
        except (errors.NotCommitted, errors.StoreUnavailable) as failure:
            _log.warning("%s was not committed (%s)", self.operation, cause_of(failure))
        paused = self._note_paused(claim)
        if state.is_refusal(error):
            if isinstance(error, errors.StoreUnavailable | errors.NotCommitted):
                return paused or Later(STORE_RETRY_SECONDS, "store-unavailable")
            # A claim that was lost did not come here: this work took longer than max_runtime.
            if isinstance(error, errors.LeaseLost) and decision is Decision.RELEASE:
                return paused or Later(CONFLICT_RETRY_SECONDS, "released")
            return Dead("outcome-unknown")
        if error is claim.refused_point and isinstance(error, errors.StoreUnavailable):
            return _unavailable(error)
        if conflict and decision is Decision.RELEASE:
            return Later(CONFLICT_RETRY_SECONDS, "transaction-conflict")
        return None

    def _not_granted(self, services: ConsumerServices, error: BaseException, label: str) -> Verdict | None:
        """Return the verdict for a claim that failed, or None for an error that is no verdict."""
        if isinstance(error, errors.CorruptRecord):
            return Dead("record-corrupt")
        if not isinstance(error, errors.StoreUnavailable):
            return None
        if not isinstance(error, errors.StoreDataLoss):  # the engine has published that
            services.observers(StoreFailed(label, self.operation, error=cause_of(error), unprotected=False))
        services.outages.refused(self.operation, error)
        return _unavailable(error)

    def _note_unstored(self, engine: Engine, claim: Claim) -> None:
        """Remember a write that the store has not taken, for later deliveries and for the end of this process."""
        # Those that other processes have been given again are never asked for here.
        for rid, (_, noted) in list(self._unstored.items()):
            if not noted.repeating:
                self._unstored.pop(rid, None)
        self._unstored[claim.key.rid] = os.getpid(), claim
        drain_at_exit(engine)

    def _is_unstored(self, rid: bytes) -> bool:
        """Wait for the write that an earlier delivery left to be repeated. Return whether the store has still not taken it.

        A claim now could find the lease expired, and call an outcome unknown that this process knows.
        """
        process, claim = self._unstored.get(rid, (0, None))
        if claim is None:
            return False
        if process == os.getpid():  # in a forked child, no thread repeats it
            with suppress(errors.LeaseLost), self._shield():
                claim.stored_within(self.policy.settle_wait)
            if claim.repeating:
                return True
        self._unstored.pop(rid, None)
        return False

    def _note_paused(self, claim: Claim) -> Later | None:
        """Return the verdict for a message that is paused. Its next attempt does not count as one after a vanished worker.

        A record counts attempts, and not how they ended. So each process leaves out the pauses that it has seen, and a
        message that pauses in several processes is set aside a little earlier than `max_attempts` says.
        """
        rid = claim.key.rid
        if claim.steps is None or not claim.paused:
            self._paused.pop(rid, None)
            return None
        if len(self._paused) >= MAX_CACHED:
            self._paused.clear()
        self._paused[rid] = self._paused.get(rid, 0) + 1
        return Later(CONFLICT_RETRY_SECONDS, "paused")

    def _successor(self, engine: Engine, services: ConsumerServices, claim: Claim) -> Verdict:
        """Return the verdict for work that lost its claim: that of the worker that has it, or had it."""
        try:
            outcome = engine.successor(claim)
            if isinstance(outcome, model.Unknown) and engine.read(claim.key) is None:
                # That worker failed, or an operator released the key: the next delivery may run.
                return Later(CONFLICT_RETRY_SECONDS, "result-not-stored")
            return self._verdict(services, outcome, claim.label)
        except errors.StoreUnavailable as error:
            return _unavailable(error)
        except errors.CorruptRecord:
            return Dead("record-corrupt")

    def _verdict(self, services: ConsumerServices, outcome: Outcome, label: str) -> Verdict:
        """Return the verdict for an outcome that is no claim."""
        match outcome:
            case Replay(response=response):
                services.observers(ReplayServed(label, self.operation, status=response.status, kept=response.kept))
                with suppress(ValueError):
                    if response.kept:
                        return Processed(self._load(response.body), replayed=True)
                return Processed(None, replayed=True, kept=False)
            case model.Erased() | model.Expired():
                return Processed(None, replayed=True, kept=False)
            case model.InFlight(left):
                after = min(max(left, SHORTEST_WAIT_SECONDS), IN_FLIGHT_CAP_SECONDS)
                return Later(after, "in-flight", lease_left=max(left, 0.0))
            case model.Mismatched():
                return Dead("message-reused")
            case model.Unknown(reason):
                return Dead("too-many-attempts" if reason == TOO_MANY_ATTEMPTS else "outcome-unknown")
            case Claim() | model.OverQuota() | model.Voided():
                raise AssertionError(
                    "a message is in no quota, its key is never voided, and a claim is no outcome here"
                )

    def _stored(self, value: Any) -> model.StoredResponse:
        """Return what a record holds of this value. A value above `max_result` leaves a tombstone.

        Raises `TypeError`, `ValueError` or `RecursionError` for a value that is no JSON.
        """
        data = self._dump(value)
        if len(data) > self.policy.max_result:
            return model.StoredResponse(200, kept=False)
        return model.StoredResponse(200, body=data)

    def _stored_or_tombstone(self, value: Any) -> model.StoredResponse:
        try:
            return self._stored(value)
        except Exception as error:  # noqa: BLE001 - a value's own methods may raise anything
            if not self._warned:
                self._warned = True
                _log.warning(
                    "%s returned a value that is no JSON (%s), so replays have no value. Return None, or text, numbers, lists "
                    "and mappings of them. This is logged once in each process.",
                    self.operation,
                    type(error).__name__,
                )
            return model.StoredResponse(200, kept=False)

    def _run_unprotected(self, services: ConsumerServices, state: Running, work: Callable[[], Any]) -> Verdict:
        """Do the work without a claim: the extension is switched off. Rows of transactional work are ours to commit."""
        transactions = None if services.built is None else services.built.engine.transactions
        if transactions is None and self.policy.effects == "transactional":
            # The work does not commit, and neither could we: its rows would be lost without a word.
            self.policy.check(joint=False)
        state.transactions = transactions
        token = running.set((state, ending.request_context()))
        try:
            if self.policy.effects != "transactional" or transactions is None:
                return Processed(_call(work), replayed=False, kept=False)
            # Work without a claim may commit by itself.
            transaction = transactions.join((), b"", operation=self.operation, on_early_commit=lambda: None)
            try:
                value = _call(work)
                transaction.commit(to_several=True)
            except BaseException:
                transaction.roll_back()
                raise
            finally:
                transaction.leave()
            return Processed(value, replayed=False, kept=False)
        finally:
            running.reset(token)


_engines: WeakSet[Engine] = WeakSet()
"""Those that `drain` is for."""


def drain_at_exit(engine: Engine) -> None:
    """Drain this engine before this process ends, and before whatever else runs at its end."""
    _engines.add(engine)
    atexit.unregister(drain)
    atexit.register(drain)


def drain() -> None:
    """Give the writes that stores have not taken some time before this process ends, because they would end with it."""
    for engine in list(_engines):
        if left := engine.drain(DRAIN_SECONDS):
            _log.error("%d records could not be written before the process ended: their leases expire", left)


def _to_json(value: Any) -> bytes:
    """Return the canonical JSON of this value. Raises `TypeError`, `ValueError` or `RecursionError` for any other value."""
    check_names(value)
    return json.dumps(value, allow_nan=False, separators=(",", ":"), sort_keys=True).encode("ascii")


def check_names(value: Any) -> None:
    """Raise `TypeError` for a mapping with a name that is no string: JSON would turn it into one."""
    if isinstance(value, dict):
        for name, member in value.items():
            if not isinstance(name, str):
                raise TypeError(f"JSON names members by strings, not by {type(name).__name__}")
            check_names(member)
    elif isinstance(value, list | tuple):
        for member in value:
            check_names(member)


def _call(work: Callable[[], Any]) -> Any:
    """Call the work. Raises `TypeError` if that has only made a coroutine or a generator: no work was done yet."""
    value = work()
    if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
        if hasattr(value, "close"):
            value.close()
        raise TypeError(_NOT_DONE.format(kind=type(value).__name__))
    return value


_NOT_DONE: Final = (
    "the work returned a {kind}, so it is not done yet. Pass a function that does the work and returns its value: run a "
    "coroutine by asyncio.run(…), and exhaust a generator."
)


def _check_arguments(message_id: Any, work: Any, payload: Any, tenant: Any, born: Any) -> None:
    if message_id is None or message_id == "":
        raise MissingMessageId(
            "the message has no id. Let its sender set one that stays the same when it repeats the message; never use a "
            "delivery tag."
        )
    if not isinstance(message_id, str):
        raise TypeError(
            f"message_id must be a string, not {type(message_id).__name__}: decode bytes, and format numbers."
        )
    if not callable(work):
        raise TypeError(
            f"work must be a function without arguments, not {type(work).__name__}: pass lambda: book(event)."
        )
    for kind, found in (
        ("coroutine", inspect.iscoroutinefunction),
        ("generator", inspect.isgeneratorfunction),
        ("generator", inspect.isasyncgenfunction),
    ):
        if found(work) or found(getattr(work, "__call__", None)):  # noqa: B004 - a callable object's own function
            raise TypeError(_NOT_DONE.format(kind=kind))
    if payload is not None and not isinstance(payload, bytes | bytearray | memoryview):
        raise TypeError(f"payload must be bytes, not {type(payload).__name__}: pass the body as it arrived.")
    if tenant is not None and (not isinstance(tenant, str) or not tenant or len(tenant) > LONGEST_NAME):
        raise TypeError(f"tenant must be None or a string of 1 to {LONGEST_NAME} characters.")
    if born is None:
        return
    if isinstance(born, bool) or not isinstance(born, int | float):
        raise TypeError(f"born must be seconds since the epoch, not {type(born).__name__}: pass datetime.timestamp().")
    if not math.isfinite(born) or not 0 <= born <= model.LATEST:
        raise ValueError("born must be seconds since the epoch: divide milliseconds by 1000.")


def _unavailable(error: errors.StoreUnavailable) -> Later:
    """Return the verdict for a store that did not grant or show a claim."""
    reason = outage_of(error)
    return Later(LOSS_RETRY_SECONDS if reason == "memory-lost" else STORE_RETRY_SECONDS, reason)
