"""The name of every Redis key and hash field. No other module builds one.

    idm1:{p02b0}:r:<rid>    the record: one string, see `encoding.py`
    idm1:{p02b0}:s:<rid>    hash: the journal of the record, see `step_encoding.py`
    idm1:{p02b0}:i          sorted set: records in flight. Score: when the lease expires, in ms
    idm1:{p02b0}:z          sorted set: quarantined records. Score: when a resolver is due, in ms. The first is the time
                            of the quarantine, or when the lease expired if that was earlier
    idm1:{p02b0}:x          sorted set: completed records that are remembered for longer than their response. Score: when
                            that is removed, in ms
    idm1:{p02b0}:m          hash: facts of the partition, see `FIELDS`
    idm1:{p02b0}:f:<tid>    sorted set: the tenant's unfinished records that count in its quota. Score: when the lease
                            expires, in ms; 0 in quarantine
    idm1:{p02b0}:q:<tid>    hash: the tenant's totals of completed records, and its limits, see `FIELDS`
    idm1:{p02b0}:k:<tid>    hash: the tenant's data keys, see `FIELDS`
    idm1:{p02b0}:g:<rid>    the call that force-released this record; expires after minutes
    idm1:{p02b0}:a:<token>  the engine cancelled the claim of this token; expires after a minute
    idm1:{p02b0}:c:<rid>    a cached response of another store, see `replay_cache.py`; Redis may lose it. This rid also
                            digests the store's identity, see `stores/tiered.py`
    idm1:{p02b0}:e:<tid>    when the tenant's cached responses were erased, by the cache's clock in microseconds
    idm1:{p02b0}:w          a write that a later WAIT can count replicas for; expires after a minute
    idm1:{p02b0}:o:<rid>    what a request in observe mode found and left under this key; expires, see
                            `lua/lib/observation.lua`
    idm1:{p02b0}:h:<rid>    list: who changed the record, when and why; it outlives the record
    idm1:{p02b0}:y:<tid>    sorted set: the tenant's records that have such a list. Score: the last change, in ms
    idm1:{v0a1b2c}:b:<length>:<start>  hash: what happened at each endpoint in this minute or hour, in seconds. The tag is
                            the mark of the application
    idm1:{v0a1b2c}:t:<token>  the call of this token added its counts; expires after minutes
    idm1:{u<digest>}:u      sorted set: the latest changes of one actor. Score: when, in ms. The tag digests the actor
    idm1:{tasks}:n          hash: for each task `microseconds report`, its last run and its report
    idm1:{tasks}:l:<name>   the lock of a task: `microseconds token`, its end and its holder
    idm1:w                  a channel, not a key: the name of each record that completes while a request may wait for it

All keys of one record share a hash tag, so that one script may use them on Redis Cluster. A key holds no client data:
`rid` and `tid` are keyed digests in URL-safe base64. Python takes ten times as long for base32, and hex makes every key
and index a third longer.
"""

from __future__ import annotations

from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Final, TypeAlias

from flask_idempotency.engine.keys import TID_BYTES, StorageKey

RID_BYTES = 32

PARTITIONS = 1024
"""Part of the format: with another number the store finds no record, and every request runs again.

There are many, so that a Cluster can spread them and few tenants share fences and indexes.
"""

FIELDS: Final[Mapping[str, str]] = {
    # Partition: the last fence; the id and the layout of the store; the Redis process and its replication id.
    "FENCE": "fence",
    "STORE_ID": "store_id",
    "LAYOUT": "layout",
    "PROCESS": "process",
    "REPLICATION_ID": "replication_id",
    # Partition: "1" if a process that had seen the id of the store found the partition without it.
    "EMPTIED": "emptied",
    # Partition: when a script last detected a data loss, and the last loss that an operator acknowledged, both in ms; and
    # the last fence before the loss.
    "LOST_AT": "lost_at",
    "ACKED_LOSS": "acked_loss",
    "FENCE_AT_LOSS": "fence_at_loss",
    # Partition: the process that flushes each write before its reply. Partition 0 only: `milliseconds process`, the last
    # look at that. Then the id that tells these data keys from those of an earlier, lost Redis.
    "LOSSLESS": "lossless",
    "LAST_LOOK": "last_look",
    "DATA_KEYS_ID": "data_keys_id",
    # Quota: `records bytes lowest-edge` of all buckets. Prefix of a window's length in microseconds: its `number count`.
    # The operator's limits: `records,bytes,in-flight,new-keys,microseconds,seconds`, empty if unlimited. Prefix of a
    # bucket's end in ms: its `records bytes`. The bytes of all journals of counted records.
    "TOTALS": "t",
    "WINDOW": "w",
    "LIMITS": "l",
    "BUCKET": "b",
    "JOURNALS": "j",
    # Data keys. A field named by the key's number holds one byte with the length of the wrapping key's id, that id, and
    # the wrapped key. Then the highest number ever; `number microseconds` of the last erasure; and the prefix of a number:
    # since when that key is disabled, in microseconds.
    "LAST_KEY": "last",
    "ERASURE": "erasure",
    "DISABLED": "x",
}
"""The fields of all hashes, by their names in scripts."""

