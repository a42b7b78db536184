"""Answers encrypted at rest, each for its own record.

Format version 2 (`tests/codec/golden` holds examples that every later release must open):

    byte 0        version << 4 | algorithm     1 is AES-256-GCM
    bytes 1-12    nonce, random
    byte 13 on    an envelope of an older format, encrypted as a whole, and 16 bytes of tag

That is 29 bytes more than the envelope itself. The key is HKDF-Expand (SHA-256) of the tenant's data key for the record's
id, fence and token, so that no two records share one; the data key is uniform, so there is nothing to extract (RFC 5869,
section 3.3). The associated data binds where an answer is and what stands in clear of it: what was sealed opens in
one record of one tenant of one store, for the owner that completed it and the request that it answered, with this status,
success and size. Names and times beside it are not bound.

Who can write to the store can still put a whole record back as it once was, with its key. Only a log elsewhere would tell.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.keyring import KEY_BYTES, KID, NONCE_BYTES, KeyProvider
from flask_idempotency.engine.capabilities import LARGEST_WRAPPED, DataKey, DataKeys, TenantKeys
from flask_idempotency.engine.errors import (
    ConfigurationError,
    CorruptRecord,
    IdempotencyError,
    KeyProviderUnavailable,
    StoreUnavailable,
)
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import StorageKey, encode
from flask_idempotency.engine.model import SealedBy, State, StoredPayload, StoredResponse
from flask_idempotency.engine.store import SealContext

MEMORY_SECONDS: Final = 60.0
"""After this a key is asked for again: so long may a provider's refusal take to be felt."""
FINISHING_SECONDS: Final = 300.0
"""So long may work that was begun with a key be finished with it, though the provider is silent by then. No longer is a
key in memory, counted from when it was unwrapped, if another one comes after it."""
MEMORY_KEYS: Final = 4096
"""About two megabytes. A tenant beyond that costs a look into the store, and an unwrapping, for each answer."""

Name: TypeAlias = "tuple[bytes, int | None]"


@dataclass(frozen=True, slots=True)
class UnwrappedKey:
    """A tenant's data key as it seals and opens, and what an answer that it sealed says of it."""

    key: bytes = field(repr=False)
    kid: str
    number: int
    store: bytes = field(repr=False)
    wrapped: bytes = field(repr=False)
    """As the store had it: two keys of one number are the same one if this is."""


class DataKeyCache:
    """Forgets by age, and the oldest when it is full. Not the least used: nothing lives long enough, and reads need no lock."""

    def __init__(self, *, limit: int = MEMORY_KEYS, monotonic: Callable[[], float] = time.monotonic) -> None:
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
        """What is remembered under this name, if it was learnt within so many seconds."""
        since, key = self._held.get(name, (0.0, None))
        return key if key is not None and self._monotonic() - since < within else None

    def put(self, name: Name, key: UnwrappedKey, *, since: float) -> None:
        """Remember it as of then: when it was asked for, not when the answer came."""
        with self._lock:
            self._held.pop(name, None)
            self._held[name] = since, key
            self._drop_old()

    def drop(self, tid: bytes) -> None:
        """Nothing of this tenant is remembered."""
        with self._lock:
            for name in [name for name in self._held if name[0] == tid]:
                del self._held[name]

    def _unlock(self) -> None:
        """In a child: the thread that held the lock while its parent forked is not here to give it back."""
        self._lock = threading.Lock()

    def _drop_old(self) -> None:
        now = self._monotonic()
        while self._held:
            name, (since, _) = next(iter(self._held.items()))
            if len(self._held) <= self._limit and now - since < FINISHING_SECONDS:
                return
            del self._held[name]


LONGEST_STEP: Final = 2**20
"""From one number of a tenant's data keys to the next. Two thousand rotations fit into 31 bits, and two keys that do not
know of each other have the same number once in a million times."""

TRIES: Final = 8
"""Each lost one is a key that somebody else has made, and which nearly always serves."""

