"""Parse the client's idempotency key, and derive storage keys, tokens and downstream keys.

Grammar: the expired draft-ietf-httpapi-idempotency-key-header-07 (an RFC 8941 string), and the bare form of most clients.
"""

from __future__ import annotations

import hmac
import re
import secrets
from base64 import b32encode
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import lru_cache, partial
from hashlib import sha256
from struct import Struct
from typing import Final, TypeAlias

from flask_idempotency.engine.errors import InvalidKey
from flask_idempotency.engine.values import valueclass

__all__ = ["StorageKey"]

# RFC 9562, section 5.7: 48 bits of milliseconds, then the version, and the variant after two more groups.
_UUID7: Final = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)
# github.com/ulid/spec: 26 letters of Crockford's alphabet; the first ten are milliseconds.
_ULID: Final = re.compile(r"([0-7][0-9A-HJKMNP-TV-Z]{9})[0-9A-HJKMNP-TV-Z]{16}", re.IGNORECASE)
_CROCKFORD: Final = {letter: value for value, letter in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}


def key_timestamp(client_key: str) -> float | None:
    """Return when the client made this key, in seconds since the epoch, if it is a UUIDv7 or a ULID. Else None.

    It is the client's clock. Other keys may look like these by chance, and give any time from 1970 to the year 10889.
    """
    if uuid := _UUID7.fullmatch(client_key):
        return int(uuid[1] + uuid[2], 16) / 1000
    if ulid := _ULID.fullmatch(client_key):
        milliseconds = 0
        for letter in ulid[1].upper():
            milliseconds = milliseconds << 5 | _CROCKFORD[letter]
        return milliseconds / 1000
    return None


# A claim's token is random, with a mark of the application and of the secret that its downstream keys come from.
#
# A resolver must derive a vanished worker's downstream keys again, to look them up at the other service. Another secret
# gives other keys. The service does not know those, which would look like proof that no call was made. So two bytes of each
# token say which secret it was, and that it was the only one. Three bytes say which application made the claim: applications
# may share a store, and each may resolve only its own records.

TOKEN_BYTES: Final = 16
OWNER_BYTES: Final = 3
"""Length of an application's mark. The mark is no secret, and stays the same while secrets rotate."""
MARK_BYTES: Final = 5
"""Length of both marks together."""

_SEVERAL_SECRETS: Final = 0x80


def new_token(mark: bytes = b"", *, several: bool = False) -> bytes:
    """Make a token for a claim with this mark. 88 bits of it are random.

    `several`: the claim uses more than one secret, so a record does not show which of them its name comes from.
    """
    beginning = _prefix(mark, several=several) if mark else b""
    return beginning + secrets.token_bytes(TOKEN_BYTES - len(beginning))


def successor(token: bytes) -> bytes:
    """Make a token with the same mark, to resolve a claim in its worker's place."""
    return token[:MARK_BYTES] + secrets.token_bytes(TOKEN_BYTES - MARK_BYTES)


def paused_token(token: bytes) -> bytes:
    """Return the token of a record that a release by this token has paused.

    It is derived, so that a repeated release knows its own work. The mark stays, which finds the downstream keys.
    """
    return token[:MARK_BYTES] + sha256(b"paused" + token).digest()[: TOKEN_BYTES - MARK_BYTES]


def marked(token: bytes, mark: bytes) -> bool:
    """Return whether a claim of this application made this token, under this secret alone."""
    return token[:MARK_BYTES] == _prefix(mark, several=False)


def _prefix(mark: bytes, *, several: bool) -> bytes:
    secret = mark[OWNER_BYTES] & ~_SEVERAL_SECRETS | (_SEVERAL_SECRETS if several else 0)
    return mark[:OWNER_BYTES] + bytes((secret,)) + mark[OWNER_BYTES + 1 :]


TID_BYTES = 16
"""Length of a tenant id. It is a keyed digest, so no two tenants share one by accident or by design."""

LONGEST_NAME = 255
"""Most characters of a tenant, principal, namespace, operation, reason or actor. Longer ones are refused, never cut: two names
must not become one. Records store names, and a quota of bytes does not count them."""

MAX_CACHED: Final = 4096
"""How many callers and tenants an `Identity` caches derived parts for: one or two megabytes."""

STEP_ID_BYTES: Final = 12
STEP_DIGEST_BYTES: Final = 16

