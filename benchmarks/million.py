"""A claim among a million live keys of one tenant, beside one in an empty store: the same must not take twice as long."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter_ns
from uuid import uuid4

import redis

from benchmarks import budgets
from benchmarks.apps import APP, PRINCIPAL, SECRET
from benchmarks.budgets import at_most
from benchmarks.machine import Cores, pin
from benchmarks.memory import kept_keys
from benchmarks.rounds import quantile
from benchmarks.table import Row, Section
from example_app.servers import RedisServer
from flask_idempotency.assembly import build_store
from flask_idempotency.engine.fingerprint import SIZE
from flask_idempotency.engine.key import Identity, Scope
from flask_idempotency.engine.outcome import Claimed
from flask_idempotency.engine.ports import Store
from flask_idempotency.engine.record import OnLapse
from flask_idempotency.engine.request import ClaimRequest

KEYS = 1_000_000
BATCH = 1_000
ROUNDS = 20
CLAIMS = 500
KEEP_MS = 24 * 3600 * 1000

NOTE = (
    "µs of `claim` on the store itself, new keys, interleaved rounds on two servers of which one is full. "
    "The full one holds copies of one answered request's record under other keys."
)


def section(cores: Cores, *, keys: int = KEYS) -> Section:
    with ExitStack() as running:
        empty = running.enter_context(_server(cores))
        full = running.enter_context(_server(cores))
        used = fill(full, keys)
        stores = {empty: build_store(empty), full: build_store(full)}
        taken: dict[str, list[float]] = {empty: [], full: []}
        for _ in range(ROUNDS):
            for url in random.sample([empty, full], 2):
                taken[url] += _claims(stores[url])
    ratio = quantile(taken[full], 0.99) / quantile(taken[empty], 0.99)
    verdict = at_most("p99 ≤ 2 × empty", ratio, budgets.FULL_TO_EMPTY)
    cells = [{"median": quantile(times, 0.5), "p99": quantile(times, 0.99)} for times in (taken[empty], taken[full])]
    return Section(
        f"Claims among {keys:,} live keys",
        NOTE,
        [Row("empty", cells[0]), Row("full", {**cells[1], "× empty": ratio, "MB used": used / 1e6}, [verdict])],
    )


def fill(url: str, keys: int) -> int:
    """That many live records of one tenant, in the store's own format. The memory that the server then uses."""
    with redis.Redis.from_url(url) as client:
        made = kept_keys(client, url, path="/payments", records=2)
        prefix, suffix = _shared(made), _shared([key[::-1] for key in made])[::-1]
        content, room = client.dump(made[0]), len(made[0]) - len(prefix) - len(suffix)
        assert content is not None
        for _ in range(0, keys, BATCH):
            batch = client.pipeline(transaction=False)
            for _ in range(BATCH):
                batch.restore(prefix + os.urandom(room) + suffix, KEEP_MS, content)
            batch.execute()
        return int(client.info("memory")["used_memory"])


def _shared(names: list[bytes]) -> bytes:
    """What all of them begin with."""
    first, last = min(names), max(names)
    same = [mine == its for mine, its in zip(first, last, strict=False)]
    return first[: [*same, False].index(False)]


def _claims(store: Store) -> list[float]:
    # Of the same tenant as the records: what a tenant's keys share must be what has a million of them.
    identity, scope = Identity(SECRET.encode()), Scope(APP, tenant=None, principal=PRINCIPAL)
    taken = []
    for _ in range(CLAIMS):
        key, token = identity.storage_key(scope, str(uuid4())), os.urandom(16)
        request = ClaimRequest(key=key, fingerprint=os.urandom(SIZE), on_lapse=OnLapse.QUARANTINE)
        began = perf_counter_ns()
        outcome = store.claim(request, token=token, lease=30)
        taken.append((perf_counter_ns() - began) / 1000)
        assert isinstance(outcome, Claimed)
        store.release(key, token)
    return taken


@contextmanager
def _server(cores: Cores) -> Iterator[str]:
    with RedisServer() as server:
        pin(server.pid, cores.store)
        yield server.url
