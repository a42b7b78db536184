"""Every event of the library, with its log level and its sentence.

To add an event, write its class here and say in `metrics.py` what it counts for. Signals, log lines and the
reference pages follow from the class. No event holds a key, a principal, a token or a body.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from logging import DEBUG, ERROR, INFO, WARNING
from typing import ClassVar, TypeVar, dataclass_transform

from flask_idempotency.engine.activity import UNREMARKABLE
from flask_idempotency.engine.values import valueclass


@valueclass(frozen=True, slots=True)
class Event:
    """An event of one key. `record` is a short keyed hash: it tells two keys apart and leads back to neither."""

    LEVELS: ClassVar[tuple[int, ...]] = (INFO,)
    """Every level at which the log may write this event, lowest first."""
    SENTENCE: ClassVar[str]
    """The first words of its log line. They never vary, so that you can count lines by them."""
    NAME: ClassVar[str] = ""
    """Its name in signals and logs, if the class cannot have it: an exception has that name already."""

    record: str
    operation: str

    def level(self) -> int:
        """Return the log level of this event, one of `LEVELS`."""
        return self.LEVELS[0]


EventT = TypeVar("EventT", bound=Event)
_kinds: list[type[Event]] = []


@dataclass_transform(frozen_default=True)
def _event(sentence: str, *levels: int, name: str = "") -> Callable[[type[EventT]], type[EventT]]:
    """Make a value class of an event, with its `SENTENCE`, its `LEVELS` (of none, INFO) and its `NAME`."""

    def made(cls: type[EventT]) -> type[EventT]:
        kind = valueclass(frozen=True, slots=True)(cls)
        kind.SENTENCE, kind.LEVELS, kind.NAME = sentence, levels or Event.LEVELS, name
        _kinds.append(kind)
        return kind

    return made


@_event("A request claimed its key.", DEBUG, INFO)
class ClaimGranted(Event):
    """A request claimed its key and will run. `attempt` above 1: it took over from a worker whose lease expired."""

    fence: int
    attempt: int

    def level(self) -> int:
        return INFO if self.attempt > 1 else DEBUG


@_event("The client got the stored response again.")
class ReplayServed(Event):
    """The client got the stored response again. `kept` is False if the store had only its tombstone."""

    status: int
    kept: bool


@_event("A retry was refused: the first request is still running.")
class ConflictRefused(Event):
    """The same request was still running. `waited` is how many seconds the retry waited for it."""

    waited: float


@_event("A request was refused: its key belongs to another request.")
class MismatchRefused(Event):
    """The client used the key of another request."""


@_event("A retry was refused: the outcome of the first request is unknown.")
class UnknownRefused(Event):
    """A retry met a quarantined record. `reason` is the code in the record."""

    reason: str


@_event("A request was refused: its tenant has reached a limit.")
class QuotaRefused(Event):
    """The tenant has reached a limit. `limit` is `records`, `bytes`, `in-flight` or `new-keys`."""

    limit: str


@_event("A retry was refused: the response was erased.")
class ErasedRefused(Event):
    """A retry met a response that was erased with its tenant's data key. The retry was refused and did not run."""


@_event("A request was refused: its key was voided.")
class VoidedRefused(Event):
    """A request came with a key that was voided before. It was refused and did not run."""


@_event("A key was voided: no request runs under it.")
class KeyVoided(Event):
    """A client or an operator voided this key: no request runs under it.

    `actor` is `client`, or the operator as named to the command; `reason` is their text.
    """

    actor: str
    reason: str


@_event("A retry was refused: its response is no longer kept, and its key is remembered.")
class ExpiredRefused(Event):
    """A retry came after `keep`, and before the end of `remember`. The retry was refused and did not run."""


@_event("A request was refused: the store may have lost its record.")
class RefusedAfterDataLoss(Event):
    """The store does not know this key and has lost data, so the request was refused. `loss` is a `DataLoss` value."""

    loss: str