KeyedDigest: TypeAlias = Callable[[bytes], bytes]
_COUNT, _LENGTH = Struct(">H"), Struct(">I")
_SHORT: Final = tuple(map(_LENGTH.pack, range(256)))
_VISIBLE = re.compile(r"[!-~]+")
# RFC 8941, section 3.1.2: parameters behind an item, with names and values of section 3.3.
_STRING: Final = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
_ITEMS: Final = (
    r"-?[0-9]{1,12}\.[0-9]{1,3}",
    r"-?[0-9]{1,15}",
    _STRING,
    r"[A-Za-z*][!#$%&'*+.^_`|~:/0-9A-Za-z-]*",
    r":[A-Za-z0-9+/=]*:",
    r"\?[01]",
)
_QUOTED = re.compile(rf"({_STRING})(?:; *[a-z*][a-z0-9_.*-]*(?:=(?:{'|'.join(_ITEMS)}))?)*")
_UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")


@valueclass(frozen=True, slots=True, eq=True)
class StorageKey:
    """Names a record without containing anything a client sent.

    `rid` has 32 bytes. `tid` has 16 and names the tenant, or the tenant's shard that holds the key. It decides the partition;
    quotas and data keys go by it.
    """

    rid: bytes
    tid: bytes
    label: str = field(default="", compare=False)
    """Eight characters that tell records apart in logs. They do not reveal the key."""
    mark: bytes = field(default=b"", compare=False)
    """The mark of the namespace and the secret that it was derived from: see `new_token`."""
    steps: KeyedDigest | None = field(default=None, compare=False)
    """`Identity.steps` of the secret that it was derived from. None: it was read from a store."""

    def __repr__(self) -> str:
        """Show no part of the key: a repr may end up in logs."""
        return "StorageKey(…)"


@valueclass(frozen=True, slots=True, repr=False)
class Scope:
    """The namespace, tenant, principal and endpoint that a key belongs to. An absent one differs from an empty one."""

    namespace: str
    tenant: str | None
    principal: str | None
    operation: str | None = None
    """Set only with `scope="operation"`: each endpoint has its own keys."""
    of_package: bool = False
    """Whether this package chose the principal, as for a webhook. No text that a loader returns names the same caller."""


def parse_key(value: str, *, max_length: int = 255, key_format: str = "any") -> str:
    """Return the key in this header value. The quoted and the bare form of a key are equal.

    Parameters behind the quoted form are read, as RFC 8941 allows, and ignored: the draft defines none.

    `key_format` is "any", "uuid" or a regular expression that the whole key must match. Raises `InvalidKey`, also for:

    * a bare comma, because servers join two header lines with one, and two keys must never pass for one;
    * a bare quote, because it is half of a pair.
    """
    if value.startswith('"'):
        match = _QUOTED.fullmatch(value)
        if match is None:
            raise InvalidKey(
                "the quoted key is not a well-formed RFC 8941 string with or without parameters, or more than one key was sent"
            )
        key = re.sub(r"\\(.)", r"\1", match[1][1:-1])
    elif "," in value:
        raise InvalidKey("more than one key was sent; a key that contains a comma must be quoted")
    elif '"' in value:
        # A quoted key that lost a quote on the way must not become a second name of the same key.
        raise InvalidKey(
            "a quote stands inside a bare key; put the whole key in quotes, and a backslash before each inner one"
        )
    else:
        key = value
    if not key:
        raise InvalidKey("the key is empty")
    if len(key) > max_length:
        raise InvalidKey(f"the key is longer than {max_length} characters")
    if not _VISIBLE.fullmatch(key):
        raise InvalidKey("the key may contain visible ASCII characters only, and no space")
    if key_format != "any" and not re.fullmatch(_UUID if key_format == "uuid" else key_format, key):
        raise InvalidKey(
            "the key must be a UUID" if key_format == "uuid" else "the key does not have the required format"
        )
    return key


def one_key(values: Sequence[str], *, max_length: int = 255, key_format: str = "any") -> str:
    """Return the single key that these header values agree on. Raises `InvalidKey` when they do not."""
    key = parse_key(values[0], max_length=max_length, key_format=key_format)
    for value in values[1:]:
        if parse_key(value, max_length=max_length, key_format=key_format) != key:
            raise InvalidKey("two different keys were sent")
    return key


MESSAGE_MARK: Final = "\0"
"""Precedes the id of a message in the name of its record. No key of an HTTP client has this character, so a message and a
request never share a record, whatever their operations and callers are called."""

