"""The secrets that name records, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_bytes
from typing import Any


def derived_secret(secret_key: str | bytes) -> bytes:
    """The secret of an application that has only a `SECRET_KEY`: to be listed last while it gets one of its own."""
    return b"derived from SECRET_KEY:" + _octets(secret_key)


def load_secrets(
    chosen: Any, secret_key: Any, *, in_memory: bool, lenient: bool
) -> tuple[tuple[bytes, ...], list[str]]:
    """The secrets, none if they cannot be used, and what is unwise about them."""
    if chosen is not None:
        several = list(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str | bytes) else [chosen]
        return tuple(_octets(secret) for secret in several) if all(map(_is_secret, several)) else (), []
    if in_memory:
        return (token_bytes(32),), []  # the records will not outlive this process, so their names need not either
    if _is_secret(secret_key):
        warning = (
            "IDEMPOTENCY_SECRET is not set, so it is derived from SECRET_KEY: rotating SECRET_KEY would make every "
            "idempotency key new and run retries again. Set IDEMPOTENCY_SECRET to [a value of its own, "
            "flask_idempotency.settings.derived_secret(SECRET_KEY)], and drop the second after one `keep`."
        )
        return (derived_secret(secret_key),), [] if lenient else [warning]
    return (), []


def _is_secret(value: Any) -> bool:
    return isinstance(value, str | bytes) and bool(value)


def _octets(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