_FOR_URLS = bytes.maketrans(b"+/", b"-_")
_FROM_URLS = bytes.maketrans(b"-_", b"+/")

OF_RECORD: Final = 7
"""How many KEYS name what every record has. See `keys`."""

Keys: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]


def keys(key: StorageKey) -> Keys:
    """Return the KEYS of each script that works on a record.

    They are the record, both indexes, the partition, and the tenant's unfinished records, quota and data keys.
    """
    prefix, others = _tenant_keys(key.tid)
    return prefix + b2a_base64(key.rid, newline=False).translate(_FOR_URLS, b"="), *others


@lru_cache(maxsize=1024)
def _tenant_keys(tid: bytes) -> tuple[bytes, tuple[bytes, bytes, bytes, bytes, bytes, bytes]]:
    """Return the prefix of a tenant's records, and the other keys. Cached: building them takes a microsecond."""
    return _prefix(tid) + b"r:", (
        *indexes_in(number(tid)),
        facts_in(number(tid)),
        tenant_unfinished(tid),
        tenant_quota(tid),
        data_keys(tid),
    )


def keys_of_claim(key: StorageKey, token: bytes) -> tuple[tuple[bytes, ...], bytes]:
    """Return the KEYS of `claim.lua`, and the name of the record in the indexes.

    The last of these keys exists if the engine cancelled the claim of this token.
    """
    prefix, others = _tenant_keys(key.tid)
    name = b2a_base64(key.rid, newline=False).translate(_FOR_URLS, b"=")
    cancelled = prefix[:-2] + b"a:" + b2a_base64(token, newline=False).translate(_FOR_URLS, b"=")
    return (prefix + name, *others, cancelled), name


def name(keys: Sequence[bytes]) -> bytes:
    """Return the name of this record in the indexes."""
    return keys[0].rpartition(b":")[2]


def record_in(partition: int, name: bytes) -> bytes:
    """Return the key of the record with this name in the indexes of this partition."""
    return _beginning(partition) + b"r:" + name


def rid(record: bytes) -> bytes | None:
    """Return the `rid` in a record's key, or None if the key has another form."""
    return _bytes(record.rpartition(b":")[2], RID_BYTES)


def tid(key: bytes) -> bytes | None:
    """Return the `tid` at the end of a tenant's key, or None if the key has another form."""
    return _bytes(key.rpartition(b":")[2], TID_BYTES)


def partition(key: bytes) -> bytes:
    """Return the common prefix of all keys of this key's partition."""
    return key[: key.find(b"}")]


def followed(key: bytes) -> tuple[bytes, bytes]:
    """Return the two KEYS of `touch.lua`, which runs after a script on this key so that WAIT can count replicas.

    The second is the partition. While a slot moves, a node with only one of two keys answers TRYAGAIN. So the write
    happens on one node only, and the move does not fail with BUSYKEY.
    """
    tag = partition(key)
    return tag + b"}:w", tag + b"}:m"


def journal(key: StorageKey) -> bytes:
    """Return the key of this record's journal."""
    return _prefix(key.tid) + b"s:" + _text(key.rid)


def keys_with_journal(key: StorageKey) -> tuple[bytes, ...]:
    """Return the KEYS of each script that works on a record and its journal."""
    return *keys(key), journal(key)


def journal_in(partition: int, name: bytes) -> bytes:
    """Return the key of the journal of the record with this name in the indexes of this partition."""
    return _beginning(partition) + b"s:" + name


def record_of_journal(journal: bytes) -> bytes:
    """Return the key of the record that this journal belongs to."""
    beginning, _, name = journal.rpartition(b":s:")
    return beginning + b":r:" + name


