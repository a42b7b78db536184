"""Check the secrets that name records.

Texts show lengths and setting names. They never show a secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from secrets import token_bytes
from typing import Any, Final

MIN_SECRET_BYTES: Final = 16
MIN_SECRET_BYTES_REQUIRED: Final = 32
"""With encryption `required`: as long as the HMAC that is keyed with the secret."""

MIN_DIFFERENT_BYTES: Final = 6
"""Of 16 random bytes at least 12 differ, and of 32 random hexadecimal digits at least 8."""

MAKE_ONE: Final = "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"

_DERIVED: Final = b"derived from SECRET_KEY:"
_IS_DERIVED: Final = (
    "IDEMPOTENCY_SECRET is not set, so it is derived from SECRET_KEY: rotating SECRET_KEY would make every idempotency key new "
    "and run retries again. Set IDEMPOTENCY_SECRET to [a value of its own, "
    "flask_idempotency.settings.derived_secret(SECRET_KEY)], and drop the second after the longest `keep` or `remember`."
)

_PUBLISHED: Final = frozenset(
    {
        b"192b9bdd22ab9ed4d12e236c78afcb9a393ec15f71bbf5dc987d54727823bcbf",  # Flask
        b'_5#y2L"F4Q8z\n\xec]/',  # Flask
        b"09d25e094faa6ca2556c818166b7a9563b93f7099f6f0f4caa6cf63b88e8d3e7",  # FastAPI
        b"you-will-never-guess",  # the Flask Mega-Tutorial
        b"hard to guess string",
        b"a-string-secret-at-least-256-bits-long",  # jwt.io
        b"your-256-bit-secret",  # jwt.io
        b"your-secret-key-here",
        b"your_secret_key_here",
        b"change-me-in-production",
    }
)
"""Examples that documentation has published, of 16 bytes or more. The list is short on purpose: it stops what is copied, and
the length and the repetitions stop most of the rest."""


def derived_secret(secret_key: str | bytes) -> bytes:
    """Return the secret that an application with no `IDEMPOTENCY_SECRET` derives from this `SECRET_KEY`.

    When you give the application its own secret, list this one last in `IDEMPOTENCY_SECRET` for one `keep`. Otherwise
    every key is new, and retries run again.
    """
    return _DERIVED + _bytes(secret_key)


def load_secrets(
    loaded: Mapping[str, Any], secret_key: Any, *, in_memory: bool, lenient: bool
) -> tuple[tuple[bytes, ...], list[str], list[str]]:
    """Return the secrets of these options, newest first; what is wrong with them; and warnings."""
    configured, required = loaded.get("secret"), loaded.get("encryption") == "required"
    secrets, faults, warnings = tuple[bytes, ...](), list[str](), list[str]()
    if configured is not None:
        is_list = isinstance(configured, Sequence) and not isinstance(configured, str | bytes)
        listed = list(configured) if is_list else [configured]
        secrets = tuple(map(_bytes, listed)) if all(map(_is_secret, listed)) else ()
    elif in_memory:
        secrets = (token_bytes(32),)  # the records end with this process, so their names may too
    elif _is_secret(secret_key):
        secrets = (derived_secret(secret_key),)
        warnings += [] if lenient else [_IS_DERIVED]
    if required and configured is None:
        pass  # a fault of encryption, which reports it
    elif not secrets:
        faults.append(
            "IDEMPOTENCY_SECRET: must be a non-empty string or a list of them. "
            f"Set it (or SECRET_KEY) to a long random value that is kept outside the store. {MAKE_ONE}."
        )
    elif loaded.get("enabled", True):
        faults, unwise = secret_weaknesses(secrets, required=required, lenient=lenient)
        warnings += unwise
    return secrets, faults, warnings


def secret_weaknesses(secrets: Sequence[bytes], *, required: bool, lenient: bool) -> tuple[list[str], list[str]]:
    """Return the faults and the warnings about these secrets: one sentence each, with the length and the remedy.

    A weak former secret may stay in the list for one `keep`, with a warning: without it, every key would be new. With
    encryption `required` it may not. In debug and testing (`lenient`) any secret will do, unless encryption is `required`.
    """
    faults, warnings = [], []
    if lenient and not required:
        return [], []
    least = MIN_SECRET_BYTES_REQUIRED if required else MIN_SECRET_BYTES
    for number, secret in enumerate(secrets):
        weakness = _weakness(secret.removeprefix(_DERIVED), least)
        if weakness is None:
            continue
        name = (
            "IDEMPOTENCY_SECRET" if len(secrets) == 1 else f"IDEMPOTENCY_SECRET, number {number + 1} of {len(secrets)}"
        )
        if secret.startswith(_DERIVED):
            name += ", which is derived from SECRET_KEY"
        if number == 0:
            faults.append(
                f"{name}: {weakness} {MAKE_ONE}. If it has named records, set IDEMPOTENCY_SECRET to [the new one, the old "
                "one], and drop the second after the longest `keep` or `remember`."
            )
        elif required:
            faults.append(
                f"{name}: {weakness} IDEMPOTENCY_ENCRYPTION is required: drop it, or set that to on until one `keep` has "
                "passed since every process knows the first."
            )
        else:
            warnings.append(
                f"{name}: {weakness} Drop it when the longest `keep` or `remember` has passed since every process knows the "
                "first."
            )
    return faults, warnings


def is_same(secret: bytes, keys: Iterable[Any]) -> bool:
    """Return whether this secret is one of these keys of the application, written as text or bytes."""
    return any(_is_secret(key) and secret == _bytes(key) for key in keys)


def _is_secret(value: Any) -> bool:
    return isinstance(value, str | bytes) and bool(value)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _weakness(secret: bytes, least: int) -> str | None:
    size = f"it has {len(secret)} bytes, and"
    if len(secret) < least:
        return f"{size} must have at least {least}."
    if secret in _PUBLISHED:
        return f"{size} is an example that documentation has published."
    # Steps from byte to byte find what counts up or down, such as 0123456789.
    steps = {after - before for before, after in pairwise(secret)}
    if min(len(set(secret)), len(steps)) < MIN_DIFFERENT_BYTES or secret in (secret * 2)[1:-1]:
        return f"{size} repeats itself."
    return None
