"""Tell OpenTelemetry what became of each request: attributes and links of the current span, and metrics.

Needs `opentelemetry-api`: pip install 'flask-idempotency[otel]'. It makes no span and sets up no SDK: your instrumentation of
Flask does that. A span gets no key, tenant or principal. The metrics are those of `metrics.py`, with the same labels, without
the times of store calls: OpenTelemetry's instrumentations of redis and SQLAlchemy measure those.

A record keeps the span of the run that holds its key, as `traceparent` has it. Requests that meet the record link to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from threading import Lock
from typing import Final
from weakref import WeakSet

from flask import Flask
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from flask_idempotency.engine import events
from flask_idempotency.engine.claim import Claim
from flask_idempotency.engine.engine import Outcome, Replay
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.events import Event
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.model import InFlight, Record
from flask_idempotency.metrics import APP, COUNTED, FAMILIES, GAUGES, Gauges

__all__: list[str] = []

OUTCOME: Final = "idempotency.outcome"
"""`first`, `takeover`, `replayed`, or the code of the problem that refused the request."""
ATTEMPT: Final = "idempotency.attempt"
FENCE: Final = "idempotency.fence"
ENDING: Final = "idempotency.ending"
"""`completed`, `released`, `quarantined` or `paused`: what became of the record when the view had ended."""
MET_AS: Final = "idempotency.met_as"
"""On a link: `replay`, `conflict` or `resume`."""

_ENDINGS: Final = (events.Completed, events.Released, events.Quarantined, events.Paused)
_COUNTERS: Final = [short for short, about in FAMILIES.items() if not about.buckets]
_UNITS: Final = {"seconds": "s", "bytes": "By"}

_TRACEPARENT: Final = TraceContextTextMapPropagator()

_log = logging.getLogger("flask_idempotency")


class Telemetry:
    """What one application tells OpenTelemetry."""

    def __init__(self, app: Flask, *, name: str) -> None:
        """`name` is the value of the attribute `app` of each metric."""
        self._name = printable(name)
        self._counts: dict[str, dict[tuple[str, ...], float]] = {family: {} for family in _COUNTERS}
        self._known: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
        self._unlock()
        after_fork(self._unlock)
        _apps.add(self)
        _gauges.add(app, name=self._name)

    def _unlock(self) -> None:
        # An exporter's thread may hold it while a server forks its workers.
        self._lock = Lock()

    def trace(self) -> str:
        """Return the current span as `traceparent` has it, for a record. Empty if there is none."""
        here = trace.get_current_span().get_span_context()
        return f"00-{here.trace_id:032x}-{here.span_id:016x}-{here.trace_flags:02x}" if here.is_valid else ""

    def decided(self, outcome: Outcome, holder: Callable[[], Record | None]) -> None:
        """Link the current span to the run that this request met. `holder` reads the record, for a conflict alone."""
        try:
            span = trace.get_current_span()
            if not span.is_recording():
                return
            if isinstance(outcome, Claim):
                met_as, found = "resume", outcome.taken_from
            elif isinstance(outcome, Replay):
                met_as, found = "replay", outcome.record.info.trace
                span.set_attributes({ATTEMPT: outcome.record.attempt, FENCE: outcome.record.fence})
            elif isinstance(outcome, InFlight):
                record = holder()
                met_as, found = "conflict", "" if record is None else record.info.trace
            else:
                return
            context = _context_of(found)
            if context is not None:
                span.add_link(context, {MET_AS: met_as})
        except (StoreUnavailable, CorruptRecord):
            pass  # the request has its outcome
        except Exception:  # noqa: BLE001 - whatever it is, the payment goes on
            _log.exception("a span could not be linked")

    def event(self, event: Event) -> None:
        """Count this event, and note on the current span what it says of the request."""
        kind, counted = type(event), COUNTED[type(event)]
        span = trace.get_current_span()
        if isinstance(event, events.ClaimGranted):
            outcome = "takeover" if event.attempt > 1 else "first"
            span.set_attributes({OUTCOME: outcome, ATTEMPT: event.attempt, FENCE: event.fence})
        elif isinstance(event, events.ReplayServed):
            span.set_attribute(OUTCOME, "replayed")
        elif isinstance(event, _ENDINGS):
            span.set_attribute(ENDING, kind.__name__.lower())
        if isinstance(counted, str):
            return
        for counts in counted:
            for values, amount in counts.samples(event):
                if counts.family == "refusals":
                    span.set_attribute(OUTCOME, values[0])
                about = FAMILIES[counts.family]
                folded = about.folded(values)
                if about.buckets:
                    _histograms[counts.family].record(amount, self._attributes(counts.family, folded))
                    continue
                # A counter of the SDK takes 15 µs for each sample. This one is read when the SDK collects.
                with self._lock:
                    known = self._counts[counts.family]
                    known[folded] = known.get(folded, 0.0) + amount

    def observations(self, family: str) -> list[Observation]:
        """Return the counts of this family so far."""
        with self._lock:
            known = list(self._counts[family].items())
        return [Observation(count, self._attributes(family, values)) for values, count in known]

    def _attributes(self, family: str, values: tuple[str, ...]) -> dict[str, str]:
        found = self._known.get((family, values))
        if found is None:
            labels = zip(FAMILIES[family].labels, map(printable, values), strict=True)
            found = self._known[family, values] = {APP: self._name, **dict(labels)}
        return found


def _context_of(text: str) -> SpanContext | None:
    """Return the span of a record. None: it has none, or not one that this release wrote."""
    if not text.startswith("00-"):
        return None
    found = _TRACEPARENT.extract({"traceparent": text}, Context())
    context = trace.get_current_span(found).get_span_context()
    return context if context.is_valid else None


# Of the process, not of an application: an SDK warns of a second instrument of the same name. They follow a provider that is
# set later.

_meter: Final = metrics.get_meter("flask_idempotency")
_apps: Final = WeakSet[Telemetry]()
"""The applications whose counts an SDK reads when it collects."""
_gauges: Final = Gauges()
"""What reads the stores when an SDK collects, at most once in ten seconds."""
_histograms: Final[Mapping[str, metrics.Histogram]] = {
    short: _meter.create_histogram(
        f"idempotency.{short.rpartition('_')[0]}",
        unit=_UNITS[short.rpartition("_")[2]],
        description=about.help,
        explicit_bucket_boundaries_advisory=about.buckets,
    )
    for short, about in FAMILIES.items()
    if about.buckets and short != "store_call_duration_seconds"
}
"""By the short names of their families."""

NEVER_SECONDS: Final = 1e12
"""The age of a task that never ran. An SDK drops infinity and logs that at each export, so no alert would see it."""


def _read_counts(family: str, _: CallbackOptions) -> Iterable[Observation]:
    for app in list(_apps):
        yield from app.observations(family)


def _read_gauge(name: str, _: CallbackOptions) -> Iterable[Observation]:
    for family in _gauges.collect():
        if family.name == name:
            yield from (Observation(min(sample.value, NEVER_SECONDS), sample.labels) for sample in family.samples)


for _short in _COUNTERS:
    _meter.create_observable_counter(
        f"idempotency.{_short}", [partial(_read_counts, _short)], description=FAMILIES[_short].help
    )
for _name, (_about, _) in GAUGES.items():
    _meter.create_observable_gauge(
        f"idempotency.{_name.removeprefix('idempotency_')}", [partial(_read_gauge, _name)], description=_about
    )