Answered = TypeVar("Answered")

_LABEL: Final = b"flask_idempotency/data-key/1"
_SEALING: Final = None
"""The key to seal with is remembered under no number, so that no answer can name it by one that it has not."""


def _any_step() -> int:
    # Not always the next: a process may remember a key that its store has forgotten, under the number that it had.
    return 1 + secrets.randbelow(LONGEST_STEP)


class DataKeyring:
    """The data keys of tenants: found by number, made if there is none, unwrapped and remembered for a short while.

    A wrapped key and every response name the key that opens them: no code here tries one key after another. Safe to share
    between threads, and across a fork.

    Both questions raise `KeyProviderUnavailable` when the provider does not answer, and `StoreUnavailable` when the store does
    not.
    """

    def __init__(
        self,
        provider: KeyProvider,
        shelf: DataKeys,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        randomness: Callable[[int], bytes] = os.urandom,
        step: Callable[[], int] = _any_step,
        limit: int = MEMORY_KEYS,
    ) -> None:
        self._provider = provider
        self._shelf = shelf
        self._randomness = randomness
        self._step = step
        self._memory = DataKeyCache(limit=limit, monotonic=monotonic)

    def prepare(self, tid: bytes) -> None:
        """From now on, and for some minutes, `for_sealing` needs neither store nor provider."""
        if self._remembered(tid, within=MEMORY_SECONDS) is None:
            self._learn_to_seal(tid)

    def for_sealing(self, tid: bytes) -> UnwrappedKey:
        """The tenant's newest data key under the newest key of the ring that is not closed, made if there is none.

        Under *this process's* newest: during a rotation another process has another, and neither must outbid the other.
        A shelf that is damaged is `KeyProviderUnavailable` here: the answer to be sealed is not what is corrupt.
        """
        return self._remembered(tid, within=FINISHING_SECONDS) or self._learn_to_seal(tid)

    def for_opening(self, tid: bytes, by: SealedBy, *, afresh: bool = False) -> UnwrappedKey:
        """The data key that this answer names. Raises `CorruptRecord` when there is none such.

        `afresh`: whatever is remembered. A store that has lost its memory may give a number again, so that a remembered
        key which does not open an answer proves nothing yet.
        """
        key = None if afresh else self._memory.get((tid, by.number), within=MEMORY_SECONDS)
        return key if key is not None and key.kid == by.kid else self._look_up(tid, by)

    def forget(self, tid: bytes) -> None:
        """What is remembered of this tenant is out of date."""
        self._memory.drop(tid)

    def _remembered(self, tid: bytes, *, within: float) -> UnwrappedKey | None:
        key = self._memory.get((tid, _SEALING), within=within)
        return key if key is not None and key.kid == self._newest() else None

    def _learn_to_seal(self, tid: bytes) -> UnwrappedKey:
        since, kid = self._memory.now(), self._newest()
        if not KID.fullmatch(kid):
            raise ConfigurationError(f"The key provider's newest key has the id {kid!r}; it must match {KID.pattern}.")
        try:
            key = self._found_or_made(tid, kid)
        except CorruptRecord as error:
            raise KeyProviderUnavailable(f"nothing can be sealed for this tenant: {error}") from error
        for number in (_SEALING, key.number):
            self._memory.put((tid, number), key, since=since)
        return key

    def _found_or_made(self, tid: bytes, kid: str) -> UnwrappedKey:
        for _ in range(TRIES):
            shelf = self._shelf.read_keys(tid)
            usable = [key for key in shelf.keys if key.kid == kid and key.closed_for is None]
            newest = max(usable, key=lambda key: key.number, default=None)
            if newest is not None:
                return self._unwrapped(tid, newest, shelf)
            made = self._made(tid, kid, shelf)
            new = DataKey(made.number, kid, made.wrapped)
            if self._shelf.add(tid, new, store=shelf.store, after=shelf.last):
                return made
        raise KeyProviderUnavailable(
            "other processes add data keys for this tenant faster than one of them could be used"
        )

    def _made(self, tid: bytes, kid: str, shelf: TenantKeys) -> UnwrappedKey:
        key, number = self._randomness(KEY_BYTES), shelf.last + self._step()
        context = _context(tid, number, kid, shelf)
        wrapped = _asked(lambda: bytes(self._provider.wrap(kid, key, context=context)))
        if len(wrapped) > LARGEST_WRAPPED:
            raise KeyProviderUnavailable(
                f"the key provider wraps a key into {len(wrapped)} bytes; {LARGEST_WRAPPED} are allowed"
            )
        # A provider that garbles keys must be found out before anything is sealed that nobody could open.
        if _asked(lambda: self._provider.unwrap(kid, wrapped, context=context)) != key:
            raise KeyProviderUnavailable("the key provider did not unwrap what it had wrapped: it is not to be trusted")
        return UnwrappedKey(key, kid, number, shelf.store, wrapped)

    def _look_up(self, tid: bytes, by: SealedBy) -> UnwrappedKey:
        if by.number < 1 or not KID.fullmatch(by.kid):
            raise CorruptRecord("the answer does not say which key opens it")
        since, shelf = self._memory.now(), self._shelf.read_keys(tid)
        found = next((key for key in shelf.keys if key.number == by.number), None)
        if found is None:
            raise CorruptRecord(
                f"the answer is sealed with data key {by.number} of its tenant, which the store has not"
            )
        if found.kid != by.kid:
            raise CorruptRecord(f"the answer and its data key {by.number} do not name the same key of the ring")
        key = self._unwrapped(tid, found, shelf)
        self._memory.put((tid, by.number), key, since=since)
        return key

    def _unwrapped(self, tid: bytes, found: DataKey, shelf: TenantKeys) -> UnwrappedKey:
        if not KID.fullmatch(found.kid) or len(found.wrapped) > LARGEST_WRAPPED:
            raise CorruptRecord("a wrapped data key in the store is none that this package wrote")
        context = _context(tid, found.number, found.kid, shelf)
        key = _asked(lambda: bytes(self._provider.unwrap(found.kid, found.wrapped, context=context)))
        if len(key) != KEY_BYTES:
            raise CorruptRecord(f"what the key {found.kid!r} of the ring unwrapped is no data key")
        return UnwrappedKey(key, found.kid, found.number, shelf.store, found.wrapped)

    def _newest(self) -> str:
        return _asked(lambda: self._provider.newest)


