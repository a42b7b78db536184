"""Encryption at rest: the ring, and what has to be there before `required` is believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flask_idempotency.engine.capabilities import KeepsDataKeys
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.settings.transport import transport_fault

if TYPE_CHECKING:
    from flask_idempotency.codec.keyring import KeyProvider

NO_RING = (
    "IDEMPOTENCY_KEY_RING: is not set, and IDEMPOTENCY_ENCRYPTION is {mode}. Make a key with `flask idempotency keys "
    "generate`, keep it outside the store, and name its place: env:NAME, file:/path, or a KeyProvider."
)
NO_DATA_KEYS = (
    "IDEMPOTENCY_ENCRYPTION is {mode}, and the store ({store}) cannot keep the data keys of tenants: it has no `data_keys`. "
    "Use a memory, Redis or SQL store of this package, or set it to off."
)


def load_ring(source: Any) -> tuple[KeyProvider | None, list[str]]:
    """The ring that this setting names, or what is wrong with it. Says no key."""
    if source is None:
        return None, []
    try:
        from flask_idempotency.codec import keyring
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        return None, [
            "IDEMPOTENCY_KEY_RING is set, and the cryptography package is not installed: pip install "
            "'flask-idempotency[crypto]'."
        ]
    try:
        return keyring.load_ring(source), []
    except ConfigurationError as error:
        return None, [f"IDEMPOTENCY_KEY_RING: {fault}" for fault in error.faults]


def faults_of_encryption(loaded: Mapping[str, Any], config: Mapping[str, Any], *, identified: bool) -> Iterator[str]:
    """One sentence for each part that is missing, with its remedy.

    `identified`: whether something says who a caller is.
    """
    mode, store = loaded.get("encryption", "off"), loaded["store"]
    if mode == "off":
        return
    if loaded.get("key_ring") is None:
        yield NO_RING.format(mode=mode)
    if callable(getattr(store, "claim", None)) and not isinstance(store, KeepsDataKeys):
        yield NO_DATA_KEYS.format(mode=mode, store=type(store).__name__)
    if mode != "required":
        return
    if loaded.get("secret") is None:
        yield (
            "IDEMPOTENCY_SECRET: is not set, and IDEMPOTENCY_ENCRYPTION is required. One that is derived from SECRET_KEY, or "
            "made at random, does not do: set a long random value that is kept outside the store."
        )
    if not identified:
        yield (
            "IDEMPOTENCY_ENCRYPTION is required, and nothing says who a caller is. Register @idempotency.principal_loader "
            "before init_app, pass Idempotency(app, principal=…), or set up Flask-Login or Flask-JWT-Extended first."
        )
    if not loaded.get("allow_plaintext_transport", False):
        for name in ("store", "redis_url"):
            fault = transport_fault(f"IDEMPOTENCY_{name.upper()}", loaded[name], config) if loaded.get(name) else None
            if fault is not None:
                yield fault
