"""Where a record lives. The only place where a Redis key is spelt.

    idm1:{p02b0}:r:<rid>    the record: one string, see `record.py`
    idm1:{p02b0}:i          sorted set: records in flight, by the end of their lease in milliseconds
    idm1:{p02b0}:z          sorted set: quarantined records, by when they were, in milliseconds
    idm1:{p02b0}:m          hash: what the whole partition must remember; `fence`, the last one given out
    idm1:{p02b0}:c:<rid>    a cached answer of another store, see `replays.py`; the only one that may be lost. The
                            store's identity is mixed into this rid, see `stores/tiered.py`

All keys of one record share their hash tag, so that a script may touch them on Redis Cluster. Nothing that a client
sent is in one: `rid` and `tid` are keyed digests, written in base64 for URLs: in base32 Python
takes ten times as long, and in hex every key and every index is a third longer.
"""

from __future__ import annotations

from binascii import b2a_base64
from typing import TypeAlias

from flask_idempotency.engine.key import StorageKey

PARTITIONS = 1024
"""Part of the format: with another number every record would be looked for where it is not, and run again.

Many, so that a Cluster can spread them and a tenant shares its fences and indexes with few others.
"""

_FOR_URLS = bytes.maketrans(b"+/", b"-_")

Keys: TypeAlias = tuple[bytes, bytes, bytes, bytes]


def keys(key: StorageKey) -> Keys:
    """The record, the two indexes and the partition's memory: what every script is given, in this order."""
    prefix = _prefix(key)
    return prefix + b"r:" + _rid(key), prefix + b"i", prefix + b"z", prefix + b"m"


def replay(key: StorageKey) -> bytes:
    """Where the answer that another store gave for this key is cached."""
    return _prefix(key) + b"c:" + _rid(key)


def name(keys: Keys) -> bytes:
    """How the indexes call this record."""
    return keys[0].rpartition(b":")[2]


def _prefix(key: StorageKey) -> bytes:
    return b"idm1:{p%04x}:" % (int.from_bytes(key.tid[:2], "big") % PARTITIONS)


def _rid(key: StorageKey) -> bytes:
    return b2a_base64(key.rid, newline=False).translate(_FOR_URLS, b"=")
