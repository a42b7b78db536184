"""The names of all metrics, their labels, and every value that a label can have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from types import MappingProxyType
from typing import Any, Final, TypeAlias, get_args
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram

from flask_idempotency.engine.capabilities import Loss
from flask_idempotency.maintenance.janitor import CHORES, Expiration, Reconciliation
from flask_idempotency.maintenance.reap import Reaping
from flask_idempotency.maintenance.rotate import Rotation
from flask_idempotency.stores.timed import Call, Ending

APP: Final = "app"
"""The one label that is not a word of ours: the application's namespace, which is its name unless it has another."""

OTHER: Final = "other"

_ANSWERS = ("kept", "tombstone")
_CLASSES = ("2xx", "3xx", "4xx", "5xx", OTHER)
_CAUSES = (
    *(f"status-{each}" for each in _CLASSES[:-1]),
    "error",
    "stream-failed",
    "unanswered",
    "uncaptured",
    "worker-interrupted",
    "not-committed",
    "lease-expired",
    OTHER,
)
_COUNTS = tuple(
    dict.fromkeys(
        count.name
        for report in (Reaping, Expiration, Rotation, Reconciliation)
        for count in fields(report)
        if count.name != "finished"
    )
)

Made: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric, and what its labels can say besides `app`."""

    name: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    """Of a histogram. A counter has none."""

    @property
    def exposed(self) -> str:
        """As a scrape shows it."""
        return self.name if self.buckets else f"{self.name}_total"

    def folded(self, said: tuple[str, ...]) -> tuple[str, ...]:
        """These values, each as one of the fixed set."""
        return tuple(
            value if value in known else OTHER for value, known in zip(said, self.labels.values(), strict=True)
        )

    def every(self) -> list[tuple[str, ...]]:
        return list(product(*self.labels.values()))


# Milliseconds for a store that is near, and a second or two for one that is about to be given up.
_LATENCY = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_RUNS = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 3600.0)
_SIZES = (128.0, 512.0, 2048.0, 8192.0, 32768.0, 131072.0, 524288.0, 2097152.0)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name.removeprefix("idempotency_"): family
        for family in (
            Family("idempotency_claims", "Requests that won their key.", {"kind": ("first", "takeover")}),
            Family("idempotency_replays", "Stored answers given again.", {"answer": _ANSWERS}),
            Family(
                "idempotency_refusals",
                "Requests refused for how their key stands, by the code of the problem.",
                {
                    "code": (
                        "in-flight",
                        "key-reused",
                        "outcome-unknown",
                        "quota-exceeded",
                        "answer-erased",
                        "memory-lost",
                        "replay-forbidden",
                        "record-corrupt",
                    )
                },
            ),
            Family(
                "idempotency_quota_refusals",
                "Requests refused because their tenant has as much as it may, by what it has.",
                {"limit": ("records", "bytes", "in-flight", "new-keys", OTHER)},
            ),
            Family(
                "idempotency_memory_losses",
                "Times that a request or the janitor noticed that the store has lost its memory, by how.",
                {"loss": (*(loss.value for loss in Loss), OTHER)},
            ),
            Family("idempotency_restored_claims", "Claims that their owners put back: the store had forgotten them."),
            Family("idempotency_completions", "Results made durable.", {"status": _CLASSES, "answer": _ANSWERS}),
            Family("idempotency_answer_size_bytes", "Sizes of stored answers, as they were sent.", buckets=_SIZES),
            Family("idempotency_releases", "Keys that may run again.", {"cause": _CAUSES}),
            Family(
                "idempotency_quarantines",
                "Keys whose outcome nobody knows: by their owners' word, or found by a janitor.",
                {"cause": _CAUSES},
            ),
            Family("idempotency_lease_losses", "Owners that learnt that their claim was no longer their own."),
            Family("idempotency_renewal_failures", "Renewals of leases that failed, and are tried again."),
            Family("idempotency_overlong_views", "Views that ran longer than max_runtime."),
            Family("idempotency_early_commits", "Transactional views that committed by themselves."),
            Family(
                "idempotency_settlement_failures",
                "Results that the store did not take: to be tried again, or given up.",
                {"outcome": ("delayed", "abandoned")},
            ),
            Family(
                "idempotency_settled_by_others",
                "Keys settled in their owners' place, or perhaps, where the store did not say.",
                {"verb": ("completed", "released", "reopened", "uncertain", OTHER), "by": ("resolver", "person")},
            ),
            Family(
                "idempotency_resolver_misses",
                "Resolvers that were asked and settled nothing.",
                {"answer": ("still-unknown", "failed")},
            ),
            Family(
                "idempotency_store_failures",
                "Claims that the store could not decide, by what became of the request.",
                {"request": ("refused", "unprotected")},
            ),
            Family("idempotency_corrupt_records", "Stored records that could not be read."),
            Family(
                "idempotency_changes_by_hand",
                "What operators did to whole tenants, and to the store.",
                {"change": ("tenant-erased", "answers-sealed", "quota-set", "store-initialised", "loss-acknowledged")},
            ),
            Family(
                "idempotency_chore_runs",
                "Runs of the janitor's chores.",
                {"chore": (*CHORES, OTHER), "outcome": ("finished", "unfinished", "failed")},
            ),
            Family(
                "idempotency_chore_duration_seconds", "How long chores ran.", {"chore": (*CHORES, OTHER)}, buckets=_RUNS
            ),
            Family(
                "idempotency_chore_counts",
                "What chores did, by the numbers of their reports.",
                {"chore": (*CHORES, OTHER), "count": (*_COUNTS, OTHER)},
            ),
            Family(
                "idempotency_store_call_duration_seconds",
                "How long the store took, call by call.",
                {"call": get_args(Call), "outcome": get_args(Ending)},
                buckets=_LATENCY,
            ),
        )
    }
)
"""Everything that is counted, by its short name."""

_made: WeakKeyDictionary[CollectorRegistry, Made] = WeakKeyDictionary()


def made_in(registry: CollectorRegistry) -> Made:
    """The metrics of this registry, by their short names. Every application in a process shares them."""
    if registry not in _made:
        _made[registry] = {name: _make(family, registry) for name, family in FAMILIES.items()}
    return _made[registry]


def _make(family: Family, registry: CollectorRegistry) -> Counter | Histogram:
    labels = (APP, *family.labels)
    if family.buckets:
        return Histogram(family.name, family.help, labels, buckets=family.buckets, registry=registry)
    return Counter(family.name, family.help, labels, registry=registry)
