"""An idempotency key as a client writes it, and the storage key that stands for it.

Grammar: draft-ietf-httpapi-idempotency-key-header-07 (an RFC 8941 string), and the bare form that most clients send.
"""

from __future__ import annotations

import hmac
import re
import secrets
from base64 import b32encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from struct import Struct
from typing import Final

from flask_idempotency.engine.errors import InvalidKey

# When a client made its key, where the key says so.

# RFC 9562, section 5.7: 48 bits of milliseconds, then the version, and the variant after two more groups.
_UUID7: Final = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)
# github.com/ulid/spec: 26 letters of Crockford's alphabet, the first ten of which are as many milliseconds.
_ULID: Final = re.compile(r"([0-7][0-9A-HJKMNP-TV-Z]{9})[0-9A-HJKMNP-TV-Z]{16}", re.IGNORECASE)
_CROCKFORD: Final = {letter: value for value, letter in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}


def key_timestamp(client_key: str) -> float | None:
    """Seconds since the epoch, by the client's clock: of a UUID of version 7 or a ULID. None for any other key.

    Another key may look like one by chance, and then say any time from 1970 to the year 10889.
    """
    if uuid := _UUID7.fullmatch(client_key):
        return int(uuid[1] + uuid[2], 16) / 1000
    if ulid := _ULID.fullmatch(client_key):
        milliseconds = 0
        for letter in ulid[1].upper():
            milliseconds = milliseconds << 5 | _CROCKFORD[letter]
        return milliseconds / 1000
    return None


# The token of a claim: random, with a mark of the application and of the secret that its downstream keys come from.
#
# A vanished owner's downstream keys must be found again by whoever asks the other side what it has done. Under another
# secret than the owner's they would be other keys, which nobody has ever heard of; and that would look like proof that
# nothing was done. So two bytes of each token say which secret it was, and that it was one alone; and three say whose claim
# it is, for applications may share a store, and each of them can ask about its own only.

TOKEN_BYTES: Final = 16
OWNER_BYTES: Final = 3
"""Of the mark of an application. It is no secret, and stays the same while secrets rotate."""
MARK_BYTES: Final = 5
"""Of both marks."""

_SEVERAL: Final = 0x80


def new_token(mark: bytes = b"", *, several: bool = False) -> bytes:
    """A token for a claim with this mark. 88 bits of it are random.

    `several`: it is claimed under more than one secret, so nobody can tell from a record which of them its name is from.
    """
    beginning = _beginning(mark, several=several) if mark else b""
    return beginning + secrets.token_bytes(TOKEN_BYTES - len(beginning))


def successor(token: bytes) -> bytes:
    """A token with the same mark, for whoever settles a claim in its owner's place."""
    return token[:MARK_BYTES] + secrets.token_bytes(TOKEN_BYTES - MARK_BYTES)


def marked(token: bytes, mark: bytes) -> bool:
    """Whether this is the token of a claim of this application, under this secret, and no other secret beside it."""
    return token[:MARK_BYTES] == _beginning(mark, several=False)


def _beginning(mark: bytes, *, several: bool) -> bytes:
    secret = mark[OWNER_BYTES] & ~_SEVERAL | (_SEVERAL if several else 0)
    return mark[:OWNER_BYTES] + bytes((secret,)) + mark[OWNER_BYTES + 1 :]


TID_BYTES = 16
"""Enough that no two tenants share one by accident or by design: it is keyed. It is stored with every record."""

LONGEST_NAME = 255
"""Characters of a tenant, a principal, a namespace, an operation, a reason or an actor. Names are stored with records and are
not counted in a quota of bytes, so they are bounded. A longer one is refused, never cut: two names must not become one."""

MOST_REMEMBERED: Final = 4096
"""Callers and tenants whose part of a key an `Identity` remembers: a megabyte or two. It never changes."""

