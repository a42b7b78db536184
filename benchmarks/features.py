"""What optional features cost: encryption and quotas, a tenant beside one that floods, and the safety of Redis."""

from __future__ import annotations

import os
import random
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter_ns, process_time_ns, sleep
from typing import Any, Final
from unittest.mock import patch
from uuid import uuid4

import redis
from flask import Flask

from benchmarks import apps, report
from benchmarks.apps import ANSWER, LARGE_ANSWER, PAYMENT
from benchmarks.harness import Case, Cores, Environ, Received, Timing, call, environ, measure, pin, quantile
from benchmarks.report import Row, Section, at_most
from example_app.demo.servers import RedisServer
from flask_idempotency.assembly import build_store
from flask_idempotency.codec import canonical
from flask_idempotency.codec.compression import COMPRESSIONS
from flask_idempotency.codec.encryption import DataKeyring, EncryptedCodec
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine import fingerprint
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, Grant, OnExpiry, OverQuota, SealContext, StoredResponse
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Codec
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis import replication, scripts
from flask_idempotency.stores.redis.store import RedisStore

RING = {"IDEMPOTENCY_KEY_RING": "2026-11:" + b64encode(bytes(range(32))).decode()}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no compression": {"IDEMPOTENCY_COMPRESSION": "off"},
    "encrypted": {"IDEMPOTENCY_ENCRYPTION": "on", **RING},
    "with quotas": {"IDEMPOTENCY_QUOTA_RECORDS": 10**9, "IDEMPOTENCY_QUOTA_IN_FLIGHT": 10**6},
    "both": {"IDEMPOTENCY_ENCRYPTION": "on", **RING, "IDEMPOTENCY_QUOTA_RECORDS": 10**9},
}
FIRST, REPLAY, REFUSED = "first", "replay", "over quota"
SIZES = {"2 KB": ("/payments", ANSWER), "256 KB": ("/large", LARGE_ANSWER)}
FLOODED_ROUNDS, FLOODED_CLAIMS, FLOOD = 40, 100, 10


@dataclass(frozen=True, slots=True)
class SizedCase(Case):
    """A case whose response has this size."""

    size: int = 0
    status: int = 201

    def check(self, received: Received) -> None:
        if (received.status, received.replayed) != (self.status, self.path.startswith(REPLAY)):
            raise RuntimeError(f"{self.app}, {self.path}: got {received}")
        if self.status == 201 and received.size != self.size:
            raise RuntimeError(f"{self.app}, {self.path}: got {received.size} bytes, not {self.size}")


