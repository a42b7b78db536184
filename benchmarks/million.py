"""A claim among a million live keys of one tenant, beside one in an empty store: the same must not take twice as long."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter_ns
from uuid import uuid4

import redis

from benchmarks import budgets
from benchmarks.apps import APP, PRINCIPAL, SECRET
from benchmarks.budgets import at_most
from benchmarks.machine import Cores, pin
from benchmarks.payloads import ANSWER
from benchmarks.rounds import quantile
from benchmarks.table import Row, Section
from example_app.demo.servers import RedisServer
from flask_idempotency.assembly import build_store
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.fingerprint import SIZE
from flask_idempotency.engine.keys import Identity, Scope, StorageKey
from flask_idempotency.engine.model import Claimed, ClaimRequest, OnLapse, Result
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.engine.store import Binding, Store
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.data_loss import MemoryRules
from flask_idempotency.stores.redis.store import RedisStore

KEYS = 1_000_000
ROUNDS = 20
CLAIMS = 500
KEEP_SECONDS = 24 * 3600

SPREAD_SECONDS = 23 * 3600
"""Over which the full store's keys were answered: in every bucket of the ledger are some, and none has ended."""

QUOTA = Quota(records=10 * KEYS, bytes=10**15, in_flight=KEYS, new_keys=NewKeys(10 * KEYS, 3600))

NOTE = (
    "µs of `claim` with every limit of a quota on the store itself, new keys of one tenant, interleaved rounds on two "
    "servers of which one is full. Its records were claimed and completed one by one, by a clock that ran through a day."
)


def section(cores: Cores, *, keys: int = KEYS) -> Section:
    with ExitStack() as running:
        empty = running.enter_context(_server(cores))
        full = running.enter_context(_server(cores))
        used, ledger = fill(full, keys)
        stores = {
            empty: build_store(empty, memory={"after_loss": "run"}),
            full: build_store(full, memory={"after_loss": "run"}),
        }
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
        [
            Row("empty", cells[0]),
            Row("full", {**cells[1], "× empty": ratio, "MB used": used / 1e6}, [verdict]),
            Row("the tenant's ledger", {"bytes": ledger}, [at_most("< 4 KB", ledger, budgets.LEDGER_BYTES)]),
        ],
    )


def fill(url: str, keys: int) -> tuple[int, int]:
    """That many live records of one tenant. The memory that the server then uses, and that its ledger does."""
    identity, scope = Identity(SECRET.encode()), Scope(APP, tenant=None, principal=PRINCIPAL)
    began, number = time.time() - SPREAD_SECONDS, 0
    store = RedisStore(url, rules=MemoryRules(after_loss="run"), clock=lambda: began + SPREAD_SECONDS * number / keys)
    payload = EnvelopeCodec().seal(Result(201, body=ANSWER), _UNBOUND)
    for number in range(keys):
        key, token = identity.storage_key(scope, str(number)), os.urandom(16)
        request = ClaimRequest(key=key, fingerprint=os.urandom(SIZE), on_lapse=OnLapse.QUARANTINE)
        assert isinstance(store.claim(request, token=token, lease=30, quota=QUOTA), Claimed)
        store.complete(key, token, payload, keep=KEEP_SECONDS)
    store.close()
    with redis.Redis.from_url(url) as client:
        name = layout.ledger(identity.tenant_id(APP, None))
        return int(client.info("memory")["used_memory"]), int(client.memory_usage(name, samples=0) or 0)


_UNBOUND = Binding(StorageKey(b"", b""), b"", 0, b"")
"""What is not encrypted opens anywhere."""


def _claims(store: Store) -> list[float]:
    # Of the same tenant as the records: what a tenant's keys share must be what has a million of them.
    identity, scope = Identity(SECRET.encode()), Scope(APP, tenant=None, principal=PRINCIPAL)
    taken = []
    for _ in range(CLAIMS):
        key, token = identity.storage_key(scope, str(uuid4())), os.urandom(16)
        request = ClaimRequest(key=key, fingerprint=os.urandom(SIZE), on_lapse=OnLapse.QUARANTINE)
        began = perf_counter_ns()
        outcome = store.claim(request, token=token, lease=30, quota=QUOTA)
        taken.append((perf_counter_ns() - began) / 1000)
        assert isinstance(outcome, Claimed)
        store.release(key, token)
    return taken


@contextmanager
def _server(cores: Cores) -> Iterator[str]:
    with RedisServer() as server:
        pin(server.pid, cores.store)
        yield server.url
