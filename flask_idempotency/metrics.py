"""Count events and store calls for Prometheus, and read gauges from the stores when a scrape comes.

Needs `prometheus_client`: pip install 'flask-idempotency[metrics]'. This module serves no `/metrics`. No label takes a
value that a client sends: each label has a fixed set of values, and any other value becomes `other`. Only `step` is the name
of a step, which your code lists. Scrapes ask a store at most once in ten seconds.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from math import inf
from threading import Lock
from types import MappingProxyType
from typing import Any, Final, TypeAlias, get_args
from weakref import WeakKeyDictionary

from flask import Flask
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from flask_idempotency.assembly import Services
from flask_idempotency.engine import events
from flask_idempotency.engine.activity import OBSERVED
from flask_idempotency.engine.audit import RESOLVER
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.journal import Effects
from flask_idempotency.engine.model import DataLoss
from flask_idempotency.engine.outbox import OutboxCounts
from flask_idempotency.engine.tasks import late_tasks
from flask_idempotency.maintenance.finish import FinishReport
from flask_idempotency.maintenance.janitor import TASKS, ExpireReport, ReconcileReport
from flask_idempotency.maintenance.reap import ReapReport
from flask_idempotency.maintenance.relay import RelayReport
from flask_idempotency.maintenance.rotate import RotateReport
from flask_idempotency.stores.timed import Call, Ending

__all__ = ["gauges_of"]

# The metrics, their labels, and every value of a label.

APP: Final = "app"
"""The label with the application's namespace, by default its name. Its values are not fixed here."""

OTHER: Final = "other"

ANY: Final[tuple[str, ...]] = ()
"""The values of a label that your code bounds, and that are not fixed here."""

_ANSWERS = ("kept", "tombstone")
_CLASSES = ("2xx", "3xx", "4xx", "5xx", OTHER)
_CAUSES = (
    *(f"status-{each}" for each in _CLASSES[:-1]),
    *("error", "stream-failed", "unanswered", "uncaptured", "worker-interrupted"),
    *("too-many-attempts", "returned", "not-committed"),
)
_RELEASES = (*_CAUSES, OTHER)
_QUARANTINES = (*_CAUSES, "lease-expired", "step-in-doubt", "steps-changed", "never-resumed", "memory-lost", OTHER)
_REFUSALS = (
    *("in-flight", "key-reused", "outcome-unknown", "quota-exceeded", "response-erased", "key-voided", "key-expired"),
    "memory-lost",
    *("replay-forbidden", "record-corrupt"),
)
_ACTIONS = (
    *("tenant-erased", "responses-sealed", "quota-set", "store-initialised", "data-loss-acknowledged"),
    *("message-retried", "message-discarded"),
)
_RESOLVED_BY = ("resolver", "person")
_SENT = ("sent", "delayed", "dead")
_COUNTS = tuple(
    dict.fromkeys(
        count.name
        for report in (ReapReport, FinishReport, ExpireReport, RotateReport, ReconcileReport, RelayReport)
        for count in fields(report)
        if count.name != "finished" and count.compare
    )
)

