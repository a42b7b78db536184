"""The data keys of tenants: found by number, made when there is none, unwrapped and remembered for a short while.

A wrapped key and every answer name the key that opens them. Nothing here tries one key after another.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Final, TypeVar

from flask_idempotency.codec.key_memory import FINISHING_SECONDS, MEMORY_KEYS, MEMORY_SECONDS, KeyMemory, OpenKey
from flask_idempotency.codec.keyring import KEY_BYTES, KID, KeyProvider
from flask_idempotency.engine.capabilities import LARGEST_WRAPPED, DataKey, DataKeys, KeyShelf
from flask_idempotency.engine.errors import (
    ConfigurationError,
    CorruptRecord,
    IdempotencyError,
    KeysUnavailable,
    StoreUnavailable,
)
from flask_idempotency.engine.keys import encode
from flask_idempotency.engine.model import SealedBy

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
    """Data keys as the codec needs them. Safe to share between threads, and across a fork.

    Both questions raise `KeysUnavailable` when the provider does not answer, and `StoreUnavailable` when the store does not.
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
        self._memory = KeyMemory(limit=limit, monotonic=monotonic)

    def prepare(self, tid: bytes) -> None:
        """From now on, and for some minutes, `for_sealing` needs neither store nor provider."""
        if self._remembered(tid, within=MEMORY_SECONDS) is None:
            self._learn_to_seal(tid)

    def for_sealing(self, tid: bytes) -> OpenKey:
        """The tenant's newest data key under the newest key of the ring that is not closed, made if there is none.

        Under *this process's* newest: during a rotation another process has another, and neither must outbid the other.
        A shelf that is damaged is `KeysUnavailable` here: the answer to be sealed is not what is corrupt.
        """
        return self._remembered(tid, within=FINISHING_SECONDS) or self._learn_to_seal(tid)

    def for_opening(self, tid: bytes, by: SealedBy, *, afresh: bool = False) -> OpenKey:
        """The data key that this answer names. Raises `CorruptRecord` when there is none such.

        `afresh`: whatever is remembered. A store that has lost its memory may give a number again, so that a remembered
        key which does not open an answer proves nothing yet.
        """
        key = None if afresh else self._memory.get((tid, by.number), within=MEMORY_SECONDS)
        return key if key is not None and key.kid == by.kid else self._look_up(tid, by)

    def forget(self, tid: bytes) -> None:
        """What is remembered of this tenant is out of date."""
        self._memory.drop(tid)

    def _remembered(self, tid: bytes, *, within: float) -> OpenKey | None:
        key = self._memory.get((tid, _SEALING), within=within)
        return key if key is not None and key.kid == self._newest() else None

    def _learn_to_seal(self, tid: bytes) -> OpenKey:
        since, kid = self._memory.now(), self._newest()
        if not KID.fullmatch(kid):
            raise ConfigurationError(f"The key provider's newest key has the id {kid!r}; it must match {KID.pattern}.")
        try:
            key = self._found_or_made(tid, kid)
        except CorruptRecord as error:
            raise KeysUnavailable(f"nothing can be sealed for this tenant: {error}") from error
        for number in (_SEALING, key.number):
            self._memory.put((tid, number), key, since=since)
        return key

    def _found_or_made(self, tid: bytes, kid: str) -> OpenKey:
        for _ in range(TRIES):
            shelf = self._shelf.shelf(tid)
            usable = [key for key in shelf.keys if key.kid == kid and key.closed_for is None]
            newest = max(usable, key=lambda key: key.number, default=None)
            if newest is not None:
                return self._unwrapped(tid, newest, shelf)
            made = self._made(tid, kid, shelf)
            new = DataKey(made.number, kid, made.wrapped)
            if self._shelf.add(tid, new, store=shelf.store, after=shelf.last):
                return made
        raise KeysUnavailable("other processes add data keys for this tenant faster than one of them could be used")

    def _made(self, tid: bytes, kid: str, shelf: KeyShelf) -> OpenKey:
        key, number = self._randomness(KEY_BYTES), shelf.last + self._step()
        context = _context(tid, number, kid, shelf)
        wrapped = _asked(lambda: bytes(self._provider.wrap(kid, key, context=context)))
        if len(wrapped) > LARGEST_WRAPPED:
            raise KeysUnavailable(
                f"the key provider wraps a key into {len(wrapped)} bytes; {LARGEST_WRAPPED} are allowed"
            )
        # A provider that garbles keys must be found out before anything is sealed that nobody could open.
        if _asked(lambda: self._provider.unwrap(kid, wrapped, context=context)) != key:
            raise KeysUnavailable("the key provider did not unwrap what it had wrapped: it is not to be trusted")
        return OpenKey(key, kid, number, shelf.store, wrapped)

    def _look_up(self, tid: bytes, by: SealedBy) -> OpenKey:
        if by.number < 1 or not KID.fullmatch(by.kid):
            raise CorruptRecord("the answer does not say which key opens it")
        since, shelf = self._memory.now(), self._shelf.shelf(tid)
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

    def _unwrapped(self, tid: bytes, found: DataKey, shelf: KeyShelf) -> OpenKey:
        if not KID.fullmatch(found.kid) or len(found.wrapped) > LARGEST_WRAPPED:
            raise CorruptRecord("a wrapped data key in the store is none that this package wrote")
        context = _context(tid, found.number, found.kid, shelf)
        key = _asked(lambda: bytes(self._provider.unwrap(found.kid, found.wrapped, context=context)))
        if len(key) != KEY_BYTES:
            raise CorruptRecord(f"what the key {found.kid!r} of the ring unwrapped is no data key")
        return OpenKey(key, found.kid, found.number, shelf.store, found.wrapped)

    def _newest(self) -> str:
        return _asked(lambda: self._provider.newest)


def _context(tid: bytes, number: int, kid: str, shelf: KeyShelf) -> bytes:
    return encode(_LABEL, shelf.store, tid, b"%d" % number, kid.encode())


def _asked(question: Callable[[], Answered]) -> Answered:
    """What the provider says. Whatever it raises that is none of our words says nothing about the record."""
    try:
        return question()
    except StoreUnavailable as error:
        # Its word for "not now". That the store answers all the same makes a difference to whoever would go on without one.
        raise KeysUnavailable(str(error)) from error
    except IdempotencyError:
        raise
    except Exception as error:
        raise KeysUnavailable(f"the key provider failed ({type(error).__name__})") from error
