"""The secrets that name records, newest first, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from secrets import token_bytes
from typing import Any, Final

LEAST_BYTES: Final = 16
LEAST_BYTES_REQUIRED: Final = 32
"""Under encryption `required`: as long as the HMAC that is keyed with it."""

LEAST_DIFFERENT_BYTES: Final = 6
"""Of 16 random bytes at least 12 differ, and of 32 random hexadecimal digits at least 8."""

MAKE_ONE: Final = "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"

_DERIVED: Final = b"derived from SECRET_KEY:"

_PUBLISHED: Final = frozenset(
    example.encode(encoding)
    for encoding in ("utf-8", "latin-1")
    for example in (
        "192b9bdd22ab9ed4d12e236c78afcb9a393ec15f71bbf5dc987d54727823bcbf",  # Flask
        '_5#y2L"F4Q8z\n\xec]/',  # Flask, as a string
        "A0Zr98j/3yX R~XHH!jmN]LWX/,?RT",  # Flask until 1.0
        "F12Zr47j\3yX R~X@H!jmM]Lwf/,?KT",  # copied from Flask's by many
        "09d25e094faa6ca2556c818166b7a9563b93f7099f6f0f4caa6cf63b88e8d3e7",  # FastAPI
        "pf9Wkove4IKEAXvy-cQkeDPhv9Cb3Ag-wyJILbq_dFw",  # Flask-Security
        "146585145368132386173505678016728509634",  # Flask-Security, a salt
        "you-will-never-guess",  # the Flask Mega-Tutorial
        "hard to guess string",
        "correct horse battery staple",
    )
)
"""Examples that documentation has published."""

# A value that is made of these and digits is one that somebody was to replace.
_PLACEHOLDERS: Final = """
    a an and any app application at be bit bits byte bytes change changed changeit changeme default demo dev development do
    documented env environment example fill flask for foo bar baz generate get hard here hmac idempotency in insecure insert is
    it jwt key keep kept least length local long lorem me min must my need not of on only or out outside own pass passphrase
    passwd password placeholder please private prod production put random replace safe sample secret secure set should signing
    some something staging store string strong super supersecret test testing tests text that the this to todo token top unsafe
    use value very with xxx you your qwerty abc abcdef admin root letmein django database
"""
_WORDS: Final = tuple(_PLACEHOLDERS.split())
_BETWEEN: Final = re.compile(r"""[ \t.,:;!?'"_/+*#@=<>(){}\[\]-]+""")
_MOST_DIGITS: Final = 8


def derived_secret(secret_key: str | bytes) -> bytes:
    """The secret of an application that has only a `SECRET_KEY`: to be listed last while it gets one of its own."""
    return _DERIVED + octets(secret_key)


def load_secrets(
    chosen: Any, secret_key: Any, *, in_memory: bool, lenient: bool
) -> tuple[tuple[bytes, ...], list[str]]:
    """The secrets, none if they cannot be used, and what is unwise about them."""
    if chosen is not None:
        several = list(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str | bytes) else [chosen]
        return tuple(octets(secret) for secret in several) if all(map(_is_secret, several)) else (), []
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


def weak_secrets(secrets: Sequence[bytes], *, required: bool, lenient: bool) -> tuple[list[str], list[str]]:
    """What is wrong with these secrets, and what is only unwise: one sentence for each, with its length and the remedy.

    A former secret that is too weak may stay in the list for one `keep`, with a warning: without it, every key would be new.
    Under `required` it may not. In debug and testing (`lenient`) any secret will do, unless encryption is `required`.
    """
    faults, warnings = [], []
    if lenient and not required:
        return [], []
    least = LEAST_BYTES_REQUIRED if required else LEAST_BYTES
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
            rotate = (
                " If it has named records, set IDEMPOTENCY_SECRET to [the new one, the old one], and drop the second after one "
                "`keep`."
            )
            faults.append(f"{name}: {weakness} {MAKE_ONE}.{rotate}")
        elif required:
            faults.append(
                f"{name}: {weakness} IDEMPOTENCY_ENCRYPTION is required: drop it, or set that to on until one `keep` has "
                "passed since every process knows the first."
            )
        else:
            warnings.append(
                f"{name}: {weakness} Drop it when one `keep` has passed since every process knows the first."
            )
    return faults, warnings


def octets(value: str | bytes) -> bytes:
    """The bytes of a secret, however it is written."""
    return value.encode() if isinstance(value, str) else value


def _weakness(secret: bytes, least: int) -> str | None:
    if len(secret) < least:
        return f"it has {len(secret)} bytes, and must have at least {least}."
    if secret in _PUBLISHED:
        return f"it has {len(secret)} bytes, and is an example that documentation has published."
    if _made_of_words(secret):
        return f"it has {len(secret)} bytes, and is a placeholder that many use."
    if len(set(secret)) < LEAST_DIFFERENT_BYTES or _repeats(secret):
        return f"it has {len(secret)} bytes, and repeats itself."
    return None


def _repeats(secret: bytes) -> bool:
    """Whether it is a short text again and again, or counts up or down."""
    half = len(secret) // 2
    if any(secret == (secret[:size] * len(secret))[: len(secret)] for size in range(1, half + 1)):
        return True
    return len({(after - before) % 256 for before, after in pairwise(secret)} - {1}) < 2


def _made_of_words(secret: bytes) -> bool:
    """Whether placeholder words, a few digits and what stands between them are all that it consists of."""
    text = _BETWEEN.sub("", secret.decode("latin-1").lower())
    if not text or sum(map(str.isdecimal, text)) > _MOST_DIGITS:
        return False
    ends = {0}
    for at in range(len(text)):
        if at in ends:
            ends |= {at + len(word) for word in _WORDS if text.startswith(word, at)}
            ends |= {at + 1} if text[at].isdecimal() else set()
    return len(text) in ends


def _is_secret(value: Any) -> bool:
    return isinstance(value, str | bytes) and bool(value)


def is_same(secret: bytes, keys: Iterable[Any]) -> bool:
    """Whether this secret is one of these keys of the application, written as text or bytes."""
    return any(_is_secret(key) and secret == octets(key) for key in keys)