BROKER_MARK: Final = "\1"
"""Precedes a `BrokerId` instead."""


class BrokerId(str):
    """The id of a message without one of its sender: a position, or what else the broker knows of it.

    It is a type and no spelling, because a sender may give its message any text as an id.
    """

    __slots__ = ()


def message_key(message_id: str) -> str:
    """Return what takes the place of the client's key in the name of this message's record."""
    return (BROKER_MARK if isinstance(message_id, BrokerId) else MESSAGE_MARK) + message_id


def encode(*parts: bytes) -> bytes:
    """Join these parts into bytes that no other parts give: its length precedes each part."""
    # A loop takes half as long here as `map` and `zip` do, and most parts are short.
    pieces = [_COUNT.pack(len(parts))]
    for part in parts:
        size = len(part)
        pieces += _SHORT[size] if size < len(_SHORT) else _LENGTH.pack(size), part
    return b"".join(pieces)


def data_key_context(tid: bytes, number: int, kid: str, store: bytes) -> bytes:
    """Return what the wrapping of a tenant's data key is bound to. It belongs to the stored format."""
    return encode(b"flask_idempotency/data-key/1", store, tid, b"%d" % number, kid.encode())


class Identity:
    """Derives every name from one secret: storage keys and their labels, fingerprints, downstream keys.

    All digests are keyed, because client keys and bodies are guessable: a reader of the store cannot test candidates.

    `tenant_shards` is part of the key format, as the secret is. With another number, most records would not be found.
    """

    def __init__(self, secret: bytes, *, tenant_shards: int = 1) -> None:
        self._record = keyed_digest(_subkey(secret, b"record"))
        self._tenant = keyed_digest(_subkey(secret, b"tenant"))
        self._downstream = keyed_digest(_subkey(secret, b"downstream"))
        self._log = keyed_digest(_subkey(secret, b"log"))
        self._mark = keyed_digest(_subkey(secret, b"mark"))
        self.fingerprint: KeyedDigest = keyed_digest(_subkey(secret, b"fingerprint"))
        """Return a keyed digest of these bytes, 32 bytes. `fingerprint.py` chooses them."""
        self.steps: KeyedDigest = keyed_digest(_subkey(secret, b"step"))
        """Return a keyed digest for `step_id` and `step_digest`, 32 bytes."""
        self.outbox: KeyedDigest = keyed_digest(_subkey(secret, b"outbox"))
        """Return a keyed digest for `OutboxNames`, 32 bytes."""
        self.console: KeyedDigest = keyed_digest(_subkey(secret, b"console"))
        """Return a keyed digest for the forms and cursors of the console, 32 bytes."""
        self._shards = tenant_shards
        # Caches per object: they end with the application, and so does all that derives from its secret.
        self._marks: dict[str, bytes] = {}
        self._owner = lru_cache(MAX_CACHED)(_record_owner)
        self._tid = lru_cache(MAX_CACHED)(partial(_tenant_id, self._tenant, tenant_shards))

    def storage_key(self, scope: Scope, client_key: str) -> StorageKey:
        """Derive the storage key. No two (scope, key) pairs share one, whatever characters they contain."""
        namespace, tenant = scope.namespace, scope.tenant
        owner = self._owner(namespace, tenant, scope.principal, scope.operation, scope.of_package)
        key = client_key.encode("utf-8", "surrogatepass")
        # The same bytes as `encode` of all parts of the scope, then the key.
        rid = self._record(owner + _LENGTH.pack(len(key)) + key)
        part = int.from_bytes(rid[:8], "big") % self._shards if self._shards > 1 else 0
        tid = self._tid(namespace, tenant, part)
        mark = self._marks.get(namespace) or self.mark(namespace)
        return StorageKey(rid, tid, self._log(rid)[:4].hex(), mark, self.steps)

    def mark(self, namespace: str) -> bytes:
        """Return the prefix of tokens: it names the application and this secret, and does not reveal the secret."""
        if namespace not in self._marks:
            name = namespace.encode("utf-8", "surrogatepass")
            secret = self._mark(name)[: MARK_BYTES - OWNER_BYTES]
            self._marks[namespace] = owner_mark(namespace) + secret
        return self._marks[namespace]

    def label(self, key: StorageKey) -> str:
        """Return the label of a key that was read from a store."""
        return key.label or self._log(key.rid)[:4].hex()

    def tenant_ids(self, namespace: str, tenant: str | None) -> tuple[bytes, ...]:
        """Return the `tid` of each shard of this tenant, always in the same order."""
        return tuple(self._tid(namespace, tenant, part) for part in range(self._shards))

    def tenant_id(self, namespace: str, tenant: str | None) -> bytes:
        """Return the `tid` of a tenant with one shard. Raises `ValueError` if it has several."""
        (only,) = self.tenant_ids(namespace, tenant)
        return only

    def pseudonym(self, name: str) -> str:
        """Return a pseudonym for a tenant or principal: always the same, and it does not reveal the name."""
        return keyed_name(self._log(encode(b"name", name.encode("utf-8", "surrogatepass")))[:15])

    def downstream_key(self, key: StorageKey, name: str, item: bytes = b"") -> str:
        """Derive a key for a call that the view makes: the same in all attempts, another for each name and encoded item."""
        parts = (item,) if item else ()
        return keyed_name(self._downstream(encode(key.rid, name.encode(), *parts)))