@_event(
    "The store may have lost records, and new keys get 503. Find out why (`flask idempotency redis status`), then run "
    "`flask idempotency redis ack`: requests whose records were lost may run a second time.",
    ERROR,
)
class DataLossDetected(Event):
    """A request or the janitor was the first to find that the store lost data. `loss` is a `DataLoss` value."""

    loss: str


@_event("A worker restored its claim, which the store had lost.", WARNING)
class ClaimRestored(Event):
    """A worker restored its claim, which the store had lost."""


@_event("The store saved a response.")
class Completed(Event):
    """The store saved a response. `kept` is False for a tombstone; `byte_size` is the size of what the store got."""

    status: int
    kept: bool
    byte_size: int


@_event("A key was released: the next request may run.")
class Released(Event):
    """The next request with this key may run. `reason` is a short code such as `status-503`."""

    reason: str


@_event("A key is quarantined: the outcome of its request is unknown.", WARNING)
class Quarantined(Event):
    """The worker does not know the outcome. The key does not run again until you or a resolver resolve it."""

    reason: str


@_event("A request is paused: the next retry resumes it.")
class Paused(Event):
    """A request with recorded steps ended without a response to keep. The next retry resumes it.

    `reason` is a short code such as `status-503`.
    """

    reason: str


@valueclass(frozen=True, slots=True)
class _StepEvent(Event):
    """An event of one step. `item` is a keyed hash, empty if there is none."""

    step: str
    effects: str
    item: str


@_event("A step has finished.", DEBUG)
class StepFinished(_StepEvent):
    """A step has finished, and the store has its result. `item` is a keyed hash, empty if there is none.

    `seconds` is how long its function ran, and `byte_size` the size of its result.
    """

    seconds: float
    byte_size: int


@_event("A retry passed a finished step.", DEBUG)
class StepRecalled(_StepEvent):
    """A retry passed a step that had finished before. Its function did not run."""


@_event("A step failed: it may run again.")
class StepFailed(_StepEvent):
    """The function of a step raised, and the step may run again. `error` is the class name of the exception."""

    error: str


@_event("A step is in doubt: it is unknown whether it happened.", WARNING, name="step-in-doubt")
class StepDoubtful(_StepEvent):
    """A plain step has begun, and it is unknown whether it happened. `error` is the class name of the exception."""

    error: str


@_event("The result of a step cannot be stored: the request cannot be resumed past it.", ERROR)
class StepResultNotKept(_StepEvent):
    """A step has finished and its result cannot be stored. The request goes on; it cannot be resumed past this step.

    `why` is `type`, `size` or `total-size`.
    """

    why: str


@_event("A request is quarantined: its recorded steps do not fit the code.", ERROR, name="steps-changed")
class StepsChangedHeld(Event):
    """The recorded steps of a request do not fit the code that runs now, so no further step begins. `step` is the first
    that does not fit, and `why` is `undeclared`, `item`, `order`, `arguments`, `result` or `not-reached`."""

    step: str
    why: str


@_event("A step was settled by an operator or a resolver; or may have been, if not `certain`.", WARNING)
class StepSettled(Event):
    """An operator or a resolver settled a step: an audit event. `verb` is `completed` or `never-happened`.

    `certain` is False if the store did not confirm the change: it may have made it.
    """

    step: str
    item: str
    verb: str
    actor: str
    reason: str
    certain: bool = True


@_event("A transactional view committed before its response was known.", WARNING)
class CommittedEarly(Event):
    """A transactional view committed before its response was known.

    From there on, a worker that vanishes leaves an unknown outcome: at most once, and no longer exactly once.
    """


@_event("A worker lost its claim before its work ended.", WARNING)
class LeaseExpired(Event):
    """A worker found that it had lost its claim. Its response is not sent."""


@_event("A lease renewal failed and will be retried.", INFO, WARNING)
class RenewalFailed(Event):
    """A lease renewal failed; the worker retries it. `error` names the exception, never its text."""

    error: str

    def level(self) -> int:
        # An outage is logged once for all claims; any other error is a surprise.
        return INFO if self.error == "StoreUnavailable" else WARNING


