"""How things stand when somebody looks: read from the stores at a scrape, and not again for a while."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final
from weakref import WeakKeyDictionary

from flask import Flask
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from flask_idempotency.assembly import Built
from flask_idempotency.engine.capabilities import Entry, UnfinishedCounts
from flask_idempotency.maintenance.janitor import CHORES
from flask_idempotency.metrics.families import APP

REMEMBERED_SECONDS: Final = 10.0
"""Scrapes come every 15 seconds or so; more of them at once are one question to the store."""

GAUGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "idempotency_store_up": ("1 if the store answered when it was last asked for what follows, 0 if not.", ()),
    "idempotency_unsettled_records": ("Records that are not completed.", ("state",)),
    "idempotency_unsettled_age_seconds": ("Since when the first of them is without its owner.", ("state",)),
    "idempotency_chore_age_seconds": ("Since when a chore was last reported.", ("chore",)),
    "idempotency_clock_skew_seconds": ("By how much the store's clock was ahead of the janitor's host.", ()),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """What a store said of itself."""

    up: bool
    standing: UnfinishedCounts | None = None
    last: Mapping[str, Entry] = field(default_factory=dict)


class Gauges(Collector):
    """Asks the stores of applications how they stand, when it is scraped. Keeps no application alive."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._apps: dict[str, weakref.ref[Flask]] = {}
        self._read: dict[str, tuple[float, Reading]] = {}
        self._lock = Lock()

    def add(self, app: Flask, *, name: str) -> None:
        """Ask this one too, and no longer the one that had its name before."""
        with self._lock:
            self._apps[name] = weakref.ref(app)
            self._read.pop(name, None)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        # Without this a registry would scrape us when we are registered, and nothing is set up by then.
        return _families().values()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = _families()
        # One at a time: those that are scraped meanwhile get what the first was told.
        with self._lock:
            for name in list(self._apps):
                reading = self._reading(name)
                if reading is not None:
                    _show(families, name, reading)
        return families.values()

    def _reading(self, name: str) -> Reading | None:
        """How this application's store stands. None: the application has gone, or has none."""
        app = self._apps[name]()
        if app is None:
            del self._apps[name]
            self._read.pop(name, None)
            return None
        now = self._monotonic()
        at, known = self._read.get(name, (0.0, None))
        if known is not None and now - at < REMEMBERED_SECONDS:
            return known
        built: Built | None = getattr(app.extensions.get("idempotency"), "built", None)
        if built is None:
            return None
        reading = _ask(built)
        # Also that it did not answer: an outage is not made shorter by asking.
        self._read[name] = self._monotonic(), reading
        return reading


_watching: WeakKeyDictionary[CollectorRegistry, Gauges] = WeakKeyDictionary()


def watch(app: Flask, *, name: str, registry: CollectorRegistry) -> None:
    """Have scrapes of this registry ask the store of this application."""
    if registry not in _watching:
        gauges = _watching[registry] = Gauges()
        registry.register(gauges)
    _watching[registry].add(app, name=name)


def gauges_of(app: Flask) -> Gauges:
    """A collector of this application's gauges alone, to be registered where the rest comes from several processes."""
    state: Any = app.extensions["idempotency"]
    gauges = Gauges()
    gauges.add(app, name=state.settings.namespace)
    return gauges


def _ask(built: Built) -> Reading:
    try:
        standing = None if built.unsettled is None else built.unsettled.standing()
        last = {} if built.chores is None else built.chores.last()
    except Exception:  # noqa: BLE001 - whatever it is, the other metrics are to be scraped
        return Reading(up=False)
    return Reading(up=True, standing=standing, last=last)


def _families() -> dict[str, GaugeMetricFamily]:
    return {name: GaugeMetricFamily(name, about, labels=(APP, *labels)) for name, (about, labels) in GAUGES.items()}


def _show(families: Mapping[str, GaugeMetricFamily], app: str, reading: Reading) -> None:
    def show(name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            families[f"idempotency_{name}"].add_metric((app, *labels), value)

    show("store_up", float(reading.up))
    if (standing := reading.standing) is not None:
        show("unsettled_records", standing.in_flight, "in-flight")
        show("unsettled_records", standing.lapsed, "lapsed")
        show("unsettled_records", standing.quarantined, "quarantined")
        show("unsettled_age_seconds", standing.lapsed_for or 0.0, "lapsed")
        show("unsettled_age_seconds", standing.quarantined_for or 0.0, "quarantined")
    for chore in CHORES:
        if (entry := reading.last.get(chore)) is not None:
            show("chore_age_seconds", entry.ago, chore)
    show("clock_skew_seconds", _skew(reading.last.get("heartbeat")))


def _skew(entry: Entry | None) -> float | None:
    skew_ms = None if entry is None else entry.whole("skew_ms")
    return None if skew_ms is None else skew_ms / 1000