def step_id(key: StorageKey, name: str, item: bytes = b"") -> bytes:
    """Return the id of a step in the journal of this record, 12 bytes. `item` is encoded, and empty if there is none.

    It is keyed by the secret that the record's name comes from, and differs from one record to the next. Raises `ValueError`
    for a key that was read from a store: give it the digest first, as `replace(key, steps=identity.steps)`.
    """
    return _of_steps(key)(encode(b"id", key.rid, name.encode(), item))[:STEP_ID_BYTES]


def step_digest(key: StorageKey, arguments: bytes) -> bytes:
    """Return a keyed digest of a step's arguments, 16 bytes. Empty if there are none to compare."""
    return _of_steps(key)(encode(b"arguments", key.rid, arguments))[:STEP_DIGEST_BYTES] if arguments else b""


def _of_steps(key: StorageKey) -> KeyedDigest:
    if key.steps is None:
        raise ValueError("this storage key was read from a store: set its `steps` to that of its identity")
    return key.steps


def owner_mark(namespace: str) -> bytes:
    """Return the prefix of all tokens of this application, whichever secret is in use."""
    return sha256(b"flask_idempotency/1/namespace" + namespace.encode("utf-8", "surrogatepass")).digest()[:OWNER_BYTES]


def _record_owner(
    namespace: str, tenant: str | None, principal: str | None, operation: str | None, of_package: bool
) -> bytes:
    """Encode what precedes the client's key in a record's name."""
    who = optional(principal)
    request = (b"\2" + who if of_package else who, optional(operation))
    return encode(*_owner(namespace, tenant), *request, b"")[: -_LENGTH.size]


def _tenant_id(digest: KeyedDigest, shards: int, namespace: str, tenant: str | None, part: int) -> bytes:
    # The number of shards is left out: on a host with a wrong number, a record that is found still replays.
    which = () if shards == 1 else (part.to_bytes(2, "big"),)
    return digest(encode(*_owner(namespace, tenant), *which))[:TID_BYTES]


def _owner(namespace: str, tenant: str | None) -> tuple[bytes, bytes]:
    return namespace.encode("utf-8", "surrogatepass"), optional(tenant)


def _subkey(secret: bytes, purpose: bytes) -> bytes:
    # A name and no function for the digest: `hmac` takes 50 % longer with a function.
    return hmac.digest(secret, b"flask_idempotency/1/" + purpose, "sha256")


def keyed_digest(key: bytes) -> KeyedDigest:
    """Return HMAC-SHA-256 under this key of at most 64 bytes (RFC 2104).

    It hashes both padded keys once, and copies them for each message. OpenSSL's one-shot HMAC takes twice as long.
    """
    padded = key.ljust(sha256().block_size, b"\0")
    inner = sha256(bytes(byte ^ 0x36 for byte in padded)).copy
    outer = sha256(bytes(byte ^ 0x5C for byte in padded)).copy

    def mac(message: bytes) -> bytes:
        first, second = inner(), outer()
        first.update(message)
        second.update(first.digest())
        return second.digest()

    return mac


def keyed_name(data: bytes) -> str:
    """Return a digest as lower-case letters and digits."""
    return b32encode(data).decode("ascii").rstrip("=").lower()


def optional(value: str | None) -> bytes:
    """Return this text, or that there is none, as a part for `encode`."""
    return b"\0" if value is None else b"\1" + value.encode("utf-8", "surrogatepass")