Made: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric, and the values of its labels other than `app`."""

    name: str
    """Without `idempotency_`, with which a scrape shows it."""
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    """The buckets of a histogram. A counter has none."""

    @property
    def exposed(self) -> str:
        """The name that a scrape shows."""
        return f"idempotency_{self.name}" if self.buckets else f"idempotency_{self.name}_total"

    def folded(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """Return these label values, each unknown one as `other`."""
        return tuple(
            value if known is ANY or value in known else OTHER
            for value, known in zip(values, self.labels.values(), strict=True)
        )

    def every(self) -> list[tuple[str, ...]]:
        """Return every combination of label values. A label that takes any counts once, as `other`."""
        return list(product(*(known or (OTHER,) for known in self.labels.values())))


# Milliseconds for a near store; a second or two before a request gives up.
_LATENCY = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_RUNS = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 3600.0)
_STEP_RUNS = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0)
_STEP_SIZES = (512.0, 4096.0, 16384.0, 65536.0)
_SIZES = (128.0, 512.0, 2048.0, 8192.0, 32768.0, 131072.0, 524288.0, 2097152.0)

_TASKS = (*TASKS, OTHER)


def _family(name: str, help: str, *, buckets: tuple[float, ...] = (), **labels: tuple[str, ...]) -> Family:
    return Family(name, help, labels, buckets)


_FAMILIES = (
    _family("claims", "Requests that claimed their key.", kind=("first", "takeover")),
    _family("replays", "Stored responses that were replayed.", answer=_ANSWERS),
    _family("refusals", "Refused requests, by the code of the problem.", code=_REFUSALS),
    _family(
        "observations",
        "What enforcing would have done with requests that are only observed, and how they ended.",
        outcome=(*OBSERVED, OTHER),
    ),
    _family(
        "quota_refusals",
        "Requests refused because their tenant reached a limit, by the limit.",
        limit=("records", "bytes", "in-flight", "new-keys", OTHER),
    ),
    _family(
        "data_losses",
        "Data losses that a request or the janitor detected, by kind.",
        loss=(*(loss.value for loss in DataLoss), OTHER),
    ),
    _family("restored_claims", "Claims that workers restored after a data loss."),
    _family("voided_keys", "Keys that clients and operators voided."),
    _family("completions", "Responses that the store saved.", status=_CLASSES, answer=_ANSWERS),
    _family("response_size_bytes", "Sizes of stored responses, as they were sent.", buckets=_SIZES),
    _family("releases", "Keys that were released.", cause=_RELEASES),
    _family("quarantines", "Keys that a worker or the janitor quarantined, by cause.", cause=_QUARANTINES),
    _family("pauses", "Requests that were paused between two steps, by cause.", cause=_RELEASES),
    _family(
        "finish_tries",
        "Tries of the janitor to finish a request that no client retries, by how they ended.",
        outcome=("completed", "failed", "quarantined"),
    ),
    _family("finish_gave_up", "Requests that the janitor tried to finish for the last time."),
    _family(
        "steps",
        "Steps of requests, by name, by kind and by what happened.",
        step=ANY,
        effects=(*get_args(Effects), OTHER),
        outcome=("finished", "recalled", "failed", "in-doubt", "not-kept"),
    ),
    _family("step_duration_seconds", "Run times of steps that finished.", buckets=_STEP_RUNS),
    _family("step_result_size_bytes", "Sizes of the results of steps.", buckets=_STEP_SIZES),
    _family(
        "step_resolutions",
        "Steps that operators and resolvers settled, or may have (uncertain).",
        verb=("completed", "never-happened", "uncertain", OTHER),
        by=_RESOLVED_BY,
    ),
    _family("lease_losses", "Workers that lost their claim before their work ended."),
    _family("renewal_failures", "Lease renewals that failed and are retried."),
    _family("max_runtime_exceeded", "Views that ran longer than max_runtime."),
    _family("early_commits", "Transactional views that committed before their response was known."),
    _family(
        "completion_failures",
        "Responses that the store did not save: retried (delayed), or given up (abandoned).",
        outcome=("delayed", "abandoned"),
    ),
    _family(
        "resolutions",
        "Keys that operators and resolvers resolved, or may have (uncertain).",
        verb=("completed", "released", "reopened", "resumed", "uncertain", OTHER),
        by=_RESOLVED_BY,
    ),
    _family("resolver_undecided", "Resolver calls that resolved no key.", answer=("still-unknown", "failed")),
    _family(
        "store_failures",
        "Claims that the store could not decide, by what happened to the request.",
        request=("refused", "unprotected"),
    ),
    _family("corrupt_records", "Stored records that are unreadable."),
    _family("operator_actions", "Actions of operators on whole tenants and on the store.", change=_ACTIONS),
    _family("outbox_attempts", "Messages of the outbox that a relay tried to send, by the result.", result=_SENT),
    _family("task_runs", "Runs of janitor tasks.", task=_TASKS, outcome=("finished", "unfinished", "failed")),
    _family("task_duration_seconds", "Run times of janitor tasks.", task=_TASKS, buckets=_RUNS),
    _family(
        "task_counts", "Work of janitor tasks, by the counts of their reports.", task=_TASKS, count=(*_COUNTS, OTHER)
    ),
    _family(
        "store_call_duration_seconds",
        "Response times of the store, by call.",
        call=get_args(Call),
        outcome=get_args(Ending),
        buckets=_LATENCY,
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({each.name: each for each in _FAMILIES})
"""Every counter and histogram, by its short name."""

_made: WeakKeyDictionary[CollectorRegistry, Made] = WeakKeyDictionary()


def made_in(registry: CollectorRegistry) -> Made:
    """Return the metrics of this registry by short name. All applications in a process share them."""
    if registry not in _made:

        def made(each: Family) -> Counter | Histogram:
            kind = partial(Histogram, buckets=each.buckets) if each.buckets else Counter
            return kind(f"idempotency_{each.name}", each.help, (APP, *each.labels), registry=registry)

        _made[registry] = {name: made(each) for name, each in FAMILIES.items()}
    return _made[registry]


# Gauges, read from the stores at a scrape.

REMEMBERED_SECONDS: Final = 10.0
"""Seconds for which scrapes share one reading. Prometheus scrapes about every 15 seconds."""

GAUGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "idempotency_store_up": ("1 if the store responded to the last scrape, else 0.", ()),
    "idempotency_unsettled_records": ("Records that are not completed.", ("state",)),
    "idempotency_unsettled_age_seconds": ("How long the oldest of them has had no worker.", ("state",)),
    "idempotency_task_age_seconds": (
        "Time since a task last reported. Infinite for one that should run and never did.",
        ("task",),
    ),
    "idempotency_task_interval_seconds": ("Time between two runs of each task that should run.", ("task",)),
    "idempotency_outbox_messages": ("Messages that are not sent yet.", ("state",)),
    "idempotency_outbox_age_seconds": ("How long the oldest message has been due.", ()),
    "idempotency_clock_skew_seconds": ("How far the store's clock was ahead of the janitor's host.", ()),
}


Reading: TypeAlias = list[tuple[str, tuple[str, ...], float]]
"""What a store answered at a scrape: the gauges, their labels and values."""


class Gauges(Collector):
    """Read the stores of applications at a scrape. Keeps no application alive."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._apps: dict[str, weakref.ref[Flask]] = {}
        self._read: dict[str, tuple[float, Reading]] = {}
        self._unlock()
        after_fork(self._unlock)

    def _unlock(self) -> None:
        self._lock = Lock()

    def add(self, app: Flask, *, name: str) -> None:
        """Read this application too, in place of an earlier one of the same name."""
        with self._lock:
            self._apps[name] = weakref.ref(app)
            self._read.pop(name, None)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        # Without this a registry would scrape when we register, before the application is set up.
        return _families().values()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = _families()
        # One at a time: a scrape that waits here shares the reading of the first.
        with self._lock:
            for name in list(self._apps):
                reading = self._reading(name)
                for gauge, labels, value in reading or ():
                    families[f"idempotency_{gauge}"].add_metric((name, *labels), value)
        return families.values()

    def _reading(self, name: str) -> Reading | None:
        """Return a reading of this application's store. None: the application is gone, or has no store."""
        app = self._apps[name]()
        if app is None:
            del self._apps[name]
            self._read.pop(name, None)
            return None
        now = self._monotonic()
        at, known = self._read.get(name, (0.0, None))
        if known is not None and now - at < REMEMBERED_SECONDS:
            return known
        built: Services | None = getattr(app.extensions.get("idempotency"), "built", None)
        if built is None:
            return None
        reading = _ask(built, app.extensions.get("idempotency_outbox"), app.extensions["idempotency"])
        # Keep a failure too: more questions do not end an outage.
        self._read[name] = self._monotonic(), reading
        return reading


