"""The examples of encrypted answers in golden/, with all that is needed to open them and to seal them again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flask_idempotency.codec.encryption import DataKeyring, EncryptedCodec
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.keyring import KeyProvider, KeyRing
from flask_idempotency.engine.capabilities import DataKey, TenantKeys
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import SealedBy, StoredPayload
from flask_idempotency.engine.store import SealContext
from tests.codec.shelves import Shelf

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Sealed:
    """One example, as a store would tell it."""

    ring: KeyProvider
    shelf: TenantKeys
    binding: SealContext
    payload: StoredPayload

    def codec(self) -> EncryptedCodec:
        """What opens it; and seals it to the byte again, since its nonce is not random."""
        shelf = Shelf(changed=lambda _: self.shelf)
        nonce = self.payload.data[1:13]
        return EncryptedCodec(
            EnvelopeCodec(compression=None),
            DataKeyring(self.ring, shelf, step=lambda: 1),
            randomness=lambda size: nonce[:size],
        )


def golden(name: str) -> Sealed:
    """The example of this name."""
    content: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    key, record, payload = content["data_key"], content["record"], content["payload"]
    return Sealed(
        ring=KeyRing({kid: bytes.fromhex(ring_key) for kid, ring_key in content["ring"].items()}),
        shelf=TenantKeys(
            bytes.fromhex(key["store"]),
            (DataKey(key["number"], key["kid"], bytes.fromhex(key["wrapped"])),),
            key["number"],
        ),
        binding=SealContext(
            StorageKey(bytes.fromhex(record["rid"]), bytes.fromhex(record["tid"])),
            bytes.fromhex(record["token"]),
            record["fence"],
            bytes.fromhex(record["fingerprint"]),
        ),
        payload=StoredPayload(
            bytes.fromhex(payload["data"]),
            payload["status"],
            payload["success"],
            payload["byte_size"],
            SealedBy(payload["kid"], payload["number"]),
        ),
    )