@_event("A view ran longer than max_runtime: its lease is no longer renewed.", WARNING)
class MaxRuntimeExceeded(Event):
    """A view ran longer than `max_runtime`. The worker renews its lease no longer, so it expires while the view runs."""


@_event("The store did not save a response: the write will be retried.", WARNING)
class CompletionRetrying(Event):
    """The work is done and the client has its response, but the store did not save it. The worker retries."""

    error: str


@_event("The store did not save a response in time: the retries have stopped.", ERROR)
class CompletionFailed(Event):
    """The worker stopped its retries: the store did not save a response. The record stays claimed until it expires."""

    error: str


@_event("The store could not decide a claim.", INFO, WARNING)
class StoreFailed(Event):
    """The store could not decide a claim. `unprotected`: the policy let the request run anyway.

    `waiting`: the request waited for another one, and goes on to wait.
    """

    error: str
    unprotected: bool
    waiting: bool = False

    def level(self) -> int:
        # `web/guard.py` reports an outage once; a line for each refusal must not bury the rest of the log.
        return WARNING if self.unprotected else INFO


@_event("A stored record is unreadable.", ERROR)
class RecordCorrupt(Event):
    """A stored record or its response is unreadable. The retry was refused; the record is quarantined."""


@_event("The replay guard of the application refused a replay.")
class ReplayForbidden(Event):
    """The replay guard refused this client a stored response. The record is kept."""


@_event("The janitor quarantined a claim: its lease had expired.", WARNING)
class Reaped(Event):
    """The janitor found a claim with an expired lease and quarantined it, as its policy demands."""


@_event("The janitor tried to finish a request.", INFO, WARNING)
class FinishTried(Event):
    """The janitor has tried to finish a request that no client retried. `number` is that of the try, from 1 up.

    `outcome` is `completed`, `failed`, `quarantined`, or `overtaken` by another attempt. `reason` is a short code: the
    status of the response, the class of an error, the reason of the quarantine, `other-caller`, `other-endpoint` or
    `not-reached`.
    """

    number: int
    outcome: str
    reason: str

    def level(self) -> int:
        return INFO if self.outcome == "completed" else WARNING


@_event("The janitor gave up: a request stopped between two steps, and no try has finished it.", ERROR)
class FinishGaveUp(Event):
    """The janitor has tried to finish a request for the last time. Only its client finishes it now, until `resume_within`."""

    tries: int


@_event("A key was resolved by an operator or a resolver; or may have been, if not `certain`.", WARNING)
class Resolved(Event):
    """An operator or a resolver resolved a key: an audit event.

    `verb` is `completed`, `released`, `reopened` or `resumed`; `was` is the state before; `forced`: a warning was overruled.
    `actor` is `resolver`, or the operator as named to the command; `reason` is their text. `certain` is False if the
    store did not confirm the change: it may have made it.
    """

    verb: str
    was: str
    actor: str
    reason: str
    forced: bool = False
    certain: bool = True


@_event("A resolver did not resolve a key.")
class ResolverAsked(Event):
    """A resolver ran for a key and did not resolve it. `answer` is `still-unknown`, or the class name of its exception."""

    answer: str


@_event("An operator erased the responses of a tenant.", WARNING)
class TenantErased(Event):
    """An operator erased the responses of a tenant: an audit event of no single key. `tenant` is its pseudonym.

    `finished` is False if it is unknown whether all are erased.
    """

    tenant: str
    actor: str
    reason: str
    data_keys: int
    wiped: int
    finished: bool


@_event("An operator sealed plain responses.", WARNING)
class ResponsesSealed(Event):
    """An operator sealed plain responses: an audit event of no single key.

    `sealed` is how many. `finished` is False if the command stopped before the end.
    """

    actor: str
    reason: str
    sealed: int
    finished: bool


@_event("An operator set the limits of a tenant.", WARNING)
class QuotaSet(Event):
    """An operator set the limits of a tenant: an audit event of no single key. `tenant` is its pseudonym."""

    tenant: str
    actor: str
    reason: str
    limits: Mapping[str, object]


