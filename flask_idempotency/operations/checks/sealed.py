"""Whether what is encrypted can be opened, and what is to be encrypted will be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from flask_idempotency.engine.capabilities import Finding, Verdict
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.operations.keys import KeysReport

_PROBE: Final = bytes(range(32))
_CONTEXT: Final = b"flask-idempotency doctor"


class Wrapping(Protocol):
    """As much of a key provider as it takes to try its newest key."""

    @property
    def newest(self) -> str: ...

    def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes: ...

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes: ...


def newest_key(ring: Wrapping) -> list[Finding]:
    """Whether the key that wraps from now on wraps, and opens what it has wrapped."""
    try:
        kid = ring.newest
        opened = ring.unwrap(kid, ring.wrap(kid, _PROBE, context=_CONTEXT), context=_CONTEXT)
    except StoreUnavailable:
        text = "The key provider does not answer: new tenants' requests get 503, and soon everybody's."
        return [Finding("newest-key", Verdict.FAULT, text, "See that what IDEMPOTENCY_KEY_RING names can be reached.")]
    except Exception as error:  # noqa: BLE001 - somebody else's key service
        text = f"The newest key of the ring cannot be used ({type(error).__name__})."
        return [Finding("newest-key", Verdict.FAULT, text, _LOOK)]
    if opened != _PROBE:
        return [
            Finding("newest-key", Verdict.FAULT, "The newest key of the ring does not open what it has wrapped.", _LOOK)
        ]
    return [Finding("newest-key", Verdict.FINE, "The newest key of the ring wraps and opens.")]


_LOOK = "Look at IDEMPOTENCY_KEY_RING, and at what `flask idempotency keys status` says; put a key that works first."


def keys(report: KeysReport, *, required: bool) -> list[Finding]:
    """Whether everything that is sealed can be opened. `required`: whether plain answers are refused."""
    findings = []
    missing = [key.kid for key in report.keys if not key.known and key.records]
    old = [key.kid for key in report.keys if key.known and not key.newest and (key.records or key.data_keys)]
    if missing:
        text = f"Answers are sealed under keys that are not in the ring ({_names(missing)}): nobody can open them."
        remedy = "Put them back into IDEMPOTENCY_KEY_RING, after the newest, and see `flask idempotency keys status`."
        findings.append(Finding("keys", Verdict.FAULT, text, remedy))
    if required and report.plain_records:
        text = (
            f"{report.plain_records} stored answers are not encrypted, and IDEMPOTENCY_ENCRYPTION is required: they are never "
            "replayed, and their retries get 500. Anyone who can write to the store may have planted them."
        )
        remedy = (
            "Find out who stored them. If your application did before you switched encryption on: wait until they expire, or "
            "set IDEMPOTENCY_ENCRYPTION to on, run `flask idempotency seal`, and set it to required again. If you do not "
            "know: seal nothing, let them expire, and see who can write to the store."
        )
        findings.append(Finding("keys", Verdict.FAULT, text, remedy))
    elif report.plain_records:
        text = f"{report.plain_records} stored answers are not encrypted. They are replayed as they are."
        remedy = (
            "Wait until they expire. Or run `flask idempotency seal`, if your application stored them before you switched "
            "encryption on and no other party could write to the store."
        )
        findings.append(Finding("keys", Verdict.ADVICE, text, remedy))
    if old:
        text = f"A rotation of the ring is not at its end: answers are still sealed under old keys ({_names(old)})."
        findings.append(
            Finding("keys", Verdict.ADVICE, text, "Run `flask idempotency rotate`, and again after five minutes.")
        )
    return findings or [Finding("keys", Verdict.FINE, "The ring opens everything that is sealed.")]


def _names(kids: Sequence[str]) -> str:
    return ", ".join(kids)
