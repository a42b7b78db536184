"""What it costs a Redis to notice that it has forgotten something, and to have replicas hear of each promise."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from hashlib import sha1
from importlib.resources import files
from statistics import median
from time import perf_counter_ns
from typing import Any, Final
from unittest.mock import patch

import redis

from benchmarks.machine import Cores, pin
from benchmarks.table import Row, Section
from example_app.demo.servers import RedisServer
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, OnLapse
from flask_idempotency.stores.redis import scripts
from flask_idempotency.stores.redis.scripts import Script
from flask_idempotency.stores.redis.store import RedisStore

BLIND: Final = """
local memory = redis.call('HMGET', KEYS[4], FENCE)
local loss, after, noticed, last_before, since = nil, 'refuse', 0, 0, 0
"""
"""What stands in a claim instead of the canary where nobody would look at it: the fence has to be read all the same."""

NOTE = (
    "µs of new claims on the store itself, by one thread, medians of interleaved rounds; `in Redis` is what the server says "
    "that scripts took for each. `×` and `+` are to the first row."
)


def section(cores: Cores, *, rounds: int, requests: int) -> Section:
    with ExitStack() as running:
        primary, replica = (running.enter_context(RedisServer()) for _ in range(2))
        for server in (primary, replica):
            pin(server.pid, cores.store)
        client = running.enter_context(redis.Redis.from_url(primary.url))
        with redis.Redis.from_url(replica.url) as follower:
            follower.replicaof("127.0.0.1", primary.port)
        store = running.enter_context(closing(RedisStore(primary.url)))
        waiting = running.enter_context(closing(RedisStore(primary.url, replicas=1)))
        store.memory.initialise()
        while not client.execute_command("WAIT", 1, 1000):
            pass
        cases = {"as it is": store, "without the canary": store, "one replica waited for": waiting}
        taken: dict[str, list[float]] = {name: [] for name in cases}
        within: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, used in random.sample(list(cases.items()), len(cases)):
                with _blind() if name == "without the canary" else ExitStack():
                    _claim(used)  # so that the server knows the script
                    client.config_resetstat()
                    taken[name].append(median(_claim(used) for _ in range(requests)))
                    within[name].append(_in_scripts(client) / requests)
    return Section("Redis: what it costs to notice a loss, and to wait for a replica", NOTE, list(_rows(taken, within)))


def _rows(taken: dict[str, list[float]], within: dict[str, list[float]]) -> Iterator[Row]:
    floors = taken["as it is"]
    for name, medians in taken.items():
        cells: dict[str, float | str] = {"claim": median(medians), "in Redis": median(within[name])}
        if medians is not floors:
            cells["×"] = median(mine / its for mine, its in zip(medians, floors, strict=True))
            cells["+ in Redis"] = median(mine - its for mine, its in zip(within[name], within["as it is"], strict=True))
        yield Row(name, cells)


def _claim(store: RedisStore) -> float:
    request = ClaimRequest(StorageKey(os.urandom(32), os.urandom(16)), b"\1" + bytes(16), OnLapse.QUARANTINE)
    token = os.urandom(16)
    began = perf_counter_ns()
    store.claim(request, token=token, lease=30)
    return (perf_counter_ns() - began) / 1000


def _in_scripts(client: redis.Redis) -> float:
    told: Any = client.info("commandstats")
    return float(told["cmdstat_evalsha"]["usec"])


@contextmanager
def _blind() -> Iterator[None]:
    """Claims by a script that never asks whose memory it is."""
    folder = files("flask_idempotency.stores.redis").joinpath("lua")
    canary, process = (folder.joinpath(f"{name}.lua").read_text("utf-8") for name in ("canary", "process"))
    text = scripts.CLAIM.text.replace(canary, BLIND).replace(process, "")
    if canary in text or process in text:
        raise RuntimeError("the claim is not made of these parts any more")
    script = Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest(), scripts.CLAIM.parts)
    with patch.object(scripts, "CLAIM", script):
        yield
