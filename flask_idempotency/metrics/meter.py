"""Counts what one application is told, and times what its store is asked."""

from __future__ import annotations

from typing import Any

from flask import Flask
from prometheus_client import REGISTRY, CollectorRegistry

from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.events import Event
from flask_idempotency.metrics.counted import COUNTED, Uncounted
from flask_idempotency.metrics.families import FAMILIES, made_in
from flask_idempotency.metrics.gauges import watch
from flask_idempotency.stores.timed import Call, Ending


class Meter:
    """An application's own, on metrics that all applications of a registry share."""

    def __init__(self, app: Flask, *, name: str, registry: CollectorRegistry = REGISTRY) -> None:
        """`name` is what the label `app` says. The latest application of a name is the one whose store a scrape asks."""
        self._name = printable(name)
        self._made = made_in(registry)
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        for family, about in FAMILIES.items():
            # What never happened is 0, and not absent: nobody can be alerted to the first rise of what is not there.
            if not about.buckets and len(about.labels) < 2:
                for values in about.every():
                    self._child(family, values)
        watch(app, name=self._name, registry=registry)

    def event(self, event: Event) -> None:
        """Count this event."""
        counted = COUNTED[type(event)]
        if isinstance(counted, Uncounted):
            return
        for counts in counted:
            for values, amount in counts.samples(event):
                self._child(counts.family, values)(amount)

    def call(self, call: Call, ending: Ending, seconds: float) -> None:
        """Count this call of the store."""
        self._child("store_call_duration_seconds", (call, ending))(seconds)

    def _child(self, family: str, values: tuple[str, ...]) -> Any:
        """What takes this sample. Found once: the client library looks for a child under a lock."""
        child = self._children.get((family, values))
        if child is None:
            about = FAMILIES[family]
            folded = about.folded(values)
            metric = self._made[family].labels(self._name, *map(printable, folded))
            child = metric.observe if about.buckets else metric.inc
            # By what it was folded to: what was said may be anything, and would be kept for ever.
            self._children[family, folded] = child
        return child
