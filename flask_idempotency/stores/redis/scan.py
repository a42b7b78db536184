"""Read many records: pages of keys, batches of one partition, and what each tenant's erasure destroyed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import Final, TypeVar

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import Record, SeenRecord
from flask_idempotency.stores.redis import layout
from flask_idempotency.stores.redis.encoding import TID_AT, Erasure, decode, decode_erasure, with_erasure
from flask_idempotency.stores.redis.executor import ScriptExecutor

ItemT = TypeVar("ItemT")

_ERASURE: Final = layout.FIELDS["ERASURE"].encode()

BATCH = 500
"""Keys per SCAN: less than a millisecond of the server's time."""


def scan_page(server: ScriptExecutor, pattern: bytes, *, after: bytes, count: int) -> tuple[list[bytes], bytes | None]:
    """Return the matching keys of about `count` keys, and the cursor of the next page, None after the last.

    In a Cluster, the primaries follow each other. All pages together have each key at least once that exists from the first
    one to the last. They may miss keys if a replica replaces a primary or slots move in between.
    """
    name, _, cursor = after.rpartition(b" ")
    nodes = server.primaries()
    names = [each for each, _ in nodes]
    at = names.index(name) if name in names else 0
    begin = int(cursor) if cursor and names[at] == name else 0
    following, keys = server.scan(begin, pattern, count, node=nodes[at][1])
    if following == 0:
        at += 1
    return keys, None if at == len(nodes) else b"%b %d" % (names[at], following)


def scan_all(server: ScriptExecutor, pattern: bytes) -> Iterator[list[bytes]]:
    """Yield the keys of all pages in batches, each key once. A batch may be empty."""
    after: bytes | None = b""
    seen = set[bytes]()
    while after is not None:
        keys, after = scan_page(server, pattern, after=after, count=BATCH)
        # SCAN may return a key twice.
        fresh = [name for name in dict.fromkeys(keys) if name not in seen]
        seen.update(fresh)
        yield fresh


def batches(items: Iterable[ItemT], size: int, partition: Callable[[ItemT], object]) -> Iterator[list[ItemT]]:
    """Yield batches of neighbours, each of one partition and of no more than this size."""
    for _, group in groupby(items, partition):
        while batch := list(islice(group, size)):
            yield batch


class ErasureCache:
    """Look up the last erasure of each tenant once."""

    def __init__(self, server: ScriptExecutor) -> None:
        self._server = server
        self._known = dict[bytes, Erasure | None]()

    def of(self, tid: bytes) -> Erasure | None:
        if tid not in self._known:
            self._known[tid] = decode_erasure(self._server.execute("HGET", layout.data_keys(tid), _ERASURE))
        return self._known[tid]

    def mark(self, tid: bytes, record: Record) -> Record:
        return record if record.payload is None else with_erasure(record, self.of(tid))


def seen_record(key: bytes, data: bytes, now: int) -> SeenRecord | None:
    """Decode the record that a scan found under this key, at this time in microseconds. None: it cannot be read."""
    rid = layout.rid(key)
    try:
        return None if rid is None else SeenRecord(StorageKey(rid, data[TID_AT]), decode(data, now=now / 1_000_000))
    except CorruptRecord:
        return None
