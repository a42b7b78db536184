"""The examples of encrypted answers in golden/, with all that is needed to open them and to seal them again."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flask_idempotency.codec.encryption import DataKeyring, EncryptedCodec
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.codec.key_sources import PassphraseKeyFile
from flask_idempotency.codec.keyring import KeyProvider, KeyRing
from flask_idempotency.engine.capabilities import DataKey, TenantKeys
from flask_idempotency.engine.errors import CorruptRecord, RingMismatch
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import SealContext, SealedBy, StoredPayload
from tests.codec.sealing import Shelf
from tests.codec.test_envelope import EXAMPLES

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


# The same answers as those of version 1. Files are never rewritten: they are what users' stores are full of.
ANSWERS = {name.replace("v1-", "v2-"): result for name, result in EXAMPLES.items()}


def test_golden_answers_open_for_ever() -> None:
    """With the ring, the wrapped data key and the clear facts of their day."""
    for name, result in ANSWERS.items():
        sealed = golden(name)
        assert result == sealed.codec().open(sealed.payload, sealed.binding), name


def test_every_golden_file_is_tested() -> None:
    assert {*ANSWERS, "wrapped-file-1"} == {path.stem for path in GOLDEN.glob("*.json")}


@pytest.mark.parametrize("name", ("v2-plain", "v2-reason", "v2-empty", "v2-tombstone"))
def test_answers_are_sealed_as_ever(name: str) -> None:
    """During a roll-out the old release opens what the new one seals. Compressed bytes may vary with zlib's version."""
    sealed = golden(name)

    assert sealed.payload == sealed.codec().seal(ANSWERS[name], sealed.binding)


def test_no_golden_answer_opens_in_the_place_of_another() -> None:
    examples = [golden(name) for name in ANSWERS]
    for ours in examples:
        for theirs in examples:
            if ours is not theirs:
                with pytest.raises((CorruptRecord, RingMismatch)):
                    theirs.codec().open(ours.payload, theirs.binding)
                with pytest.raises((CorruptRecord, RingMismatch)):
                    replace(ours, shelf=theirs.shelf).codec().open(ours.payload, ours.binding)


def test_golden_key_files_open_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "ring.json"
    shutil.copyfile(GOLDEN / "wrapped-file-1.json", path)
    path.chmod(0o600)
    sealed = golden("v2-plain")
    opening = replace(sealed, ring=PassphraseKeyFile(path, "correct horse battery"))

    assert ANSWERS["v2-plain"] == opening.codec().open(sealed.payload, sealed.binding)
