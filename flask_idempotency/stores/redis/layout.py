"""Where a record lives, and what else. The only place where a Redis key, or a field of one, is spelt.

    idm1:{p02b0}:r:<rid>    the record: one string, see `encoding.py`
    idm1:{p02b0}:i          sorted set: records in flight, by the end of their lease in milliseconds
    idm1:{p02b0}:z          sorted set: quarantined records, by when a resolver is to be asked about them next, in
                            milliseconds: first when they were quarantined, or when their lease ended if that was before
    idm1:{p02b0}:m          hash: what the whole partition must remember; see below
    idm1:{p02b0}:f:<tid>    sorted set: the tenant's counted records that are in flight, by the end of their lease in
                            milliseconds, and those that are quarantined, by 0
    idm1:{p02b0}:q:<tid>    hash: the tenant's ledger of what is completed, and its limits; see below
    idm1:{p02b0}:k:<tid>    hash: the tenant's data keys; see below
    idm1:{p02b0}:g:<rid>    by which call the record was freed that was there; gone after minutes
    idm1:{p02b0}:a:<token>  whoever asked for this claim has given it up; gone after a minute
    idm1:{p02b0}:c:<rid>    a cached answer of another store, see `replay_cache.py`; these may be lost. The store's identity
                            is mixed into this rid, see `stores/tiered.py`
    idm1:{p02b0}:e:<tid>    when the tenant's cached answers were erased, by the cache's clock in microseconds
    idm1:{p02b0}:w          what is written so that replicas can be waited for; gone after a minute
    idm1:{chores}:n         hash: of each chore `microseconds report`, when it was last written down and what it said
    idm1:{chores}:l:<name>  who has this chore and until when: `microseconds token`
    idm1:w                  no key but a channel: the name of each record that is settled while somebody may wait for it

All keys of one record share their hash tag, so that a script may touch them on Redis Cluster. Nothing that a client
sent is in one: `rid` and `tid` are keyed digests, written in base64 for URLs: in base32 Python
takes ten times as long, and in hex every key and every index is a third longer.
"""

from __future__ import annotations

from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, TypeAlias

from flask_idempotency.engine.keys import TID_BYTES, StorageKey

RID_BYTES = 32

PARTITIONS = 1024
"""Part of the format: with another number every record would be looked for where it is not, and run again.

Many, so that a Cluster can spread them and a tenant shares its fences and indexes with few others.
"""

FIELDS: Final[Mapping[str, str]] = {
    # Of the partition's memory: the last fence given out; the store's id, how its keys are laid out, which process keeps it
    # and on which line of replication; when it was last noticed that this is another one, or that the memory was empty, and
    # until which of these times all is well again, in ms; the last fence that was given out before it; and the id by which
    # its data keys are told from those of a memory that is gone.
    "FENCE": "fence",
    "STORE_ID": "store_id",
    "LAYOUT": "layout",
    "PROCESS": "process",
    "REPLICATION_ID": "replication_id",
    "LOST_AT": "lost_at",
    "ACKED_LOSS": "acked_loss",
    "FENCE_AT_LOSS": "fence_at_loss",
    # Which process was seen to lose nothing that it has answered; and in partition 0 `milliseconds process`: when that was
    # last looked at.
    "LOSSLESS": "lossless",
    "LAST_LOOK": "last_look",
    "DATA_KEYS_ID": "data_keys_id",
    # Of a ledger. `records bytes lowest-edge` of all buckets; before the length of a window of new keys, in microseconds,
    # its `number count`; `records,bytes,in-flight,new-keys,microseconds,seconds` as the operator has set them, empty where
    # there is no limit; and before the edge of a bucket, in milliseconds, its `records bytes`.
    "TOTALS": "t",
    "WINDOW": "w",
    "LIMITS": "l",
    "BUCKET": "b",
    # Of data keys, besides one field for each, which is its number and has its wrapping key's id, one byte before it that
    # says how long that is, and the wrapped key. The highest number ever; `number microseconds` of the last erasure; and
    # before a number, since when it is closed, in microseconds.
    "LAST_KEY": "last",
    "ERASURE": "erasure",
    "DISABLED": "x",
}
"""The fields of all hashes, by what scripts call them."""

_FOR_URLS = bytes.maketrans(b"+/", b"-_")
_FROM_URLS = bytes.maketrans(b"-_", b"+/")

Keys: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]


def keys(key: StorageKey) -> Keys:
    """Return the KEYS of every script on a record, in this order: the record, the two indexes and the partition's memory;
    and its tenant's unsettled records, ledger and data keys."""
    prefix, others = _beside(key.tid)
    return prefix + b2a_base64(key.rid, newline=False).translate(_FOR_URLS, b"="), *others


@lru_cache(maxsize=1024)
def _beside(tid: bytes) -> tuple[bytes, tuple[bytes, bytes, bytes, bytes, bytes, bytes]]:
    """The beginning of a record's key, and the keys beside it. Remembered: to spell them takes a microsecond."""
    return _prefix(tid) + b"r:", (*indexes(tid), memory(tid), unsettled(tid), ledger(tid), data_keys(tid))