_COUNT, _LENGTH = Struct(">H"), Struct(">I")
_VISIBLE = re.compile(r"[!-~]+")
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")


@dataclass(frozen=True, slots=True)
class StorageKey:
    """Names a record without containing anything a client sent.

    `rid` has 32 bytes; `tid` has 16 and stands for the tenant, or for that part of it which the key is in: it decides the
    partition, and names what is counted and sealed per tenant.
    """

    rid: bytes
    tid: bytes
    label: str = field(default="", compare=False)
    """Eight characters that tell records apart in logs and lead back to none."""
    mark: bytes = field(default=b"", compare=False)
    """Of the namespace and the secret that it was derived from: see `token.py`."""

    def __repr__(self) -> str:
        """Says nothing: a repr ends up in logs."""
        return "StorageKey(…)"


@dataclass(frozen=True, slots=True, repr=False)
class Scope:
    """Whose key it is. An absent tenant or principal is not the same as an empty one."""

    namespace: str
    tenant: str | None
    principal: str | None
    operation: str | None = None
    """Only with `scope="operation"`: makes each endpoint a key space of its own."""


def parse_key(value: str, *, max_length: int = 255, key_format: str = "any") -> str:
    """The key that this header value names: the quoted and the bare form of one key are equal.

    `key_format` is "any", "uuid" or a regular expression that the whole key must match. Raises `InvalidKey`.

    A bare comma is refused: servers join two header lines with one, and two keys must never pass for one. A bare quote is
    refused too: it is half of a pair.
    """
    if value.startswith('"'):
        match = _QUOTED.fullmatch(value)
        if match is None:
            raise InvalidKey("the quoted key is not a well-formed RFC 8941 string, or more than one key was sent")
        key = re.sub(r"\\(.)", r"\1", match[1])
    elif "," in value:
        raise InvalidKey("more than one key was sent; a key that contains a comma must be quoted")
    elif '"' in value:
        # A quoted key that lost one of its quotes on the way: it must not become a second name of the same key.
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
        raise InvalidKey("the key may contain visible ASCII characters only")
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


def encode(*parts: bytes) -> bytes:
    """These parts as one byte string that no other parts give: each is preceded by its length."""
    pieces = [_COUNT.pack(len(parts))]
    for part in parts:
        pieces += (_LENGTH.pack(len(part)), part)
    return b"".join(pieces)