_watching: WeakKeyDictionary[CollectorRegistry, Gauges] = WeakKeyDictionary()


def watch(app: Flask, *, name: str, registry: CollectorRegistry) -> None:
    """Let scrapes of this registry read the store of this application."""
    if registry not in _watching:
        gauges = _watching[registry] = Gauges()
        registry.register(gauges)
    _watching[registry].add(app, name=name)


def gauges_of(app: Flask) -> Gauges:
    """Return a collector of this application's gauges alone. Register it if several processes share the other metrics.

    It reads the store when Prometheus scrapes, at most once in ten seconds. If the store does not respond, the other
    metrics are still served.
    """
    state: Any = app.extensions["idempotency"]
    gauges = Gauges()
    gauges.add(app, name=state.settings.namespace)
    return gauges


def _ask(built: Services, outbox: Any, state: Any) -> Reading:
    read: Reading = []
    if outbox is not None:
        # It may be in another database than the store.
        with suppress(Exception):
            waiting: OutboxCounts = outbox.table.counts()
            read += [("outbox_messages", (state,), getattr(waiting, state)) for state in ("waiting", "dead")]
            read.append(("outbox_age_seconds", (), waiting.oldest))
    try:
        standing = None if built.recovery is None else built.recovery.counts()
        last = {} if built.tasks is None else built.tasks.reports()
    except Exception:  # noqa: BLE001 - a scrape must still get the other metrics
        return [*read, ("store_up", (), 0.0)]
    read.append(("store_up", (), 1.0))
    if standing is not None:
        read += [
            ("unsettled_records", ("in-flight",), standing.in_flight),
            ("unsettled_records", ("lapsed",), standing.lapsed),
            ("unsettled_records", ("quarantined",), standing.quarantined),
            ("unsettled_age_seconds", ("lapsed",), standing.lapsed_for or 0.0),
            ("unsettled_age_seconds", ("quarantined",), standing.quarantined_for or 0.0),
        ]
    due = {} if built.tasks is None else state.due_tasks
    if due:
        late = late_tasks(last, due, heartbeat_interval=state.settings.heartbeat_interval)
        read += [("task_age_seconds", (each.task,), inf) for each in late if each.ago is None]
        read += [("task_interval_seconds", (task,), every) for task, every in due.items()]
    read += [("task_age_seconds", (task,), last[task].ago) for task in TASKS if task in last]
    skew_ms = last["heartbeat"].whole("skew_ms") if "heartbeat" in last else None
    return read if skew_ms is None else [*read, ("clock_skew_seconds", (), skew_ms / 1000)]


