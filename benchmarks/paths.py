"""The paths of a request through each application: the cases that a run times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import repeat
from uuid import uuid4

import redis
from flask import Flask

from benchmarks import apps
from benchmarks.apps import OTHER_PAYMENT, PAYMENT
from benchmarks.by_hand import by_hand
from benchmarks.harness import (
    BARE,
    BY_HAND,
    CONFLICT,
    EMPTY_HOOKS,
    FIRST,
    GET,
    MISMATCH,
    NO_KEY,
    OURS,
    PEER,
    REPLAY,
    UNCOMPRESSED,
    Case,
    Environ,
    call,
    environ,
    in_flight,
)

Make = Callable[[redis.Redis, str, apps.Gate], Flask]


def _peer(client: redis.Redis, url: str, gate: apps.Gate) -> Flask:
    # Only the comparison needs this package, and its import takes seconds.
    from benchmarks.peer import peer

    return peer(client, gate=gate)


APPLICATIONS: dict[str, Make] = {
    BARE: lambda client, url, gate: apps.bare(gate=gate),
    EMPTY_HOOKS: lambda client, url, gate: apps.empty_hooks(gate=gate),
    BY_HAND: lambda client, url, gate: by_hand(client, gate=gate),
    OURS: lambda client, url, gate: apps.ours(url, gate=gate),
    UNCOMPRESSED: lambda client, url, gate: apps.ours(url, gate=gate, config={"IDEMPOTENCY_COMPRESSION": "off"}),
    PEER: _peer,
}
"""The payments service on Redis, by the name of what guards it."""

# The utility cannot compare bodies on Redis: see `peer`. Compression changes only what stores or reads a response.
ABSENT = {(PEER, MISMATCH), *((UNCOMPRESSED, path) for path in (GET, NO_KEY, CONFLICT, MISMATCH))}


@contextmanager
def redis_cases(client: redis.Redis, url: str, *names: str) -> Iterator[list[Case]]:
    """Yield every case of these applications. Requests that hold a key stay in flight until the end of the block."""
    with ExitStack() as until_the_end:
        cases: list[Case] = []
        for name in names:
            gate = apps.Gate()
            app = APPLICATIONS[name](client, url, gate)
            cases += _without_key(name, app)
            if name not in (BARE, EMPTY_HOOKS):
                cases += until_the_end.enter_context(keyed_cases(name, app, gate))
        yield [case for case in cases if (case.app, case.path) not in ABSENT]


@contextmanager
def our_cases(name: str, store: object) -> Iterator[list[Case]]:
    """Yield every path through this library on one store."""
    gate = apps.Gate()
    app = apps.ours(store, gate=gate)
    with keyed_cases(name, app, gate) as keyed:
        yield [*_without_key(name, app), *keyed]


@contextmanager
def keyed_cases(name: str, app: Flask, gate: apps.Gate) -> Iterator[list[Case]]:
    """Yield the paths of requests with a key. `POST /held` of this application must wait at this gate."""
    known = known_key(app)
    with in_flight(app, gate, PAYMENT) as held:
        yield [
            Case(name, FIRST, app, _new_key),
            Case(name, REPLAY, app, partial(_post, "/payments", PAYMENT, known)),
            Case(name, CONFLICT, app, partial(_post, "/held", PAYMENT, held)),
            Case(name, MISMATCH, app, partial(_post, "/payments", OTHER_PAYMENT, known)),
        ]


def no_key_case(name: str, app: Flask) -> Case:
    return Case(name, NO_KEY, app, partial(environ, "POST", "/payments", body=PAYMENT))


def known_key(app: Flask) -> str:
    """Return a key that has a stored response."""
    key = str(uuid4())
    for _ in repeat(None, 2):
        call(app, _post("/payments", PAYMENT, key))
    return key


def _without_key(name: str, app: Flask) -> list[Case]:
    return [
        Case(name, GET, app, partial(environ, "GET", "/payments/ch_3MmlLrLkdIwHu7ix0snN0B15")),
        no_key_case(name, app),
    ]


def _new_key() -> Environ:
    return _post("/payments", PAYMENT, str(uuid4()))


def _post(path: str, body: bytes, key: str) -> Environ:
    return environ("POST", path, body=body, key=key)