@_event("An operator initialised a store.", WARNING)
class StoreInitialised(Event):
    """An operator initialised a store that can lose data, so that keys run in it: an audit event of no single key."""

    actor: str
    reason: str
    store_id: str


@_event("An operator let keys run again that the store may have lost; or tried to, if not `finished`.", WARNING)
class DataLossAcknowledged(Event):
    """An operator let keys run again that the store may have lost: an audit event of no single key.

    `parts` counts the parts of the store by their status before. `forced`: surviving workers had time left to restore
    their claims. `finished` is False if the store did not confirm it.
    """

    actor: str
    reason: str
    forced: bool
    parts: Mapping[str, int]
    finished: bool


@_event("A request was only observed: nothing was refused or replayed.", DEBUG, INFO)
class Observation(Event):
    """A request was only observed: what `mode="enforce"` would have done with it, or made of its record when it ended.

    `outcome` is one of `activity.OBSERVED`, and `caller` one of `activity.CALLERS`: which kind of credential it carried.
    `apart` is how many seconds after the first request a concurrent duplicate came, and `seconds` how long the view ran, with
    the outcomes `completed`, `released` and `quarantined`; else both are 0. `record` is empty if there was no key.
    """

    outcome: str
    caller: str
    apart: float = 0.0
    seconds: float = 0.0

    def level(self) -> int:
        return DEBUG if self.outcome in UNREMARKABLE else INFO


@_event("A janitor task ran.", DEBUG, INFO, WARNING)
class TaskRun(Event):
    """A janitor task ran: an event of no single key. `operation` is its name, `counts` the numbers of its report.

    `finished` is False if its budget or an error ended it; `error` names the exception, never its text.
    """

    seconds: float
    counts: Mapping[str, int]
    finished: bool
    error: str = ""

    def level(self) -> int:
        if self.error:
            return WARNING
        return INFO if any(self.counts.values()) or not self.finished else DEBUG


@_event("A relay sent messages.", DEBUG, WARNING)
class MessagesRelayed(Event):
    """A relay sent messages of an outbox: an event of no single key. `sent`, `delayed` and `dead` are how many."""

    sent: int
    delayed: int
    dead: int

    def level(self) -> int:
        return WARNING if self.delayed or self.dead else DEBUG


@_event("A message can never be sent. Run `flask idempotency outbox retry` or `discard`.", DEBUG, ERROR)
class MessageDead(Event):
    """A message of an outbox can never be sent, and later ones of its topic and key wait for an operator.

    `operation` is the topic, `seq` its number in the outbox, and `cause` says why. `counted`: the run that found it logs one
    line for all of its cause.
    """

    seq: int
    cause: str
    counted: bool = False

    def level(self) -> int:
        return DEBUG if self.counted else ERROR


@_event("An operator retried or discarded a message.", WARNING)
class MessageSettled(Event):
    """An operator retried or discarded a message of an outbox: an audit event of no single key.

    `operation` is the topic, and `verb` is `retried` or `discarded`.
    """

    seq: int
    verb: str
    actor: str
    reason: str


@_event(
    "No janitor has reported for two intervals. Run `celery -A flask_idempotency.janitor worker -B`, or let cron run "
    "`flask idempotency reap` and `expire` and set IDEMPOTENCY_HEARTBEAT_INTERVAL to their interval.",
    WARNING,
)
class JanitorMissing(Event):
    """No janitor has reported for two intervals: an event of no single key. Each process sends it once, until the next
    report."""

    seconds: float


def kinds() -> tuple[type[Event], ...]:
    """Return every event class, in the order of this file."""
    return tuple(_kinds)


def name_of(kind: type[Event]) -> str:
    """Return the name of an event in signals and logs: `claim-granted`."""
    return kind.NAME or re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower()


def facts_of(kind: type[Event]) -> tuple[str, ...]:
    """Return the names of the fields of this event, without `record` and `operation`."""
    return tuple(name for name in kind.__dataclass_fields__ if name not in Event.__dataclass_fields__)


__all__ = ["Event", *(kind.__name__ for kind in _kinds)]