def _families() -> dict[str, GaugeMetricFamily]:
    return {name: GaugeMetricFamily(name, about, labels=(APP, *labels)) for name, (about, labels) in GAUGES.items()}


# The metrics of each event.

Sample: TypeAlias = tuple[tuple[str, ...], float]
"""Label values, and the increment of a counter or the observation of a histogram."""


@dataclass(frozen=True, slots=True)
class Counts:
    """One metric that an event changes."""

    family: str
    samples: Callable[[Any], Iterable[Sample]]


def _counts(family: str, *labels: Callable[[Any], str] | str) -> Counts:
    """Return the metric that rises by 1, with these labels: texts, or functions of the event."""
    if not any(map(callable, labels)):
        samples = ((tuple(map(str, labels)), 1.0),)
        return Counts(family, lambda event: samples)
    return Counts(
        family,
        lambda event: ((tuple([label if isinstance(label, str) else label(event) for label in labels]), 1.0),),
    )


def _observed(family: str, value: Callable[[Any], float]) -> Counts:
    return Counts(family, lambda event: (((), float(value(event))),))


def _answer(event: events.ReplayServed | events.Completed) -> str:
    return "kept" if event.kept else "tombstone"


def _cause(event: events.Released | events.Quarantined | events.Paused) -> str:
    if event.reason.startswith("status-"):
        return f"{event.reason[: len('status-') + 1]}xx"
    return event.reason


def _verb(event: events.Resolved | events.StepSettled) -> str:
    return event.verb if event.certain else "uncertain"


def _by(event: events.Resolved | events.StepSettled) -> str:
    return "resolver" if event.actor == RESOLVER else "person"


def _step(outcome: str) -> Counts:
    return _counts("steps", lambda event: event.step, lambda event: event.effects, outcome)


def _outcome(event: events.TaskRun) -> str:
    return "failed" if event.error else "finished" if event.finished else "unfinished"


def _task_counts(event: events.TaskRun) -> Iterable[Sample]:
    # The numbers of a heartbeat are no counts, and may be below 0.
    if event.operation == "heartbeat":
        return ()
    return [((event.operation, name), float(count)) for name, count in event.counts.items() if count > 0]


