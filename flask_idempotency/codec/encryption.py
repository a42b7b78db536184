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
from collections.abc import Callable
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from flask_idempotency.codec.data_keys import DataKeyring
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.key_memory import OpenKey
from flask_idempotency.codec.keyring import KEY_BYTES, NONCE_BYTES
from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.keys import StorageKey, encode
from flask_idempotency.engine.model import Payload, Result, SealedBy, State
from flask_idempotency.engine.store import Binding

VERSION: Final = 2
AES_256_GCM: Final = 1

_HEAD: Final = bytes((VERSION << 4 | AES_256_GCM,))
_SHORTEST: Final = len(_HEAD) + NONCE_BYTES + 16
_ANSWER: Final = b"flask_idempotency/answer/2"
_RECORD_KEY: Final = b"flask_idempotency/record-key/1"


class EncryptedCodec:
    """Implements `ports.Codec`: an `EnvelopeCodec` whose envelopes are encrypted. Safe to share between threads."""

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

    def seal(self, result: Result, binding: Binding) -> Payload:
        plain = self._envelope.seal(result, binding)
        if not self._sealing:
            return plain
        key = self._data_keys.for_sealing(binding.key.tid)
        nonce = self._randomness(NONCE_BYTES)
        bound = _bound(_HEAD, binding, plain, key)
        data = _HEAD + nonce + _cipher(key, binding).encrypt(nonce, plain.data, bound)
        return Payload(data, plain.status, plain.success, plain.byte_size, SealedBy(key.kid, key.number))

    def open(self, payload: Payload, binding: Binding) -> Result:
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

    def _open_plain(self, payload: Payload, binding: Binding) -> Result:
        if not self._plain_allowed:
            raise CorruptRecord(
                "the answer is not encrypted, and IDEMPOTENCY_ENCRYPTION is required: anyone who can write to the store may "
                "have planted it. Run `flask idempotency doctor` before you change the setting"
            )
        return self._envelope.open(payload, binding)

    def _decrypted(self, payload: Payload, by: SealedBy, binding: Binding) -> bytes:
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


def _decrypted(payload: Payload, key: OpenKey, binding: Binding) -> bytes:
    head, nonce, sealed = payload.data[:1], payload.data[1 : 1 + NONCE_BYTES], payload.data[1 + NONCE_BYTES :]
    return _cipher(key, binding).decrypt(nonce, sealed, _bound(head, binding, payload, key))


def _cipher(key: OpenKey, binding: Binding) -> AESGCM:
    info = encode(_RECORD_KEY, binding.key.rid, b"%d" % binding.fence, binding.token)
    return AESGCM(HKDFExpand(SHA256(), KEY_BYTES, info).derive(key.key))


def _bound(head: bytes, binding: Binding, clear: Payload, key: OpenKey) -> bytes:
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
