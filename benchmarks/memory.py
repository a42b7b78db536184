"""What a kept answer takes: bytes on top of the answer itself, and memory of the server."""

from __future__ import annotations

import redis

from benchmarks import budgets
from benchmarks.apps import LOCATION, ours
from benchmarks.budgets import at_most
from benchmarks.calls import call, environ
from benchmarks.payloads import ANSWER, LIST_ANSWER, PAYMENT, compressed
from benchmarks.table import Row, Section
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.model import Result

RECORDS = 50

NOTE = (
    "`memory` is MEMORY USAGE of all keys that one request leaves behind, `value` what they hold, in bytes. "
    "`to` is the part of its size that zlib's level 1 leaves of the answer."
)


def section(client: redis.Redis, url: str) -> Section:
    rows = [
        _overhead(),
        _record("a charge", "/payments", ANSWER, client, url),
        _record("a list of payments", "/lists", LIST_ANSWER, client, url),
    ]
    return Section("Memory", NOTE, rows)


def _overhead() -> Row:
    metadata = (("Content-Type", "application/json"), ("Location", LOCATION))
    result = Result(status=201, metadata=metadata, body=ANSWER)
    plain = len("201") + sum(len(name) + len(value) for name, value in metadata) + len(ANSWER)
    overhead = len(EnvelopeCodec(compression=None).wrap(result)) - plain
    verdict = at_most("≤ 64 B on top", overhead, budgets.OVERHEAD_BYTES)
    return Row("a stored answer before compression", {"answer": plain, "on top": overhead}, [verdict])


def _record(name: str, path: str, answer: bytes, client: redis.Redis, url: str) -> Row:
    keys = kept_keys(client, url, path=path, records=RECORDS)
    used = sum(client.memory_usage(key, samples=0) or 0 for key in keys) / RECORDS
    cells: dict[str, float | str] = {
        "answer": len(answer),
        "to": f"{compressed(answer):.0%}",
        "keys": len(keys) / RECORDS,
        "value": sum(_held(client, key) for key in keys) / RECORDS,
        "memory": used,
    }
    return Row(name, cells, [at_most("≤ 1.1 KB", used, budgets.RECORD_BYTES)])


def kept_keys(client: redis.Redis, url: str, *, path: str, records: int) -> list[bytes]:
    """The Redis keys that so many first requests leave behind, without what they share with one before them."""
    app = ours(url)
    call(app, environ("POST", path, body=PAYMENT, key="makes-what-all-share"))
    before = set(client.scan_iter(count=1000))
    for number in range(records):
        call(app, environ("POST", path, body=PAYMENT, key=f"{path}-{number}"))
    return sorted(set(client.scan_iter(count=1000)) - before)


def _held(client: redis.Redis, key: bytes) -> int:
    """Bytes of content, whatever the type, as far as the store's layouts go."""
    if client.type(key) == b"hash":
        return sum(len(field) + len(value) for field, value in client.hgetall(key).items())
    return int(client.strlen(key))
