"""Encrypt stored responses, each for its own record, under data keys of its tenant.

Format version 2 (`tests/codec/golden` holds examples that every later release must open):

    byte 0        version << 4 | algorithm     1 is AES-256-GCM
    bytes 1-12    nonce, random
    byte 13 on    an envelope of an older format, encrypted as a whole, and 16 bytes of tag

That is 29 bytes more than the envelope. The key is HKDF-Expand (SHA-256) of the tenant's data key for the record's id, fence
and token, so no two records share one. The data key is uniform, so we skip the extract step (RFC 5869, section 3.3). The
associated data binds a response to its place and to the facts that the store keeps in clear. It opens in one record of one
tenant of one store, for the worker that completed it, for the same request, with this status, success and size. Names and
times in the record are not bound.

The steps of a journal are sealed in the same format around format 3: see `_bound`.

An attacker who can write to the store can still put back an older version of a whole record and its key.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import cache, cached_property
from struct import Struct
from typing import Final, TypeAlias, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.keyring import KEY_BYTES, KID, NONCE_BYTES, KeyProvider, not_in_ring
from flask_idempotency.codec.step_envelope import STEP_ERASED
from flask_idempotency.engine.capabilities import LARGEST_WRAPPED, DataKey, DataKeys, TenantKeys
from flask_idempotency.engine.errors import (
    ConfigurationError,
    CorruptRecord,
    IdempotencyError,
    KeyProviderUnavailable,
    ResponseUnavailable,
    RingMismatch,
    StoreUnavailable,
)
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import KeyedDigest, StorageKey, data_key_context, encode, keyed_digest, optional
from flask_idempotency.engine.model import ERASED, SealContext, SealedBy, StoredPayload, StoredResponse
from flask_idempotency.engine.outbox import Message, StoredMessage, Undeliverable
from flask_idempotency.engine.store import StepContext

CACHE_SECONDS: Final = 60.0
"""After this we unwrap a key again. A key that the provider has revoked works so long at most."""
FINISHING_SECONDS: Final = 300.0
"""A worker may finish a request with a key of this age, even if the provider is down by then. When another key comes, we
remove older ones from memory."""
CACHE_KEYS: Final = 4096
"""About two megabytes. For each further tenant, every response costs a read and an unwrap."""

Name: TypeAlias = "tuple[bytes, int | None]"


@dataclass(frozen=True, slots=True)
class UnwrappedKey:
    """A tenant's data key in clear, with its number and the id of the key that wraps it."""

    key: bytes = field(repr=False)
    kid: str
    number: int
    store: bytes = field(repr=False)
    wrapped: bytes = field(repr=False)
    """The stored form. Two keys with one number are the same key if this is equal."""
    digest: KeyedDigest = field(init=False, repr=False, compare=False)
    """HMAC-SHA-256 under this key, from which the key of each record comes."""
    name: tuple[bytes, bytes] = field(init=False, repr=False, compare=False)
    """Its `kid` and number, as associated data has them."""
    first_parts: bytes = field(init=False, repr=False, compare=False)
    """How the associated data of each response under this key begins: that it has 14 parts, and the first three."""
    name_parts: bytes = field(init=False, repr=False, compare=False)
    """`name` in the associated data of a response."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", keyed_digest(self.key))
        object.__setattr__(self, "name", (self.kid.encode(), b"%d" % self.number))
        first = encode(b"flask_idempotency/answer/2", _HEAD, self.store, *[b""] * 11)
        object.__setattr__(self, "first_parts", first[: -11 * 4])
        object.__setattr__(self, "name_parts", encode(*self.name)[2:])


class DataKeyCache:
    """A cache that drops keys by age, and the oldest if it is full. It ignores use, so reads need no lock."""

    def __init__(self, *, limit: int = CACHE_KEYS, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._held: dict[Name, tuple[float, UnwrappedKey]] = {}
        """The oldest first."""
        after_fork(self._unlock)

    def __len__(self) -> int:
        return len(self._held)

    def now(self) -> float:
        return self._monotonic()

    def get(self, name: Name, *, within: float) -> UnwrappedKey | None:
        """Return the key of this name, if it is no older than `within` seconds."""
        since, key = self._held.get(name, (0.0, None))
        return key if key is not None and self._monotonic() - since < within else None

    def put(self, name: Name, key: UnwrappedKey, *, since: float) -> None:
        """Store a key. Its age counts from `since`, the time of the request to the provider."""
        with self._lock:
            self._held.pop(name, None)
            self._held[name] = since, key
            now = self._monotonic()
            while self._held:
                oldest, (since, _) = next(iter(self._held.items()))
                if len(self._held) <= self._limit and now - since < FINISHING_SECONDS:
                    return
                del self._held[oldest]

    def drop(self, tid: bytes) -> None:
        """Drop all keys of this tenant."""
        with self._lock:
            for name in [name for name in self._held if name[0] == tid]:
                del self._held[name]

    def _unlock(self) -> None:
        # After a fork: a thread of the parent may have held the lock, and it does not exist in the child.
        self._lock = threading.Lock()


MAX_STEP: Final = 2**20
"""The step between two numbers of a tenant's data keys. 31 bits hold two thousand rotations, and two keys that are made
independently get the same number once in a million times."""

TRIES: Final = 8
"""Each time we lose the race to add a key, another process has added one that we can nearly always use."""

ResultT = TypeVar("ResultT")

_SEALING: Final = None
"""The cache name of the key that seals. It is no number, so no response can name it."""


@dataclass(eq=False, repr=False)
class DataKeyring:
    """The data keys of tenants: found by number, made if there is none, unwrapped and remembered for a short while.

    A wrapped key and every response name the key that opens them: no code here tries one key after another. Safe to share
    between threads, and across a fork.

    Raises `KeyProviderUnavailable` if the provider does not respond, and `StoreUnavailable` if the store does not.
    """

    provider: KeyProvider
    data_keys: DataKeys
    _: KW_ONLY
    monotonic: InitVar[Callable[[], float]] = time.monotonic
    randomness: Callable[[int], bytes] = os.urandom
    # Not always 1: after a data loss, a process may still cache a key under the number that it had.
    step: Callable[[], int] = lambda: 1 + secrets.randbelow(MAX_STEP)
    limit: InitVar[int] = CACHE_KEYS

    def __post_init__(self, monotonic: Callable[[], float], limit: int) -> None:
        self._cache = DataKeyCache(limit=limit, monotonic=monotonic)

    def prepare(self, tid: bytes) -> None:
        """Cache the key, so that `for_sealing` needs neither store nor provider for some minutes."""
        self.for_sealing(tid, within=CACHE_SECONDS)

    def for_sealing(self, tid: bytes, *, within: float = FINISHING_SECONDS) -> UnwrappedKey:
        """Return the tenant's newest enabled data key under the ring's newest key. Make one if there is none.

        The ring is this process's: during a rotation, another process may have another newest key, and both must work.
        Damaged data keys raise `KeyProviderUnavailable` here, because the response to seal is not corrupt.
        """
        if (cached := self._cached(tid, within=within)) is not None:
            return cached
        since, kid = self._cache.now(), self._newest()
        try:
            key = self._find_or_make(tid, kid, self.data_keys)
        except CorruptRecord as error:
            raise _unusable(error) from error
        for number in (_SEALING, key.number):
            self._cache.put((tid, number), key, since=since)
        return key

    def for_opening(self, tid: bytes, by: SealedBy, *, afresh: bool = False) -> UnwrappedKey:
        """Return the data key that this response names. Raises `CorruptRecord` if there is none.

        `afresh` skips the cache. After a data loss, a store may give a number again, so a cached key that does not open a
        response proves nothing.
        """
        key = None if afresh else self._cache.get((tid, by.number), within=CACHE_SECONDS)
        return key if key is not None and key.kid == by.kid else self._look_up(tid, by)

    def still_sealing(self, tid: bytes, *, within: DataKeys | None) -> UnwrappedKey:
        """Return the key for sealing that the store has now. Make one if there is none.

        `within` are the data keys as a transaction sees them: what is made there may be rolled back, so `for_sealing` does not
        return it before the store shows it. While the store is away, a cached key is good for the request under way.
        """
        try:
            return self._find_or_make(
                tid, self._newest(), self.data_keys if within is None else within, remembered=FINISHING_SECONDS
            )
        except StoreUnavailable:
            if (cached := self._cached(tid, within=FINISHING_SECONDS)) is None:
                raise
            return cached
        except CorruptRecord as error:
            # No cached key either: a body that it seals could not be opened with what the store has.
            raise _unusable(error) from error

    def still_opening(self, tid: bytes, by: SealedBy) -> UnwrappedKey:
        """Return the data key of this name if the store has it now. Raises `CorruptRecord` if it does not."""
        try:
            return self._look_up(tid, by, remembered=CACHE_SECONDS)
        except CorruptRecord:
            self.forget(tid)
            raise

    def forget(self, tid: bytes) -> None:
        """Drop the cached keys of this tenant."""
        self._cache.drop(tid)

    def _cached(self, tid: bytes, *, within: float) -> UnwrappedKey | None:
        key = self._cache.get((tid, _SEALING), within=within)
        return key if key is not None and key.kid == self._newest() else None

    def _find_or_make(self, tid: bytes, kid: str, data_keys: DataKeys, *, remembered: float = 0.0) -> UnwrappedKey:
        if not KID.fullmatch(kid):
            raise ConfigurationError(f"The key provider's newest key has the id {kid!r}; it must match {KID.pattern}.")
        for _ in range(TRIES):
            tenant = data_keys.read_keys(tid)
            usable = [key for key in tenant.keys if key.kid == kid and key.closed_for is None]
            newest = max(usable, key=lambda key: key.number, default=None)
            if newest is not None:
                return self._unwrapped(tid, newest, tenant, remembered=remembered)
            made = self._make(tid, kid, tenant)
            new = DataKey(made.number, kid, made.wrapped)
            if data_keys.add(tid, new, store=tenant.store, after=tenant.last):
                return made
        raise KeyProviderUnavailable(
            f"other processes have added data keys for this tenant {TRIES} times in a row: send the request again"
        )

    def _make(self, tid: bytes, kid: str, tenant: TenantKeys) -> UnwrappedKey:
        key, number = self.randomness(KEY_BYTES), tenant.last + self.step()
        context = data_key_context(tid, number, kid, tenant.store)
        wrapped = _provider_call(lambda: bytes(self.provider.wrap(kid, key, context=context)))
        if len(wrapped) > LARGEST_WRAPPED:
            raise KeyProviderUnavailable(
                f"the key provider wraps a key into {len(wrapped)} bytes; {LARGEST_WRAPPED} are allowed"
            )
        # Find a provider that garbles keys before we seal a response that no key opens.
        if _provider_call(lambda: self.provider.unwrap(kid, wrapped, context=context)) != key:
            raise KeyProviderUnavailable(
                "the key provider did not unwrap the key that it had wrapped: check the provider"
            )
        return UnwrappedKey(key, kid, number, tenant.store, wrapped)

    def _look_up(self, tid: bytes, by: SealedBy, *, remembered: float = 0.0) -> UnwrappedKey:
        if by.number < 1 or not KID.fullmatch(by.kid):
            raise CorruptRecord("the response does not name the key that opens it")
        tenant = self.data_keys.read_keys(tid)
        found = next((key for key in tenant.keys if key.number == by.number), None)
        if found is None:
            raise CorruptRecord(
                f"the response is sealed with data key {by.number} of its tenant, and the store does not have this key"
            )
        if found.kid != by.kid:
            raise CorruptRecord(f"the response and its data key {by.number} name different keys of the ring")
        return self._unwrapped(tid, found, tenant, remembered=remembered)

    def _unwrapped(self, tid: bytes, found: DataKey, tenant: TenantKeys, *, remembered: float = 0.0) -> UnwrappedKey:
        """Return this key in clear. Ask the provider, unless it unwrapped the same one in the last `remembered` seconds."""
        since, known = self._cache.now(), self._cache.get((tid, found.number), within=remembered)
        if known is not None and (known.kid, known.wrapped, known.store) == (found.kid, found.wrapped, tenant.store):
            return known
        if not KID.fullmatch(found.kid) or len(found.wrapped) > LARGEST_WRAPPED:
            raise CorruptRecord("this package did not write a wrapped data key that the store has")
        context = data_key_context(tid, found.number, found.kid, tenant.store)
        try:
            key = _provider_call(lambda: bytes(self.provider.unwrap(found.kid, found.wrapped, context=context)))
        except CorruptRecord as error:
            is_listed = found.kid in _provider_call(self.provider.kids)
            raise RingMismatch(
                f"the key {found.kid!r} of the ring does not open a data key that names it: compare IDEMPOTENCY_KEY_RING with "
                "that of other hosts, where another key may have this id"
                if is_listed
                else not_in_ring(found.kid)
            ) from error
        if len(key) != KEY_BYTES:
            raise RingMismatch(f"the key {found.kid!r} of the ring unwrapped a text that is no data key")
        unwrapped = UnwrappedKey(key, found.kid, found.number, tenant.store, found.wrapped)
        self._cache.put((tid, found.number), unwrapped, since=since)
        return unwrapped

    def _newest(self) -> str:
        return _provider_call(lambda: self.provider.newest)


def _unusable(error: CorruptRecord) -> KeyProviderUnavailable:
    return KeyProviderUnavailable(f"the data keys of this tenant cannot be used: {error}")


def _provider_call(call: Callable[[], ResultT]) -> ResultT:
    """Call the provider. An exception that is not ours tells nothing about the record, so it is `KeyProviderUnavailable`."""
    try:
        return call()
    except StoreUnavailable as error:
        # The provider is down, but the store works: `on_store_down="allow"` must not run the view.
        raise KeyProviderUnavailable(str(error)) from error
    except IdempotencyError:
        raise
    except Exception as error:
        raise KeyProviderUnavailable(f"the key provider failed ({type(error).__name__})") from error


VERSION: Final = 2
AES_256_GCM: Final = 1

_HEAD: Final = bytes((VERSION << 4 | AES_256_GCM,))
_SHORTEST: Final = len(_HEAD) + NONCE_BYTES + 16
_SIZE: Final = Struct(">I").pack
_RECORD_KEY: Final = encode(b"flask_idempotency/record-key/1", b"", b"", b"")[: -3 * 4]
_COMPLETED, _SUCCESS, _FAILURE = (encode(part)[2:] for part in (b"completed", b"\1", b"\0"))


@dataclass(eq=False, repr=False)
class EncryptedCodec:
    """Implements `engine.store.Codec`: an `EnvelopeCodec` whose envelopes are encrypted. Safe to share between threads."""

    envelope: EnvelopeCodec
    """One that does not compress: the length of a response would tell what its parts have in common."""
    data_keys: DataKeyring
    _: KW_ONLY
    sealing: bool = True
    """Without it, new responses are plain, and sealed ones still open."""
    plain_allowed: bool = True
    """Without it, a plain response is corrupt: an attacker who can write to the store could have planted it."""
    randomness: Callable[[int], bytes] = os.urandom

    @cached_property
    def steps(self) -> EncryptedSteps:
        """Seals and opens what journals keep."""
        return EncryptedSteps(self)

    def prepare(self, key: StorageKey) -> None:
        if self.sealing:
            self.data_keys.prepare(key.tid)

    def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
        return self._sealed(self.envelope.seal(result, binding), binding)

    def open(self, payload: StoredPayload, binding: SealContext) -> StoredResponse:
        if payload.sealed_by is None:
            if not self.plain_allowed:
                raise CorruptRecord(
                    "the response is not encrypted, and IDEMPOTENCY_ENCRYPTION is required: anyone who can write to the store "
                    "may have planted it. Run `flask idempotency doctor` before you change the setting"
                )
            return self.envelope.open(payload, binding)
        head = payload.data[:1]
        if len(payload.data) < _SHORTEST:
            raise CorruptRecord("the encrypted response is cut short")
        if head != _HEAD:
            raise CorruptRecord(f"encrypted format {head[0] >> 4}, algorithm {head[0] & 15} is unknown to this release")
        return self.envelope.unwrap(self._opened(payload, payload.sealed_by, binding), stated=payload)

    def forget(self, key: StorageKey) -> None:
        self.data_keys.forget(key.tid)

    def seal_body(
        self, tid: bytes, message: Message, *, namespace: str | None, within: DataKeys | None = None
    ) -> tuple[bytes, SealedBy | None]:
        """Implements `engine.outbox.SealsBodies`, in the same format as a response."""
        if not self.sealing:
            return message.body, None
        # Not from memory: another process may have erased the tenant, and the body could not be opened.
        key = self.data_keys.still_sealing(tid, within=within)
        plain = message.body
        if namespace is not None:
            headers = json.dumps(dict(message.headers), separators=(",", ":")).encode()
            name = namespace.encode("utf-8", "surrogatepass")
            plain = encode(name, optional(message.tenant), optional(message.key), headers, message.body)
        bound = _body_bound(key, tid, message, former=namespace is None)
        return self._encrypted(plain, bound), SealedBy(key.kid, key.number)

    def opener(self, namespaces: Collection[str]) -> Callable[[StoredMessage], Message]:
        """Implements `engine.outbox.SealsBodies`."""

        @cache
        def key_of(tid: bytes, by: SealedBy) -> UnwrappedKey | None:
            with suppress(CorruptRecord):
                return self.data_keys.still_opening(tid, by)
            return None

        def opened(stored: StoredMessage) -> Message:
            by, tid, message = stored.sealed_by, stored.tenant_id, stored.message
            if by is None:
                if self.plain_allowed:
                    return message
                raise Undeliverable(
                    "the body is not encrypted, and IDEMPOTENCY_ENCRYPTION is required: another program may have planted it"
                )
            if tid is None:
                raise Undeliverable("the row is damaged: the body is encrypted, and its tenant is missing")
            key = key_of(tid, by)
            if key is None:
                raise Undeliverable("the body cannot be opened: its data key was erased with the tenant, or is lost")
            if message.body[:1] != _HEAD or len(message.body) < _SHORTEST:
                raise Undeliverable("the body is damaged, or another release sealed it")
            try:
                plain = _decrypted(message.body, _body_bound(key, tid, message, former=stored.former))
            except InvalidTag:
                raise Undeliverable("the body was not sealed for this message, or has been changed") from None
            if stored.former:
                return replace(message, body=plain)
            namespace, opened = _from_parts(message, plain)
            if namespace not in namespaces:
                raise Undeliverable("the message belongs to another namespace: another program has moved it")
            return opened

        return opened

    def _sealed(self, plain: StoredPayload, binding: SealContext | StepContext) -> StoredPayload:
        if not self.sealing:
            return plain
        key = self.data_keys.for_sealing(binding.key.tid)
        data = self._encrypted(plain.data, _bound(key, binding, plain))
        return StoredPayload(data, plain.status, plain.success, plain.byte_size, SealedBy(key.kid, key.number))

    def _encrypted(self, plain: bytes, bound: _Bound) -> bytes:
        nonce, (cipher, associated) = self.randomness(NONCE_BYTES), bound
        return b"%b%b%b" % (_HEAD, nonce, cipher.encrypt(nonce, plain, associated))

    def _opened(self, payload: StoredPayload, by: SealedBy, binding: SealContext | StepContext) -> bytes:
        key = self.data_keys.for_opening(binding.key.tid, by)
        try:
            return _decrypted(payload.data, _bound(key, binding, payload))
        except InvalidTag:
            fresh = self.data_keys.for_opening(binding.key.tid, by, afresh=True)
        # After a data loss, this number may belong to another key. Never try another number.
        if fresh != key:
            with suppress(InvalidTag):
                return _decrypted(payload.data, _bound(fresh, binding, payload))
        what = "step" if isinstance(binding, StepContext) else "response"
        raise CorruptRecord(f"the {what} was not sealed for this record, or has been changed")


@dataclass(slots=True, eq=False, repr=False)
class EncryptedSteps:
    """Implements `engine.store.StepCodec` for an `EncryptedCodec`, with its data keys and its rules about plain entries."""

    codec: EncryptedCodec

    def seal(self, item: bytes, result: bytes | None, context: StepContext) -> StoredPayload:
        return self.codec._sealed(self.codec.envelope.steps.seal(item, result, context), context)

    def open(self, payload: StoredPayload, context: StepContext) -> tuple[bytes, bytes | None]:
        codec = self.codec
        if payload.sealed_by == ERASED:
            raise ResponseUnavailable(STEP_ERASED)
        if payload.sealed_by is None:
            if not codec.plain_allowed:
                raise CorruptRecord(
                    "the step is not encrypted, and IDEMPOTENCY_ENCRYPTION is required: anyone who can write to the store "
                    "may have planted it"
                )
            return codec.envelope.steps.open(payload, context)
        if payload.data[:1] != _HEAD or len(payload.data) < _SHORTEST:
            raise CorruptRecord("the encrypted step is cut short, or its format is unknown to this release")
        return codec.envelope.steps.unwrap(codec._opened(payload, payload.sealed_by, context))


_Bound: TypeAlias = tuple[AESGCM, bytes]
"""The cipher of one place, and the associated data, which must be equal when it is opened. Their parts belong to the format."""


def _cipher(key: UnwrappedKey, *name: bytes) -> AESGCM:
    # HKDF-Expand of as many bytes as the hash has: one block, which has the number 1 (RFC 5869, section 2.3).
    return AESGCM(key.digest(encode(*name) + b"\1"))


def _bound(key: UnwrappedKey, binding: SealContext | StepContext, clear: StoredPayload) -> _Bound:
    """Bind a response or a step: it opens in its own place and state only.

    A pause and a resume give a record other tokens, so the token is no part of a step's place.
    """
    rid, fence, tid, fingerprint = binding.key.rid, b"%d" % binding.fence, binding.key.tid, binding.fingerprint
    if isinstance(binding, StepContext):
        kind = binding.effects.encode(), binding.state.encode()
        place = rid, binding.step, fence, *kind, binding.digest, fingerprint
        cipher = _cipher(key, b"flask_idempotency/step-key/1", rid, binding.step, fence)
        return cipher, encode(b"flask_idempotency/step/1", _HEAD, key.store, tid, *place, *key.name)
    # As `encode` writes it, but written out, because every request waits for it: `encode` takes a fifth longer in all.
    token, size = binding.token, _SIZE
    claim = b"%b%b%b%b%b%b" % (size(len(rid)), rid, size(len(fence)), fence, size(len(token)), token)
    parts = key.first_parts, size(len(tid)), tid, claim, _COMPLETED, size(len(fingerprint)), fingerprint, key.name_parts
    status, byte_size, success = b"%d" % clear.status, b"%d" % clear.byte_size, _SUCCESS if clear.success else _FAILURE
    facts = size(len(status)), status, success, size(len(byte_size)), byte_size
    return AESGCM(key.digest(b"%b%b\1" % (_RECORD_KEY, claim))), b"".join((*parts, *facts))


def _body_bound(key: UnwrappedKey, tid: bytes, message: Message, *, former: bool) -> _Bound:
    """Bind a message: a body opens only in its own row.

    Format 1 has the body alone under the seal, and binds what is beside it. Format 2 has all but the id and the topic in it.
    """
    message_id, label, place = message.message_id.encode(), b"flask_idempotency/outbox-body/2", [message.topic.encode()]
    if former:
        headers = json.dumps(dict(message.headers), sort_keys=True, separators=(",", ":")).encode()
        label = b"flask_idempotency/outbox-body/1"
        place += optional(message.key), optional(message.tenant), headers
    cipher = _cipher(key, b"flask_idempotency/outbox-key/1", message_id)
    return cipher, encode(label, _HEAD, key.store, tid, message_id, *place, *key.name)


def _decrypted(data: bytes, bound: _Bound) -> bytes:
    cipher, associated = bound
    return cipher.decrypt(data[1 : 1 + NONCE_BYTES], data[1 + NONCE_BYTES :], associated)


def _from_parts(message: Message, data: bytes) -> tuple[str, Message]:
    """Return the namespace and the whole message. Only we can have sealed these bytes, so they are whole."""
    parts, place = [], 2
    while place < len(data):
        end = place + 4 + int.from_bytes(data[place : place + 4], "big")
        parts.append(data[place + 4 : end])
        place = end
    namespace, tenant, key, headers, body = parts
    names = [None if each[:1] == b"\0" else each[1:].decode("utf-8", "surrogatepass") for each in (tenant, key)]
    opened = replace(message, body=body, headers=json.loads(headers), tenant=names[0], key=names[1])
    return namespace.decode("utf-8", "surrogatepass"), opened