def number(tid: bytes) -> int:
    """Return the number of the tenant's partition."""
    return int.from_bytes(tid[:2], "big") % PARTITIONS


def indexes_in(partition: int) -> tuple[bytes, bytes]:
    """Return the two indexes of this partition: records in flight, and quarantined records."""
    prefix = _beginning(partition)
    return prefix + b"i", prefix + b"z"


def remembered_in(partition: int) -> bytes:
    """Return the index of this partition's records that are remembered for longer than their response."""
    return _beginning(partition) + b"x"


def keys_with_memory(key: StorageKey) -> tuple[bytes, ...]:
    """Return the KEYS of each script that completes a record which is remembered for longer than its response."""
    return *keys(key), journal(key), remembered_in(number(key.tid))


def facts_in(partition: int) -> bytes:
    """Return the hash with the facts of this partition."""
    return _beginning(partition) + b"m"


def tenant_unfinished(tid: bytes) -> bytes:
    """Return the sorted set of the tenant's unfinished records that count in its quota."""
    return _prefix(tid) + b"f:" + _text(tid)


def tenant_quota(tid: bytes) -> bytes:
    """Return the hash of the tenant's totals of completed records, and of its limits."""
    return _prefix(tid) + b"q:" + _text(tid)


def data_keys(tid: bytes) -> bytes:
    """Return the hash of the tenant's data keys."""
    return _prefix(tid) + b"k:" + _text(tid)


def every(letter: bytes, tid: bytes | None = None) -> bytes:
    """Return the SCAN pattern of the keys with this letter: in this tenant's partition, or all."""
    return (b"idm1:{*}:" if tid is None else _prefix(tid)) + letter + b":*"


def is_record(key: bytes) -> bool:
    """Return whether this is the key of a record."""
    return key.startswith(b"idm1:{p") and key[_TAGGED:].startswith(b":r:")


_TAGGED: Final = len(b"idm1:{p0000}")


def freed(key: StorageKey) -> bytes:
    """Return the key that names the call that force-released this record."""
    return _prefix(key.tid) + b"g:" + _text(key.rid)


def cancelled(keys: Keys, token: bytes) -> bytes:
    """Return the key that exists if the engine cancelled the claim of this token."""
    # The partition's key is its prefix and one letter.
    return keys[3][:-1] + b"a:" + b2a_base64(token, newline=False).translate(_FOR_URLS, b"=")


def cached_response(key: StorageKey) -> bytes:
    """Return the key of the cached response that another store has for this record."""
    return _prefix(key.tid) + b"c:" + _text(key.rid)


def cache_erasure(tid: bytes) -> bytes:
    """Return the key with the time at which the tenant's cached responses were erased."""
    return _prefix(tid) + b"e:" + _text(tid)


def observation(key: StorageKey) -> bytes:
    """Return the key of what is remembered of this record's key in observe mode."""
    return _prefix(key.tid) + b"o:" + _text(key.rid)


def audit_trail(key: StorageKey) -> bytes:
    """Return the list of the changes of this record."""
    return audit_trail_of(key.tid, _text(key.rid))


def audit_trail_of(tid: bytes, name: bytes) -> bytes:
    """Return the list of the changes of the tenant's record with this name."""
    return _prefix(tid) + b"h:" + name


def audited_records(tid: bytes) -> bytes:
    """Return the sorted set of the tenant's records that have a list of changes."""
    return _prefix(tid) + b"y:" + _text(tid)


def audit_actor(actor: str) -> bytes:
    """Return the sorted set of the latest changes of this actor."""
    return b"idm1:{u%b}:u" % _text(sha256(actor.encode("utf-8", "surrogatepass")).digest()[:TID_BYTES])


def activity_bucket(owner: bytes, length: int, start: int) -> bytes:
    """Return the hash of this minute or hour of the application with this mark. Both numbers are seconds."""
    return b"idm1:{v%b}:b:%d:%d" % (owner.hex().encode(), length, start)


def activity_token(owner: bytes, token: bytes) -> bytes:
    """Return the key that exists if the call of this token has added its counts."""
    return b"idm1:{v%b}:t:%b" % (owner.hex().encode(), _text(token))


SETTLED: Final = b"idm1:w"
"""The channel that carries the name of each settled record."""

TASKS: Final = b"idm1:{tasks}:n"
"""The hash with the last report of each task."""


def task_lock(task: str) -> bytes:
    """Return the key of this task's lock."""
    return b"idm1:{tasks}:l:" + task.encode()


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
