"""The test doubles fail, stop and pass calls exactly as a test chooses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore, FrozenClock, Points
from flask_idempotency.testing.contract import StoreContract
from flask_idempotency.testing.contract.support import (
    KEEP,
    LEASE,
    PAYLOAD,
    a_key,
    a_request,
    a_token,
    for_each,
    granted,
)
from flask_idempotency.testing.doubles import VARIABLE, stopped
from tests.tooling.processes import eventually


class TestFaultyStoreWithoutFaults(StoreContract):
    """Told nothing, it is the store that it wraps."""

    @pytest.fixture
    def store(self, clock: FrozenClock) -> FaultyStore:
        return FaultyStore(MemoryStore(clock))


def test_a_lost_request_was_not_applied() -> None:
    """The store never heard of it."""
    store, key = FaultyStore(MemoryStore()), a_key()
    store.lose_request("claim")

    with pytest.raises(StoreUnavailable):
        store.claim(a_request(key), token=a_token(), lease=LEASE)

    assert store.read(key) is None


def test_a_lost_reply_was_applied() -> None:
    """The store has acted, and the caller cannot know."""
    store, key, token = FaultyStore(MemoryStore()), a_key(), a_token()
    store.lose_reply("complete")
    granted(store.claim(a_request(key), token=token, lease=LEASE))

    with pytest.raises(StoreUnavailable):
        store.complete(key, token, PAYLOAD, keep=KEEP)

    record = store.read(key)
    assert record is not None
    assert record.payload == PAYLOAD


def test_faults_count_calls_from_the_moment_of_the_request() -> None:
    """The second call of any kind from now, once."""
    store, key = FaultyStore(MemoryStore()), a_key()
    store.read(key)
    store.lose_request(nth=2)

    store.read(key)
    with pytest.raises(StoreUnavailable):
        store.read(key)
    store.read(key)

    assert store.verbs() == ["read"] * 4


def test_a_store_that_is_down_loses_everything() -> None:
    """Until it is up again."""
    store, key = FaultyStore(MemoryStore()), a_key()
    store.down = True
    with pytest.raises(StoreUnavailable):
        store.read(key)
    store.down = False

    assert store.read(key) is None


def test_calls_are_noted_with_their_tokens() -> None:
    """So a test can check which worker made which call."""
    store, key, token = FaultyStore(MemoryStore()), a_key(), a_token()
    granted(store.claim(a_request(key), token=token, lease=LEASE))
    store.release(key, token)

    assert [(call.verb, call.key, call.token) for call in store.calls] == [
        ("claim", key, token),
        ("release", key, token),
    ]


ROOT = Path(__file__).resolve().parents[2]


PATIENCE_SECONDS = 60.0


WORKER = """
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore, Points
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token

store, key, token = FaultyStore(MemoryStore(), points=Points.from_environment()), a_key(), a_token()
store.claim(a_request(key), token=token, lease=LEASE)
print("claimed", flush=True)
store.complete(key, token, PAYLOAD, keep=KEEP)
print("completed", flush=True)
"""


def worker(points: str) -> subprocess.Popen[str]:
    environment = {**os.environ, VARIABLE: points}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_worker_dies_where_its_environment_says() -> None:
    """Behind the claim, and before it could complete."""
    with worker("kill before complete") as process:
        told, _ = process.communicate(timeout=PATIENCE_SECONDS)

    assert (told, process.returncode) == ("claimed\n", -signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_stands_still_where_its_environment_says_and_goes_on() -> None:
    """The claim was made when it stops, and its caller does not know yet."""
    with worker("stop after claim") as process:
        try:
            halted = eventually(lambda: stopped(process.pid))
            process.send_signal(signal.SIGCONT)
            told, _ = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()

    assert halted
    assert (told, process.returncode) == ("claimed\ncompleted\n", 0)


def test_a_thread_waits_before_its_transition_while_others_pass() -> None:
    """Another worker completes another key at the same time."""
    store, go = FaultyStore(MemoryStore()), Event()
    keys, tokens = [a_key(), a_key()], [a_token(), a_token()]
    for key, token in zip(keys, tokens, strict=True):
        granted(store.claim(a_request(key), token=token, lease=LEASE))
    there = Event()

    def wait_for_go() -> None:
        there.set()
        assert go.wait(PATIENCE_SECONDS)

    store.points.at("before complete", wait_for_go)

    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(store.complete, keys[0], tokens[0], PAYLOAD, keep=KEEP)
        assert there.wait(PATIENCE_SECONDS)
        store.complete(keys[1], tokens[1], PAYLOAD, keep=KEEP)
        states = [str(record.state) for key in keys if (record := store.read(key))]
        go.set()
        slow.result()

    assert len(set(states)) == 2


def test_a_point_counts_its_passages_and_strikes_once() -> None:
    points, struck = Points(), list[str]()
    points.at("here", lambda: struck.append("here"), nth=2)
    for point in ("here", "there", "here", "here"):
        struck.append(f"> {point}")
        points.reach(point)

    assert struck == ["> here", "> there", "> here", "here", "> here"]


@for_each("wish", ("kill", "pause before claim", "kill before claim; stop"))
def test_a_wish_that_cannot_be_read_is_refused(wish: str) -> None:
    """Or a test would pass because nothing happened."""
    with pytest.raises(ValueError, match=VARIABLE):
        Points.from_environment({VARIABLE: wish})


def test_every_wish_in_the_environment_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    acts: dict[str, Callable[[], object]] = {}
    monkeypatch.setattr(Points, "at", lambda _, point, act, *, nth: acts.update({f"{point} {nth}": act}))
    Points.from_environment({VARIABLE: "kill before complete; stop after claim 2;"})

    assert {name: act.__name__ for name, act in acts.items()} == {
        "before complete 1": "kill_process",
        "after claim 2": "stop_process",
    }
