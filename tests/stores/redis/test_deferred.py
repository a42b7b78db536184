"""Capabilities that a worker imports when it first uses one."""

from __future__ import annotations

import copy
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import fakeredis
import pytest

from flask_idempotency.engine.quota import Usage
from flask_idempotency.stores.redis import store as redis_store
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from flask_idempotency.stores.redis.quota import RedisLedger
from flask_idempotency.stores.redis.store import Deferred, RedisStore, deferred
from flask_idempotency.testing.contract.support import a_key

THREADS = 8
NOTHING = Usage(records=0, bytes=0, in_flight=0, new_keys=0)


@pytest.fixture(name="store")
def on_fakeredis() -> RedisStore:
    return RedisStore(fakeredis.FakeRedis())


def test_the_first_use_makes_the_capability(store: RedisStore) -> None:
    capability: Any = store.ledger
    assert isinstance(capability, Deferred)

    assert store.ledger.usage(a_key().tid) == NOTHING
    assert type(store.ledger) is RedisLedger


def test_threads_that_use_it_first_all_get_the_capability(store: RedisStore) -> None:
    barrier = threading.Barrier(THREADS)

    def use(_: int) -> Usage:
        barrier.wait(60)
        return store.ledger.usage(a_key().tid)

    with ThreadPoolExecutor(THREADS) as threads:
        assert list(threads.map(use, range(THREADS))) == [NOTHING] * THREADS


def test_closing_a_store_makes_nothing(store: RedisStore) -> None:
    notifier: Any = store.notifier
    store.close()

    assert type(notifier) is Deferred


@pytest.mark.parametrize("reached", (True, False))
def test_a_check_without_a_guard_against_data_loss_makes_nothing(reached: bool) -> None:
    server = fakeredis.FakeServer()
    server.connected = reached
    store = RedisStore(fakeredis.FakeRedis(server=server), rules=RedisDataLossPolicy(after_loss="run"))
    store.check()

    detector: Any = store.data_loss
    assert type(detector) is Deferred


def test_another_attribute_is_an_attribute_error(store: RedisStore) -> None:
    ledger: Any = store.ledger

    with pytest.raises(AttributeError, match="'RedisLedger' object has no attribute 'balance'"):
        ledger.balance  # noqa: B018


def test_an_import_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch, store: RedisStore) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(redis_store, "import_module", lambda name: exec(f"import {name}.gone"))  # noqa: S102
        with pytest.raises(ModuleNotFoundError):
            store.ledger.usage(a_key().tid)

    assert store.ledger.usage(a_key().tid) == NOTHING


def test_a_capability_that_was_half_made_is_made_again(monkeypatch: pytest.MonkeyPatch, store: RedisStore) -> None:
    """An exception of a signal may come between any two lines. Here the last one fails."""
    with monkeypatch.context() as patched:
        patched.setattr(redis_store, "import_module", lambda _: SimpleNamespace(RedisLedger=Exception))
        with pytest.raises(TypeError, match="__class__"):
            store.ledger.usage(a_key().tid)

    assert store.ledger.usage(a_key().tid) == NOTHING


def test_a_copy_is_deferred_too() -> None:
    copied = copy.copy(deferred("executor", "RedisCapability", "a server"))

    assert type(copied) is Deferred
    assert copied._server == "a server"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_waits_for_an_import_of_another_thread() -> None:
    """A child would wait for a thread that it does not have."""
    importing, forking = threading.Event(), threading.Event()
    # Python calls these in the reverse order, so this one before that of the store.
    os.register_at_fork(before=forking.set)

    def hold() -> None:
        with redis_store._imports.lock:
            importing.set()
            forking.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert importing.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if redis_store._imports.lock.acquire(timeout=60) else 1)
    thread.join()

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
