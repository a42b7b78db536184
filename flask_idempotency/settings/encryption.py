"""Check what encryption at rest needs. Only an application that encrypts, or has a key ring, loads this module.

Texts show setting names. They never show a key or a URL, because a URL may hold a password.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.offered import capabilities_of

if TYPE_CHECKING:
    from flask_idempotency.codec.keyring import KeyProvider  # needs an optional package

NO_RING = (
    "IDEMPOTENCY_KEY_RING: is not set, and IDEMPOTENCY_ENCRYPTION is {mode}. Make a key with `flask idempotency keys "
    "generate`, keep it outside the store, and set this to its place: env:NAME, file:/path, or a KeyProvider."
)
NO_DATA_KEYS = (
    "IDEMPOTENCY_ENCRYPTION is {mode}, and the store ({store}) cannot keep the data keys of tenants: it has no `data_keys`. "
    "Use a memory, Redis or SQL store of this package, or set it to off."
)


def load_encryption(
    loaded: Mapping[str, Any], config: Mapping[str, Any], *, has_principal: bool
) -> tuple[KeyProvider | None, list[str]]:
    """Return the key ring of these options, and one sentence with its remedy for each part that encryption lacks."""
    key_ring, faults, source = None, list[str](), loaded.get("key_ring")
    if source is not None:
        try:
            from flask_idempotency.codec import key_sources
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "cryptography":
                raise
            faults = [
                "IDEMPOTENCY_KEY_RING is set, and the cryptography package is not installed: pip install "
                "'flask-idempotency[crypto]'."
            ]
        else:
            try:
                key_ring = key_sources.load_ring(source)
            except ConfigurationError as error:
                faults = [f"IDEMPOTENCY_KEY_RING: {fault}" for fault in error.faults]
    return key_ring, [*faults, *_lacking(loaded, config, has_principal=has_principal)]


def _lacking(loaded: Mapping[str, Any], config: Mapping[str, Any], *, has_principal: bool) -> Iterator[str]:
    mode, store = loaded.get("encryption", "off"), loaded["store"]
    if mode == "off":
        return
    if loaded.get("key_ring") is None:
        yield NO_RING.format(mode=mode)
    if callable(getattr(store, "claim", None)) and capabilities_of(store).data_keys is None:
        yield NO_DATA_KEYS.format(mode=mode, store=type(store).__name__)
    if mode != "required":
        return
    if loaded.get("secret") is None:
        yield (
            "IDEMPOTENCY_SECRET: is not set, and IDEMPOTENCY_ENCRYPTION is required. A secret that is "
            "derived from SECRET_KEY, or made at random, is not enough: set a long random value that is kept outside the "
            "store."
        )
    if not has_principal:
        yield (
            "IDEMPOTENCY_ENCRYPTION is required, and the application cannot name its callers. Set up "
            "Flask-Login or Flask-JWT-Extended first, pass Idempotency(app, principal=…), or register "
            "@idempotency.principal_loader before init_app."
        )
    if not loaded.get("allow_plaintext_transport", False):
        from flask_idempotency.settings.transport import exposure  # for the applications that require encryption

        for name in ("store", "redis_url"):
            found = exposure(f"IDEMPOTENCY_{name.upper()}", loaded[name], config) if loaded.get(name) else None
            if found is not None:
                yield (
                    f"{found.setting}: {found.what}, and IDEMPOTENCY_ENCRYPTION is required. {found.remedy}, or, if "
                    "something else protects the way there, set IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True."
                )
