"""Secrets that a guess would find are refused, by their length and never by their value."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.settings import Settings, derived_secret, load_settings
from flask_idempotency.settings.security import NO_RING

STRONG = "kUq3vN8xZt5bWm1cYr7d"
STRONGER = "kUq3vN8xZt5bWm1cYr7d-hLs2eJg9pAo4fQi6"

WEAK = [
    "a",
    "changeme",
    "fifteen-bytes-x",
    "changeme-changeme",
    "CHANGE_ME_CHANGE_ME",
    "your-secret-key-here",
    "my-super-secret-key-2024",
    "thisisasecretkey",
    "dev" * 6,
    "x" * 16,
    "ab" * 20,
    "0123456789abcdef",
    "12345678901234567890",
    "abcdefghijklmnopqrstuvwxyz",
    bytes(32),
    bytes(range(32)),
    "your-256-bit-secret",
    "a-string-secret-at-least-256-bits-long",
    "a long random value, kept outside the database",
    b'_5#y2L"F4Q8z\n\xec]/',
    '_5#y2L"F4Q8z\n\xec]/',
    "192b9bdd22ab9ed4d12e236c78afcb9a393ec15f71bbf5dc987d54727823bcbf",
    "09d25e094faa6ca2556c818166b7a9563b93f7099f6f0f4caa6cf63b88e8d3e7",
]


def load(secret: Any = None, *, lenient: bool = False, secret_key: Any = None, **named: Any) -> Settings:
    config = {f"IDEMPOTENCY_{name.upper()}": value for name, value in named.items()}
    if secret is not None:
        config["IDEMPOTENCY_SECRET"] = secret
    return load_settings(
        {"IDEMPOTENCY_STORE": "redis://127.0.0.1", "SECRET_KEY": secret_key, **config},
        {},
        app_name="shop",
        lenient=lenient,
    )


def faults(*arguments: Any, **named: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(*arguments, **named)
    return str(caught.value)


@pytest.mark.parametrize("weak", WEAK, ids=repr)
def test_a_weak_secret_is_refused_outside_debug_and_testing(weak: str | bytes) -> None:
    """Who reads the store could try candidates. The text tells the length and the command, and not the value."""
    told = faults(weak)

    assert f"it has {len(weak if isinstance(weak, bytes) else weak.encode())} bytes" in told
    assert "secrets.token_urlsafe(32)" in told
    assert repr(weak) not in told
    assert "a" == weak or str(weak) not in told
    load(weak, lenient=True)


@pytest.mark.parametrize("weak", WEAK, ids=repr)
def test_a_secret_that_is_derived_is_as_strong_as_its_secret_key(weak: str | bytes) -> None:
    assert "SECRET_KEY" in faults(secret_key=weak)
    assert "SECRET_KEY" in faults(derived_secret(weak))
    load(secret_key=weak, lenient=True)
    load(secret_key=STRONG)


def test_random_secrets_are_accepted() -> None:
    for _ in range(300):
        for strong in (
            secrets.token_bytes(16),
            secrets.token_hex(8),
            secrets.token_urlsafe(16),
            str(secrets.randbits(128) | 1 << 127),
        ):
            load(strong)


def test_a_random_secret_of_memory_needs_nothing() -> None:
    load(store="memory://", secret_key="dev")


@pytest.mark.parametrize("lenient", (False, True))
def test_under_required_a_secret_has_32_bytes_in_debug_and_testing_too(lenient: bool) -> None:
    """It keys an HMAC-SHA256. Other faults may stand beside it."""
    ring = NO_RING.partition("{")[0]
    for weak in ("a", STRONG, "x" * 40, [STRONGER, STRONG]):
        told = faults(weak, lenient=lenient, encryption="required")
        assert "IDEMPOTENCY_SECRET" in told
        assert "must have at least 32" in told or "repeats itself" in told

    told = faults(STRONGER, lenient=lenient, encryption="required")
    assert ring in told
    assert "IDEMPOTENCY_SECRET" not in told


def test_a_weak_secret_may_be_rotated_out() -> None:
    """To leave it out at once would make every key new, and retries would run again. It is a warning at each start."""
    settings = load([STRONG, "changeme"])

    assert (STRONG.encode(), b"changeme") == settings.secrets
    (warning,) = settings.warnings
    assert "number 2 of 2: it has 8 bytes" in warning
    assert "changeme" not in warning
    assert "number 1 of 2: it has 8 bytes" in faults(["changeme", STRONG])


def test_an_application_that_is_switched_off_needs_no_secret_of_any_strength() -> None:
    assert not load("a", enabled=False).enabled