def _context(tid: bytes, number: int, kid: str, shelf: TenantKeys) -> bytes:
    return encode(_LABEL, shelf.store, tid, b"%d" % number, kid.encode())


def _asked(question: Callable[[], Answered]) -> Answered:
    """What the provider says. Whatever it raises that is none of our words says nothing about the record."""
    try:
        return question()
    except StoreUnavailable as error:
        # Its word for "not now". That the store answers all the same makes a difference to whoever would go on without one.
        raise KeyProviderUnavailable(str(error)) from error
    except IdempotencyError:
        raise
    except Exception as error:
        raise KeyProviderUnavailable(f"the key provider failed ({type(error).__name__})") from error


VERSION: Final = 2
AES_256_GCM: Final = 1

_HEAD: Final = bytes((VERSION << 4 | AES_256_GCM,))
_SHORTEST: Final = len(_HEAD) + NONCE_BYTES + 16
_ANSWER: Final = b"flask_idempotency/answer/2"
_RECORD_KEY: Final = b"flask_idempotency/record-key/1"


class EncryptedCodec:
    """Implements `engine.store.Codec`: an `EnvelopeCodec` whose envelopes are encrypted. Safe to share between threads."""

    def __init__(
        self,
        envelope: EnvelopeCodec,
        data_keys: DataKeyring,
        *,
        sealing: bool = True,
        plain_allowed: bool = True,
        randomness: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """The envelope should not compress: the length of an answer would tell what its parts have in common.

        Without `sealing` new answers are plain, and those sealed before still open. Without `plain_allowed` an answer
        that is not encrypted is corrupt: else who can write to the store could put one of his own in the place of ours.
        """
        self._envelope = envelope
        self._data_keys = data_keys
        self._sealing = sealing
        self._plain_allowed = plain_allowed
        self._randomness = randomness

    def prepare(self, key: StorageKey) -> None:
        if self._sealing:
            self._data_keys.prepare(key.tid)

    def seal(self, result: StoredResponse, binding: SealContext) -> StoredPayload:
        plain = self._envelope.seal(result, binding)
        if not self._sealing:
            return plain
        key = self._data_keys.for_sealing(binding.key.tid)
        nonce = self._randomness(NONCE_BYTES)
        bound = _bound(_HEAD, binding, plain, key)
        data = _HEAD + nonce + _cipher(key, binding).encrypt(nonce, plain.data, bound)
        return StoredPayload(data, plain.status, plain.success, plain.byte_size, SealedBy(key.kid, key.number))

    def open(self, payload: StoredPayload, binding: SealContext) -> StoredResponse:
        if payload.sealed_by is None:
            return self._open_plain(payload, binding)
        head = payload.data[:1]
        if len(payload.data) < _SHORTEST:
            raise CorruptRecord("the encrypted answer is cut short")
        if head != _HEAD:
            raise CorruptRecord(
                f"encrypted format {head[0] >> 4}, algorithm {head[0] & 15} is not known to this release"
            )
        return self._envelope.unwrap(self._decrypted(payload, payload.sealed_by, binding), stated=payload)

    def forget(self, key: StorageKey) -> None:
        self._data_keys.forget(key.tid)

    def _open_plain(self, payload: StoredPayload, binding: SealContext) -> StoredResponse:
        if not self._plain_allowed:
            raise CorruptRecord(
                "the answer is not encrypted, and IDEMPOTENCY_ENCRYPTION is required: anyone who can write to the store may "
                "have planted it. Run `flask idempotency doctor` before you change the setting"
            )
        return self._envelope.open(payload, binding)

    def _decrypted(self, payload: StoredPayload, by: SealedBy, binding: SealContext) -> bytes:
        key = self._data_keys.for_opening(binding.key.tid, by)
        try:
            return _decrypted(payload, key, binding)
        except InvalidTag:
            fresh = self._data_keys.for_opening(binding.key.tid, by, afresh=True)
        # The same number of another key, when the store has lost its memory since. Never any other number.
        if fresh != key:
            try:
                return _decrypted(payload, fresh, binding)
            except InvalidTag:
                pass
        raise CorruptRecord("the answer was not sealed for this record, or was changed since")


def _decrypted(payload: StoredPayload, key: UnwrappedKey, binding: SealContext) -> bytes:
    head, nonce, sealed = payload.data[:1], payload.data[1 : 1 + NONCE_BYTES], payload.data[1 + NONCE_BYTES :]
    return _cipher(key, binding).decrypt(nonce, sealed, _bound(head, binding, payload, key))


def _cipher(key: UnwrappedKey, binding: SealContext) -> AESGCM:
    info = encode(_RECORD_KEY, binding.key.rid, b"%d" % binding.fence, binding.token)
    return AESGCM(HKDFExpand(SHA256(), KEY_BYTES, info).derive(key.key))


def _bound(head: bytes, binding: SealContext, clear: StoredPayload, key: UnwrappedKey) -> bytes:
    """What must be the same when it is opened. The order is part of the format."""
    return encode(
        _ANSWER,
        head,
        key.store,
        binding.key.tid,
        binding.key.rid,
        b"%d" % binding.fence,
        binding.token,
        State.COMPLETED.value.encode(),
        binding.fingerprint,
        key.kid.encode(),
        b"%d" % key.number,
        b"%d" % clear.status,
        b"\1" if clear.success else b"\0",
        b"%d" % clear.byte_size,
    )