COUNTED: Mapping[type[Event], tuple[Counts, ...] | str] = MappingProxyType(
    {
        events.ClaimGranted: (_counts("claims", lambda event: "takeover" if event.attempt > 1 else "first"),),
        events.ReplayServed: (_counts("replays", _answer),),
        events.ConflictRefused: (_counts("refusals", "in-flight"),),
        events.MismatchRefused: (_counts("refusals", "key-reused"),),
        events.UnknownRefused: (_counts("refusals", "outcome-unknown"),),
        events.QuotaRefused: (
            _counts("refusals", "quota-exceeded"),
            _counts("quota_refusals", lambda event: str(event.limit)),
        ),
        events.ErasedRefused: (_counts("refusals", "response-erased"),),
        events.VoidedRefused: (_counts("refusals", "key-voided"),),
        events.ExpiredRefused: (_counts("refusals", "key-expired"),),
        events.RefusedAfterDataLoss: (_counts("refusals", "memory-lost"),),
        events.DataLossDetected: (_counts("data_losses", lambda event: str(event.loss)),),
        events.ClaimRestored: (_counts("restored_claims"),),
        events.KeyVoided: (_counts("voided_keys"),),
        events.Completed: (
            _counts("completions", lambda event: f"{event.status // 100}xx", _answer),
            Counts("response_size_bytes", lambda event: (((), float(event.byte_size)),) if event.kept else ()),
        ),
        events.Released: (_counts("releases", _cause),),
        events.Quarantined: (_counts("quarantines", _cause),),
        events.Paused: (_counts("pauses", _cause),),
        events.StepFinished: (
            _step("finished"),
            _observed("step_duration_seconds", lambda event: event.seconds),
            _observed("step_result_size_bytes", lambda event: event.byte_size),
        ),
        events.StepRecalled: (_step("recalled"),),
        events.StepFailed: (_step("failed"),),
        events.StepDoubtful: (_step("in-doubt"),),
        events.StepResultNotKept: (_step("not-kept"),),
        events.StepsChangedHeld: '`idempotency_quarantines_total{cause="steps-changed"}` counts it',
        events.StepSettled: (_counts("step_resolutions", _verb, _by),),
        events.CommittedEarly: (_counts("early_commits"),),
        events.LeaseExpired: (_counts("lease_losses"),),
        events.RenewalFailed: (_counts("renewal_failures"),),
        events.MaxRuntimeExceeded: (_counts("max_runtime_exceeded"),),
        events.CompletionRetrying: (_counts("completion_failures", "delayed"),),
        events.CompletionFailed: (_counts("completion_failures", "abandoned"),),
        events.StoreFailed: (
            _counts("store_failures", lambda event: "unprotected" if event.unprotected else "refused"),
        ),
        events.RecordCorrupt: (_counts("refusals", "record-corrupt"), _counts("corrupt_records")),
        events.ReplayForbidden: (_counts("refusals", "replay-forbidden"),),
        events.Reaped: (_counts("quarantines", "lease-expired"),),
        events.FinishTried: (_counts("finish_tries", lambda event: event.outcome),),
        events.FinishGaveUp: (_counts("finish_gave_up"),),
        events.Resolved: (_counts("resolutions", _verb, _by),),
        events.ResolverAsked: (
            _counts("resolver_undecided", lambda event: event.answer if event.answer == "still-unknown" else "failed"),
        ),
        events.Observation: (_counts("observations", lambda event: event.outcome),),
        events.TenantErased: (_counts("operator_actions", "tenant-erased"),),
        events.ResponsesSealed: (_counts("operator_actions", "responses-sealed"),),
        events.QuotaSet: (_counts("operator_actions", "quota-set"),),
        events.StoreInitialised: (_counts("operator_actions", "store-initialised"),),
        events.DataLossAcknowledged: (_counts("operator_actions", "data-loss-acknowledged"),),
        events.TaskRun: (
            _counts("task_runs", lambda event: event.operation, _outcome),
            Counts("task_duration_seconds", lambda event: (((event.operation,), event.seconds),)),
            Counts("task_counts", _task_counts),
        ),
        events.MessagesRelayed: (
            Counts("outbox_attempts", lambda event: [((each,), float(getattr(event, each))) for each in _SENT]),
        ),
        events.MessageDead: '`idempotency_outbox_attempts_total{result="dead"}` counts it',
        events.MessageSettled: (_counts("operator_actions", lambda event: f"message-{event.verb}"),),
        events.JanitorMissing: "`idempotency_task_age_seconds` shows it for as long as it lasts",
    }
)
"""Every event and the metrics that it changes, or a text with the reason that it changes none."""


class Meter:
    """Count the events and store calls of one application, in metrics that all applications of a registry share."""

    def __init__(self, app: Flask, *, name: str, registry: CollectorRegistry = REGISTRY) -> None:
        """`name` is the value of the label `app`. A scrape reads the store of the latest application of a name."""
        self._name = printable(name)
        self._made = made_in(registry)
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        for family, about in FAMILIES.items():
            # Start every series at 0: an alert does not see the first rise of a series that does not exist.
            if not about.buckets and len(about.labels) < 2:
                for values in about.every():
                    self._child(family, values)
        watch(app, name=self._name, registry=registry)

    def event(self, event: Event) -> None:
        """Count this event."""
        counted = COUNTED[type(event)]
        if isinstance(counted, str):
            return
        for counts in counted:
            for values, amount in counts.samples(event):
                self._child(counts.family, values)(amount)

    def call(self, call: Call, ending: Ending, seconds: float) -> None:
        """Count this call of the store."""
        self._child("store_call_duration_seconds", (call, ending))(seconds)

    def _child(self, family: str, values: tuple[str, ...]) -> Any:
        """Return the function that takes this sample. Cached, because the client library finds a child under a lock."""
        child = self._children.get((family, values))
        if child is None:
            about = FAMILIES[family]
            folded = about.folded(values)
            metric = self._made[family].labels(self._name, *map(printable, folded))
            child = metric.observe if about.buckets else metric.inc
            # Cache by the folded values: the others may be anything, and would stay for ever.
            self._children[family, folded] = child
        return child
