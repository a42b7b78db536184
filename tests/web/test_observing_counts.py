"""The same requests, once observed and once enforced: every count agrees, on every store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Event, Semaphore
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flask_idempotency.engine import activity as names
from flask_idempotency.engine.keys import owner_mark
from flask_idempotency.operations.report import report
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from tests.apps import FaultyMemory
from tests.backends import BACKENDS
from tests.lab.programs import REDIS_KINDS
from tests.sql_backends import maria_database, sql_databases, sql_stores
from tests.stages import CORE
from tests.web.observed import NAME, WAIT_SECONDS, Guise, guarded, in_threads, joined, plain

__all__ = ["maria_database", "sql_databases", "sql_stores"]

STORES = (*CORE, *(f"{kind}-url" for kind in REDIS_KINDS[1:]))

ONLY_OBSERVED = {names.UNKEYED, names.SETS_COOKIE}
"""Enforcing counts neither."""


@dataclass
class Pair:
    """Two stores of one kind, with clocks that go together."""

    make: Callable[[Any], Any]
    clock: FrozenClock = field(default_factory=FrozenClock)

    def guises(self, **policy: Any) -> tuple[Guise, Guise]:
        """Return an observing and an enforcing application. On a shared server their names tell their keys apart."""
        return tuple(  # type: ignore[return-value]
            guarded(self.make(self.clock), mode=mode, namespace=f"{NAME}.{uuid4().hex}", **policy)
            for mode in ("observe", "enforce")
        )


@pytest.fixture(params=STORES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with ExitStack() as ends:
        yield Pair(BACKENDS[request.param](request, ends))


def counts_of(guise: Guise) -> Counter[str]:
    """Return what was counted, without what only one mode counts."""
    state = guise.app.extensions["idempotency"]
    assert state.activity.flush()
    found: Counter[str] = Counter()
    for each in report(state.built.activity, owner_mark(state.settings.namespace), seconds=3600).endpoints.values():
        found.update(each.counts)
    return Counter({name: number for name, number in found.items() if number and name not in ONLY_OBSERVED})


ACME = [("X-Tenant", "acme")]
OPERATIONS: Sequence[dict[str, Any]] = (
    *({"key": f"first-{number}", "data": b"a"} for number in range(5)),
    *({"key": f"first-{number}", "data": b"a"} for number in (0, 1, 1, 4)),
    *({"key": f"first-{number}", "data": b"changed"} for number in (0, 2)),
    {"key": "first-0", "data": b"a", "path": "/other"},
    {"key": "first-0", "data": b"a", "path": "/pay?x=1"},
    {"key": "first-0", "data": b"a", "method": "PUT"},
    {"key": "first-0", "data": b"a", "headers": ACME},
    {"key": "first-0", "data": b"b", "headers": [*ACME, ("X-User", "bob")]},
    *({"key": "first-0", "data": b"a", "headers": ACME} for _ in range(2)),
    *({"key": None} for _ in range(3)),
    *({"key": key} for key in ("a,b", '"open', "", "x" * 256, "not visible")),
    {"key": "long", "data": b"x" * 2001},
    *(
        {"key": do, "do": do}
        for do in (
            "raise", "abort", "point", "point-503", "large", "cookie", "session", "stream", "stream-large",
            "stream-raises", "hook-raises", "hook-500", "file", "200", "204", "302", "401", "404", "409", "422", "429", "500",
            "501", "503",
        )
        for _ in range(2)
    ),
)  # fmt: skip
"""First requests, retries, other payloads and paths, other tenants and callers, missing and malformed keys, each failure."""


def at_once(guise: Guise, number: int, *, all_run: bool) -> None:
    """Send this many equal requests, all while the first is in its view."""
    guise.entered, guise.leave = Semaphore(0), Event()
    first = in_threads(1, lambda: guise.send(key="at-once", do="hold"))
    assert guise.entered.acquire(timeout=WAIT_SECONDS)
    others = in_threads(number - 1, lambda: guise.send(key="at-once", do="hold"))
    if all_run:
        for _ in range(number - 1):
            assert guise.entered.acquire(timeout=WAIT_SECONDS)
    else:
        joined(others)
    guise.leave.set()
    joined([*first, *others])


def test_the_counts_of_both_modes_agree(pair: Pair) -> None:
    both_count_alike(pair, effects="plain", required=True)


@pytest.mark.parametrize(("effects", "required"), (("marked", False), ("deduplicated", True)))
def test_the_counts_agree_under_other_effects(effects: str, required: bool) -> None:
    both_count_alike(in_memory(), effects=effects, required=required)


def in_memory() -> Pair:
    return Pair(lambda clock: FaultyMemory(MemoryStore(clock=clock)))


def both_count_alike(pair: Pair, *, effects: str, required: bool) -> None:
    observed, enforced = pair.guises(effects=effects, required=required)

    for guise in (observed, enforced):
        for about in OPERATIONS:
            guise.send(**about)
        at_once(guise, 16, all_run=guise is observed)

    counted = counts_of(enforced)
    assert counts_of(observed) == counted
    assert (15, 3 if required else 0) == (counted["conflict"], counted["missing-key"])
    # So that no kind of outcome is missing by accident.
    expected = {"new", "replayed", "conflict", "mismatch", "bad-request", "completed", "released", "not-kept"}
    assert expected | ({"unknown", "quarantined"} if effects != "deduplicated" else set()) <= counted.keys()
    assert len(observed.runs) == len(OPERATIONS) + 16
    assert enforced.runs.count("hold") == 1


@pytest.mark.parametrize(("effects", "expected"), (("plain", "unknown"), ("deduplicated", "taken-over")))
def test_a_lapsed_lease_counts_alike(pair: Pair, effects: str, expected: str) -> None:
    """A worker that was stopped for longer than its lease."""
    observed, enforced = pair.guises(effects=effects)
    for guise in (observed, enforced):
        guise.entered, guise.leave = Semaphore(0), Event()
    threads = [*in_threads(1, lambda: observed.send(do="hold")), *in_threads(1, lambda: enforced.send(do="hold"))]
    for guise in (observed, enforced):
        assert guise.entered.acquire(timeout=WAIT_SECONDS)
    pair.clock.advance(31)

    for guise in (observed, enforced):
        guise.send()
    assert [1, 1] == [counts_of(guise)[expected] for guise in (observed, enforced)]
    for guise in (observed, enforced):
        guise.leave.set()
    joined(threads)


def test_keys_are_forgotten_alike(pair: Pair) -> None:
    """After `keep`, a key is new."""
    observed, enforced = pair.guises(keep=3600, on_error="quarantine")
    for guise in (observed, enforced):
        guise.send(key="kept")
        guise.send(key="kept")
    pair.clock.advance(3700)
    for guise in (observed, enforced):
        guise.send(key="kept")

    assert counts_of(enforced) == counts_of(observed)
    assert 2 == counts_of(enforced)["new"]


def keeps_or_releases(response: Any, error: BaseException | None) -> str:
    return "keep" if error is None else "release"


def fails(response: Any, error: BaseException | None) -> str:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "policy",
    (
        {"on_error": "release"},
        {"on_error": "keep"},
        {"keep_statuses": ["5xx"], "release_statuses": [409]},
        {"profile": "stripe"},
        {"profile": "playbook"},
        {"scope": "operation"},
        {"fingerprint": "raw"},
        {"key_format": "uuid"},
        {"decide": keeps_or_releases},
        {"decide": fails},
        {"on_abandoned": "takeover"},
        {"max_body": 2},
    ),
    ids=lambda policy: (
        "-".join(policy) + f"-{len(str(policy))}" if "decide" not in policy else policy["decide"].__name__
    ),
)
def test_the_counts_agree_under_other_policies(policy: dict[str, Any]) -> None:
    observed, enforced = in_memory().guises(**policy)

    for guise in (observed, enforced):
        for about in OPERATIONS:
            guise.send(**about)

    assert counts_of(enforced) == counts_of(observed)


def test_a_duplicate_that_would_wait_is_counted_apart() -> None:
    """Enforcing counts how its wait ended."""
    observed, _ = in_memory().guises(in_flight="wait")
    at_once(observed, 16, all_run=True)

    assert {"new": 1, "wait": 15, "completed": 1} == counts_of(observed)


DEEDS = ("", "raise", "500", "503", "401", "422", "large", "stream", "stream-large", "stream-raises", "point")
REQUESTS = st.fixed_dictionaries(
    {
        "key": st.sampled_from(("a", "b", "c", None, "x,y")),
        "data": st.sampled_from((b"", b"one", b"two", b"x" * 2001)),
        "do": st.sampled_from(DEEDS),
        "path": st.sampled_from(("/pay", "/other", "/pay?x=1", "/nowhere")),
        "headers": st.sampled_from(([], ACME, [("X-User", "bob")], [("Cookie", "a=b")])),
        "method": st.sampled_from(("POST", "POST", "PUT", "GET")),
    }
)  # fmt: skip


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(REQUESTS, max_size=10),
    effects=st.sampled_from(("plain", "marked", "deduplicated")),
    required=st.booleans(),
    step=st.sampled_from((0.0, 20.0, 1000.0, 90_000.0)),
)
def test_any_requests_count_alike_and_get_the_response_of_the_bare_application(
    requests: list[dict[str, Any]], effects: str, required: bool, step: float
) -> None:
    """Byte for byte and header for header. The clock goes on between requests, so that keys expire."""
    pair = in_memory()
    observed, enforced = pair.guises(effects=effects, required=required)
    bare = plain()

    for about in requests:
        assert bare.send(**about) == observed.send(**about)
        enforced.send(**about)
        pair.clock.advance(step)
    assert bare.runs == observed.runs
    pair.clock.advance(-step * len(requests))
    assert counts_of(enforced) == counts_of(observed)
