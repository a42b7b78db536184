"""What is timed: each path through each application, and how its requests are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from uuid import uuid4

import redis
from flask import Flask

from benchmarks import apps
from benchmarks.calls import Answer, Environ, call, environ, in_flight
from benchmarks.payloads import ANSWER, OTHER_PAYMENT, PAYMENT
from flask_idempotency.stores.memory import MemoryStore

BARE, BY_HAND, OURS, OURS_MEMORY = "bare Flask", "by hand", "ours", "ours, memory"
GET, NO_KEY, FIRST, REPLAY, CONFLICT, MISMATCH = "GET", "POST, no key", "first", "replay", "conflict", "mismatch"
PATHS = (GET, NO_KEY, FIRST, REPLAY, CONFLICT, MISMATCH)

# What the right answer looks like on each path: a case that got another one was not measured.
EXPECTED = {GET: 200, NO_KEY: 201, FIRST: 201, REPLAY: 201, CONFLICT: 409, MISMATCH: 422}


@dataclass(frozen=True, slots=True)
class Case:
    """One path through one application. `make` gives a request that has not been sent before."""

    app: str
    path: str
    flask: Flask
    make: Callable[[], Environ]

    def check(self, answer: Answer) -> None:
        """Raises for an answer that belongs to another path: a fast wrong answer is no measurement."""
        replayed = self.path == REPLAY and self.app.startswith(OURS)
        whole = answer.size == len(ANSWER) or answer.status >= 400
        if (answer.status, answer.replayed, whole) != (EXPECTED[self.path], replayed, True):
            raise RuntimeError(f"{self.app}, {self.path}: got {answer}")


@contextmanager
def all_cases(client: redis.Redis, url: str) -> Iterator[list[Case]]:
    """Every case, ready to be sent; requests that must be in flight are so until the end."""
    with ExitStack() as until_the_end:
        yield [
            *_without_key(BARE, apps.bare()),
            *_by_hand(client),
            *until_the_end.enter_context(our_cases(OURS, url)),
            *until_the_end.enter_context(our_cases(OURS_MEMORY, MemoryStore())),
        ]


@contextmanager
def our_cases(name: str, store: object) -> Iterator[list[Case]]:
    """Every path through this library on one store."""
    gate = apps.Gate()
    app = apps.ours(store, gate=gate)
    with keyed_cases(name, app, gate) as keyed:
        yield [*_without_key(name, app), *keyed]


@contextmanager
def keyed_cases(name: str, app: Flask, gate: apps.Gate) -> Iterator[list[Case]]:
    """The paths of requests with a key through an application of ours, whose `POST /held` waits at this gate."""
    replay = replay_case(name, app)
    known = str(replay.make()["HTTP_IDEMPOTENCY_KEY"])
    with in_flight(app, gate, PAYMENT) as held:
        yield [
            first_case(name, app),
            replay,
            Case(name, CONFLICT, app, partial(_post, "/held", PAYMENT, held)),
            Case(name, MISMATCH, app, partial(_post, "/payments", OTHER_PAYMENT, known)),
        ]


def first_case(name: str, app: Flask) -> Case:
    return Case(name, FIRST, app, _new_key)


def replay_case(name: str, app: Flask) -> Case:
    return Case(name, REPLAY, app, partial(_post, "/payments", PAYMENT, _known_key(app)))


def conflict_case(name: str, app: Flask) -> Case:
    """Of an application that cannot tell a key in flight from one that is there."""
    return Case(name, CONFLICT, app, partial(_post, "/payments", PAYMENT, _known_key(app)))


def no_key_case(name: str, app: Flask) -> Case:
    return Case(name, NO_KEY, app, partial(environ, "POST", "/payments", body=PAYMENT))


def _without_key(name: str, app: Flask) -> list[Case]:
    return [
        Case(name, GET, app, partial(environ, "GET", "/payments/ch_3MmlLrLkdIwHu7ix0snN0B15")),
        no_key_case(name, app),
    ]


def _by_hand(client: redis.Redis) -> list[Case]:
    writing, reading = apps.by_hand_writing(client), apps.by_hand_reading(client)
    return [
        *_without_key(BY_HAND, writing),
        first_case(BY_HAND, writing),
        replay_case(BY_HAND, reading),
        conflict_case(BY_HAND, writing),
    ]


def _known_key(app: Flask) -> str:
    key = str(uuid4())
    for _ in repeat(None, 2):
        call(app, _post("/payments", PAYMENT, key))
    return key


def _new_key() -> Environ:
    return _post("/payments", PAYMENT, str(uuid4()))


def _post(path: str, body: bytes, key: str) -> Environ:
    return environ("POST", path, body=body, key=key)