def name(keys: Keys) -> bytes:
    """Return what the indexes call the record that has these keys."""
    return keys[0].rpartition(b":")[2]


def record(tid: bytes, name: bytes) -> bytes:
    """The record that the indexes of this tenant's partition call so."""
    return record_in(number(tid), name)


def record_in(partition: int, name: bytes) -> bytes:
    """The record that the indexes of this partition call so."""
    return _beginning(partition) + b"r:" + name


def rid(record: bytes) -> bytes | None:
    """The `rid` in a record's key, if it is one of ours."""
    return _bytes(record.rpartition(b":")[2], RID_BYTES)


def tid(key: bytes) -> bytes | None:
    """The `tid` in the key of a ledger, or of anything else that a tenant has one of, if it is one of ours."""
    return _bytes(key.rpartition(b":")[2], TID_BYTES)


def partition(key: bytes) -> bytes:
    """What all keys of one partition have in common, and no other."""
    return key[: key.find(b"}")]


def followed(key: bytes) -> tuple[bytes, bytes]:
    """What is written behind a script on this key; and the partition's memory, which keeps it from being written where a
    slot is going while it still stands where that comes from: a Cluster sends nobody to a node that has one of two."""
    tag = partition(key)
    return tag + b"}:w", tag + b"}:m"


def number(tid: bytes) -> int:
    """Which partition the tenant's records are in."""
    return int.from_bytes(tid[:2], "big") % PARTITIONS


def indexes(tid: bytes) -> tuple[bytes, bytes]:
    """Of the tenant's partition: records in flight, and quarantined ones."""
    return indexes_in(number(tid))


def indexes_in(partition: int) -> tuple[bytes, bytes]:
    """Of this partition: records in flight, and quarantined ones."""
    prefix = _beginning(partition)
    return prefix + b"i", prefix + b"z"


def memory(tid: bytes) -> bytes:
    """What the tenant's partition remembers."""
    return _prefix(tid) + b"m"


def memory_in(partition: int) -> bytes:
    """What this partition remembers."""
    return _beginning(partition) + b"m"


def unsettled(tid: bytes) -> bytes:
    """The tenant's counted records that are not completed."""
    return _prefix(tid) + b"f:" + _text(tid)


def ledger(tid: bytes) -> bytes:
    """What the tenant has of completed records, and what it may have."""
    return _prefix(tid) + b"q:" + _text(tid)


def data_keys(tid: bytes) -> bytes:
    """The tenant's data keys."""
    return _prefix(tid) + b"k:" + _text(tid)


def records_of(tid: bytes | None) -> bytes:
    """A pattern for SCAN: the records of this tenant's partition, or all."""
    return (b"idm1:{*}:" if tid is None else _prefix(tid)) + b"r:*"


EVERY_LEDGER: Final = b"idm1:{*}:[fq]:*"
EVERY_SHELF: Final = b"idm1:{*}:k:*"
"""Patterns for SCAN."""


def freed(key: StorageKey) -> bytes:
    """By which call this key was freed."""
    return _prefix(key.tid) + b"g:" + _text(key.rid)


def given_up(keys: Keys, token: bytes) -> bytes:
    """Return the key that stands when the claim of this token, on the record that has these keys, was cancelled."""
    # The key of the partition's memory is its prefix and one letter.
    return keys[3][:-1] + b"a:" + b2a_base64(token, newline=False).translate(_FOR_URLS, b"=")


def replay(key: StorageKey) -> bytes:
    """Where the answer that another store gave for this key is cached."""
    return _prefix(key.tid) + b"c:" + _text(key.rid)


def erasure(tid: bytes) -> bytes:
    """When the tenant's cached answers were erased."""
    return _prefix(tid) + b"e:" + _text(tid)


def replays_of(tid: bytes) -> bytes:
    """A pattern for SCAN: the cached answers of this tenant's partition."""
    return _prefix(tid) + b"c:*"


SETTLED: Final = b"idm1:w"
"""The channel on which settled records are named."""

NOTES: Final = b"idm1:{chores}:n"
"""What was written down of chores."""


def lock(chore: str) -> bytes:
    """Who has this chore."""
    return b"idm1:{chores}:l:" + chore.encode()


@lru_cache(maxsize=1024)
def _prefix(tid: bytes) -> bytes:
    return _beginning(number(tid))


def _beginning(partition: int) -> bytes:
    return b"idm1:{p%04x}:" % partition


def _text(data: bytes) -> bytes:
    return b2a_base64(data, newline=False).translate(_FOR_URLS, b"=")


def _bytes(text: bytes, size: int) -> bytes | None:
    try:
        data = a2b_base64(text.translate(_FROM_URLS) + b"=" * (-len(text) % 4))
    except Base64Error:
        return None
    return data if len(data) == size and _text(data) == text else None