class Identity:
    """Derives every name from one secret: storage keys and their labels, fingerprints, downstream keys.

    Keyed, because client keys and bodies are guessable: who reads the store must not be able to try candidates.

    `tenant_shards` is part of the format of keys, as the secret is: with another number most records would be looked for
    where they are not.
    """

    def __init__(self, secret: bytes, *, tenant_shards: int = 1) -> None:
        self._record = _subkey(secret, b"record")
        self._tenant = _subkey(secret, b"tenant")
        self._fingerprint = _subkey(secret, b"fingerprint")
        self._downstream = _subkey(secret, b"downstream")
        self._log = _subkey(secret, b"log")
        self._mark = _subkey(secret, b"mark")
        self._shards = tenant_shards
        # Per object, so that nothing derived from a secret outlives its application.
        self._marks: dict[str, bytes] = {}
        self._owners: dict[Scope, bytes] = {}
        self._tids: dict[tuple[str, str | None, int], bytes] = {}

    def storage_key(self, scope: Scope, client_key: str) -> StorageKey:
        """Injective: no two (scope, key) pairs share a storage key, whatever characters they contain."""
        owner = self._owners.get(scope)
        if owner is None:
            owner = self._owner(scope)
        key = client_key.encode("utf-8", "surrogatepass")
        # As `encode` of the parts of the scope and the key.
        rid = hmac.digest(self._record, owner + _LENGTH.pack(len(key)) + key, "sha256")
        part = int.from_bytes(rid[:8], "big") % self._shards
        tid = self._tids.get((scope.namespace, scope.tenant, part)) or self._tid(scope.namespace, scope.tenant, part)
        mark = self._marks.get(scope.namespace) or self.mark(scope.namespace)
        return StorageKey(rid, tid, hmac.digest(self._log, rid, "sha256")[:4].hex(), mark)

    def _owner(self, scope: Scope) -> bytes:
        """Encode what precedes the client's key in a record's name."""
        request = (_optional(scope.principal), _optional(scope.operation))
        parts = encode(*_owner(scope.namespace, scope.tenant), *request, b"")
        if len(self._owners) >= MOST_REMEMBERED:
            self._owners.clear()
        owner = self._owners[scope] = parts[: -_LENGTH.size]
        return owner

    def mark(self, namespace: str) -> bytes:
        """Return what tokens begin with: of the application, and of this secret in it. Leads back to no secret."""
        if namespace not in self._marks:
            name = namespace.encode("utf-8", "surrogatepass")
            secret = _mac(self._mark, name)[: MARK_BYTES - OWNER_BYTES]
            self._marks[namespace] = owner_mark(namespace) + secret
        return self._marks[namespace]

    def label(self, key: StorageKey) -> str:
        """The label of a key that was found in a store."""
        return key.label or self._label(key.rid)

    def tenant_ids(self, namespace: str, tenant: str | None) -> tuple[bytes, ...]:
        """The `tid`s of all storage keys of this tenant: one for each of its parts, always in the same order."""
        return tuple(self._tid(namespace, tenant, part) for part in range(self._shards))

    def tenant_id(self, namespace: str, tenant: str | None) -> bytes:
        """The `tid` of every storage key of this tenant. Raises `ValueError` where it has several parts."""
        (only,) = self.tenant_ids(namespace, tenant)
        return only

    def pseudonym(self, name: str) -> str:
        """What stands for a tenant or a principal where their names must not: always the same, and leads back to neither."""
        return _base32(_mac(self._log, encode(b"name", name.encode("utf-8", "surrogatepass")))[:15])

    def fingerprint(self, *parts: bytes) -> bytes:
        """A keyed digest of these parts: 32 bytes. `fingerprint.py` says which parts."""
        return hmac.digest(self._fingerprint, encode(*parts), "sha256")

    def downstream_key(self, key: StorageKey, name: str) -> str:
        """An idempotency key for a call made on behalf of this one: the same over all attempts, another for each name."""
        return _base32(_mac(self._downstream, encode(key.rid, name.encode())))

    def _label(self, rid: bytes) -> str:
        return _mac(self._log, rid)[:4].hex()

    def _tid(self, namespace: str, tenant: str | None, part: int) -> bytes:
        # Not of the number of parts: on a host that has it wrong, what is found by chance still replays.
        which = () if self._shards == 1 else (part.to_bytes(2, "big"),)
        tid = _mac(self._tenant, encode(*_owner(namespace, tenant), *which))[:TID_BYTES]
        if len(self._tids) >= MOST_REMEMBERED:
            self._tids.clear()
        self._tids[namespace, tenant, part] = tid
        return tid


def owner_mark(namespace: str) -> bytes:
    """What the tokens of this application's claims begin with, under whatever secret."""
    return sha256(b"flask_idempotency/1/namespace" + namespace.encode("utf-8", "surrogatepass")).digest()[:OWNER_BYTES]


def _owner(namespace: str, tenant: str | None) -> tuple[bytes, bytes]:
    return namespace.encode("utf-8", "surrogatepass"), _optional(tenant)


def _subkey(secret: bytes, purpose: bytes) -> bytes:
    return _mac(secret, b"flask_idempotency/1/" + purpose)


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")  # the name: given the function, it takes half as long again


def _base32(data: bytes) -> str:
    return b32encode(data).decode("ascii").rstrip("=").lower()


def _optional(value: str | None) -> bytes:
    return b"\0" if value is None else b"\1" + value.encode("utf-8", "surrogatepass")