def compliance_sections(client: redis.Redis, url: str, *, rounds: int, requests: int) -> list[Section]:
    return [
        _requests(url, rounds=rounds, requests=requests),
        _codecs(rounds=rounds, requests=requests),
        _bodies(rounds=rounds, requests=requests),
        activity_section(url, rounds=rounds * ACTIVITY_ROUNDS, requests=max(1, requests // ACTIVITY_ROUNDS)),
        fairness(url, rounds=min(rounds * 2, FLOODED_ROUNDS)),
    ]


def _requests(url: str, *, rounds: int, requests: int) -> Section:
    cases = [case for name, config in SETTINGS.items() for case in _cases(name, apps.ours(url, config=config))]
    full = apps.ours(url, config={"IDEMPOTENCY_QUOTA_RECORDS": 0, "IDEMPOTENCY_NAMESPACE": "full"})
    cases.append(SizedCase("with quotas", REFUSED, full, partial(_new, "/payments"), status=429))
    # A round of large responses needs fewer of them.
    timings = measure(cases, rounds=rounds, requests=max(1, requests // 4))
    floors = {timing.case.path: timing for timing in timings if timing.case.app == "as it comes"}
    return Section(
        "Compliance: requests in one process, on Redis", REQUESTS_NOTE, [_request_row(each, floors) for each in timings]
    )


REQUESTS_NOTE = (
    "µs through the WSGI callable, medians of interleaved rounds. `+` and `×` compare with the same path as it comes: zlib, "
    "no encryption, no quotas. Sizes are those of the response."
)


def _request_row(timing: Timing, floors: dict[str, Timing]) -> Row:
    cells: dict[str, float | str] = {"median": timing.typical, "cpu": median(timing.processor)}
    floor = floors.get(timing.case.path)
    if floor is not None and floor is not timing:
        cells |= {"+": timing.added_to(floor), "×": timing.ratio_to(floor), "+ cpu": timing.processor_added_to(floor)}
        if timing.case.app == "encrypted" and timing.case.path.endswith("2 KB"):
            most = report.ENCRYPTION_MICROSECONDS
            verdict = at_most(f"≤ +{most:.0f} µs CPU", timing.processor_added_to(floor), most)
            return Row(f"{timing.case.app}: {timing.case.path}", cells, [verdict])
    return Row(f"{timing.case.app}: {timing.case.path}", cells)


def _cases(name: str, app: Flask) -> Iterator[SizedCase]:
    for size, (path, answer) in SIZES.items():
        yield SizedCase(name, f"{FIRST}, {size}", app, partial(_new, path), size=len(answer))
        key = str(uuid4())
        call(app, environ("POST", path, body=PAYMENT, key=key))
        known = partial(environ, "POST", path, body=PAYMENT, key=key)
        yield SizedCase(name, f"{REPLAY}, {size}", app, known, size=len(answer))


def _new(path: str) -> Environ:
    return environ("POST", path, body=PAYMENT, key=str(uuid4()))


def _codecs(*, rounds: int, requests: int) -> Section:
    ring = DataKeyring(KeyRing({"2026-11": os.urandom(32)}), MemoryStore().data_keys)
    plain = EnvelopeCodec(compression=None)
    codecs: dict[str, Codec] = {
        "zlib": EnvelopeCodec(compression=COMPRESSIONS["zlib"]),
        "zstd": EnvelopeCodec(compression=COMPRESSIONS["zstd"]),
        "plain": plain,
        "encrypted": EncryptedCodec(plain, ring),
    }
    binding = SealContext(StorageKey(os.urandom(32), os.urandom(16)), os.urandom(16), 1, b"\1" + bytes(16))
    rows = []
    for size, (_, answer) in SIZES.items():
        result = StoredResponse(
            201, metadata=(("Content-Type", "application/json"), ("Location", apps.LOCATION)), body=answer
        )
        taken: dict[tuple[str, str], list[float]] = {(name, verb): [] for name in codecs for verb in ("seal", "open")}
        for _ in range(rounds):
            for name, codec in random.sample(list(codecs.items()), len(codecs)):
                codec.prepare(binding.key)
                payload = codec.seal(result, binding)
                taken[name, "seal"].append(_timed(partial(codec.seal, result, binding), requests))
                taken[name, "open"].append(_timed(partial(codec.open, payload, binding), requests))
        rows += [
            Row(f"{name}, {size}", {verb: median(taken[name, verb]) for verb in ("seal", "open")}) for name in codecs
        ]
    return Section("Compliance: sealing and opening", "µs of processor time of the codec alone, medians.", rows)


def activity_section(url: str, *, rounds: int, requests: int) -> Section:
    """Time requests with and without activity, in the same short rounds: the difference is small."""
    rows = []
    with ExitStack() as running:
        stores: dict[str, Any] = {"memory": MemoryStore(), "Redis": running.enter_context(closing(RedisStore(url)))}
        for name, store in stores.items():
            cases = [
                case
                for on in (True, False)
                for case in _cases(str(on), apps.ours(store, config={"IDEMPOTENCY_ACTIVITY": on}))
                if case.path.endswith("2 KB")
            ]
            timings = measure(cases, rounds=rounds, requests=requests)
            for off in (timing for timing in timings if timing.case.app == "False"):
                [on] = [each for each in timings if each.case.path == off.case.path and each is not off]
                cells = {"on": on.typical, "off": off.typical, "+": on.added_to(off), "×": on.ratio_to(off)}
                cpu = {"+ cpu": on.processor_added_to(off), "× cpu": on.processor_ratio_to(off)}
                rows.append(Row(f"{name}: {off.case.path.partition(',')[0]}", {**cells, **cpu}))
    return Section("Options: the activity of requests", ACTIVITY_NOTE, rows)


ACTIVITY_ROUNDS: Final = 4
"""Times as many rounds as elsewhere, each as much shorter: a microsecond is less than what two rounds differ by."""

ACTIVITY_NOTE = (
    "µs through the WSGI callable, medians of interleaved rounds: with IDEMPOTENCY_ACTIVITY, as by default, and without it. "
    "The counts stay in the process. In 10 seconds one more call adds them to the store, from another thread."
)


BODIES = {
    "100 B": b'{"account": "acct_1PgafTB7WZ01zgkW", "amount": 125000, "currency": "eur", "description": "Invoice 12"}',
    "300 B": PAYMENT,
    "2 KB": ANSWER,
    "16 KB": apps.payments(77),
}


def _bodies(*, rounds: int, requests: int) -> Section:
    """Time the digest of a JSON body, with the engine's own code and with the extra `speed`."""
    ways = {"plain": fingerprint.json_digest, "with speed": canonical.json_digest}
    rows = []
    for size, body in BODIES.items():
        if canonical.canonical_json(body) is None:
            raise RuntimeError(f"The body of {size} is left to the engine.")
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, digest in random.sample(list(ways.items()), len(ways)):
                taken[name].append(_timed(partial(digest, body), requests))
        ratio = median(its / mine for its, mine in zip(taken["plain"], taken["with speed"], strict=True))
        rows.append(Row(size, {**{name: median(each) for name, each in taken.items()}, "plain ×": ratio}))
    return Section("Options: the digest of a JSON body", BODIES_NOTE, rows)


BODIES_NOTE = (
    "µs of processor time of the digest alone, medians: with the standard library, and with the extra `speed`. `plain ×` "
    "is the first as a multiple of the second."
)


def _timed(work: Callable[[], object], times: int) -> float:
    began = process_time_ns()
    for _ in range(times):
        work()
    return (process_time_ns() - began) / 1000 / times


def fairness(url: str, *, rounds: int) -> Section:
    """Time the claims of one tenant: alone, and while the store refuses another tenant ten times for each of them."""
    rows = []
    with _stores(url) as stores:
        for name, store in stores.items():
            quiet: list[float] = []
            flooded: list[float] = []
            paying, flooding = os.urandom(16), os.urandom(16)
            for _ in range(rounds):
                for taken in random.sample([quiet, flooded], 2):
                    taken += _claims(store, paying, flooding if taken is flooded else None)
            ratio = quantile(flooded, 0.99) / quantile(quiet, 0.99)
            verdict = at_most("p99 within 10 %", ratio, report.FLOODED_TO_QUIET)
            cells = {"median": quantile(quiet, 0.5), "p99": quantile(quiet, 0.99), "flooded": quantile(flooded, 0.5)}
            rows.append(Row(name, {**cells, "p99 flooded": quantile(flooded, 0.99), "×": ratio}, [verdict]))
    return Section("Compliance: a tenant beside one that floods", FLOOD_NOTE, rows)


FLOOD_NOTE = (
    f"µs of `claim` with a quota on the store itself, by one thread: alone, and with {FLOOD} claims of another tenant "
    "between any two, which has reached its limit. So the cost of others is in the state of the store, and not in a queue."
)


def _claims(store: Any, paying: bytes, flooding: bytes | None) -> list[float]:
    taken = []
    for _ in range(FLOODED_CLAIMS):
        if flooding is not None:
            for _ in range(FLOOD):
                assert isinstance(_ask(store, flooding, Quota(records=0))[1], OverQuota)
        began = perf_counter_ns()
        request, outcome, token = _ask(store, paying, Quota(records=10**9, in_flight=10**6))
        taken.append((perf_counter_ns() - began) / 1000)
        assert isinstance(outcome, Grant)
        store.release(request.key, token)
    return taken


def _ask(store: Any, tid: bytes, quota: Quota) -> tuple[ClaimRequest, Any, bytes]:
    request, token = (
        ClaimRequest(StorageKey(os.urandom(32), tid), b"\1" + bytes(16), OnExpiry.QUARANTINE),
        os.urandom(16),
    )
    return request, store.claim(request, token=token, lease=30, quota=quota), token


@contextmanager
def _stores(url: str) -> Iterator[dict[str, Any]]:
    yield {"memory": MemoryStore(), "Redis": build_store(url, memory={"after_loss": "run"})}


BLIND: Final = """
local function data_loss_of(partition)
  return nil, 0, nil, 0, redis.call('HGET', partition, FENCE)
end
"""
"""Replaces lib/data_loss in the claim script. The script must still read the fence."""

DATA_LOSS_NOTE = (
    "µs of new claims on the store itself, by one thread, medians of interleaved rounds. `in Redis` is the time of a script by "
    "the server's statistics. `×` and `+` compare with the first row."
)


def data_loss_section(cores: Cores, *, rounds: int, requests: int) -> Section:
    """Time new claims on Redis: as they are, without the check for data loss, and with one replica to wait for."""
    with ExitStack() as running:
        primary, replica = (running.enter_context(RedisServer()) for _ in range(2))
        for server in (primary, replica):
            pin(server.pid, cores.store)
        client = running.enter_context(redis.Redis.from_url(primary.url))
        with redis.Redis.from_url(replica.url) as follower:
            follower.replicaof("127.0.0.1", primary.port)
            # WAIT alone returns too early: the primary counts a replica that still loads.
            while follower.info("replication")["master_link_status"] != "up":
                sleep(0.005)
        store = running.enter_context(closing(RedisStore(primary.url)))
        with patch.object(replication, "WAIT_SECONDS", 10):  # a busy machine is not a replica that is gone
            waiting = running.enter_context(closing(RedisStore(primary.url, replicas=1)))
        store.data_loss.initialise()
        cases = {"as it is": store, "without the check": store, "one replica waited for": waiting}
        taken: dict[str, list[float]] = {name: [] for name in cases}
        within: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, used in random.sample(list(cases.items()), len(cases)):
                with _without_check() if name == "without the check" else ExitStack():
                    _new_claim(used)  # loads the script
                    client.config_resetstat()
                    taken[name].append(median(_new_claim(used) for _ in range(requests)))
                    within[name].append(_in_scripts(client) / requests)
    return Section(
        "Redis: what it costs to notice a loss, and to wait for a replica",
        DATA_LOSS_NOTE,
        list(_data_loss_rows(taken, within)),
    )


def _data_loss_rows(taken: dict[str, list[float]], within: dict[str, list[float]]) -> Iterator[Row]:
    floors = taken["as it is"]
    for name, medians in taken.items():
        cells: dict[str, float | str] = {"claim": median(medians), "in Redis": median(within[name])}
        if medians is not floors:
            cells["×"] = median(mine / its for mine, its in zip(medians, floors, strict=True))
            cells["+ in Redis"] = median(mine - its for mine, its in zip(within[name], within["as it is"], strict=True))
        yield Row(name, cells)


def _new_claim(store: RedisStore) -> float:
    request = ClaimRequest(StorageKey(os.urandom(32), os.urandom(16)), b"\1" + bytes(16), OnExpiry.QUARANTINE)
    token = os.urandom(16)
    began = perf_counter_ns()
    store.claim(request, token=token, lease=30)
    return (perf_counter_ns() - began) / 1000


def _in_scripts(client: redis.Redis) -> float:
    statistics: Any = client.info("commandstats")
    return float(statistics["cmdstat_evalsha"]["usec"])


@contextmanager
def _without_check() -> Iterator[None]:
    """Let claims use a script without the check for data loss."""
    read = scripts.read

    def without(name: str) -> str:
        return f"-- @layout FENCE\n{BLIND}" if name == "lib/data_loss" else read(name)

    with patch.object(scripts, "read", without):
        script = scripts.load("claim")
    if BLIND not in script.text or script.sha == scripts.CLAIM.sha:
        raise RuntimeError("The claim script does not include lib/data_loss any more.")
    with patch.object(scripts, "CLAIM", script):
        yield
