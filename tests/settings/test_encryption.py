"""Encryption at rest as it is configured: `required` is not believed before everything is there."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.settings import Settings, load_settings, summary
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore

KEY, OLD = (b64encode(letter * 32).decode() for letter in (b"k", b"o"))
RING = {"2026-11": KEY, "2025-11": OLD}
WHOLE: dict[str, Any] = {
    "encryption": "required",
    "store": "rediss://:canary@cache/0",
    "secret": "canary-9f2c47d1e8b35a60c1d47be2a5583f09",
    "key_ring": RING,
}


def load(config: dict[str, Any] | None = None, *, has_principal: bool = True, **settings: Any) -> Settings:
    named = {f"IDEMPOTENCY_{name.upper()}": value for name, value in settings.items() if value is not None}
    return load_settings({**(config or {}), **named}, {}, app_name="shop", lenient=True, has_principal=has_principal)


def faults(config: dict[str, Any] | None = None, *, has_principal: bool = True, **settings: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        load(config, has_principal=has_principal, **settings)
    assert "canary" not in str(caught.value)
    return caught.value.faults


def test_required_starts_when_everything_is_there() -> None:
    """And means: sealed, uncompressed, and nobody named in clear."""
    settings = load(**WHOLE)

    assert ("required", None, True) == (settings.encryption, settings.compression, settings.hash_identities)
    assert settings.key_ring is not None
    assert "2026-11" == settings.key_ring.newest


@pytest.mark.parametrize(
    ("missing", "begins", "remedy"),
    (
        ({"key_ring": None}, "IDEMPOTENCY_KEY_RING: is not set", "keys generate"),
        ({"secret": None}, "IDEMPOTENCY_SECRET: is not set", "outside the store"),
        ({"secret": None, "store": "memory://"}, "IDEMPOTENCY_SECRET: is not set", "made at random"),
        ({"store": "redis://:canary@cache"}, "IDEMPOTENCY_STORE: names a Redis", "rediss://"),
        (
            {"store": "redis://cache/0", "secret": ["canary-9f2c47d1e8b35a60c1d47be2a5583f09"]},
            "IDEMPOTENCY_STORE: names a Redis",
            "PLAINTEXT_TRANSPORT",
        ),
        (
            {"store": FaultyStore(MemoryStore())},
            "IDEMPOTENCY_ENCRYPTION is required, and the store (FaultyStore)",
            "off",
        ),
    ),
)
def test_each_missing_part_is_one_sentence_with_its_remedy(missing: dict[str, Any], begins: str, remedy: str) -> None:
    """What is missing alone is told alone."""
    told = faults(
        {"SECRET_KEY": "canary"},
        **{**WHOLE, "allow_plaintext_transport": not isinstance(missing.get("store"), str), **missing},
    )

    assert 1 == len(told), told
    assert told[0].startswith(begins)
    assert remedy in told[0]


def test_a_caller_that_nobody_names_is_a_missing_part() -> None:
    """Under one anonymous name, answers would be sealed for everybody."""
    (told,) = faults(**WHOLE, has_principal=False)

    assert "the application cannot name its callers" in told
    assert "principal_loader" in told


def test_all_missing_parts_are_told_together() -> None:
    """With whatever else is wrong; nobody fixes a deployment one restart at a time."""
    told = faults(
        {"SECRET_KEY": "canary"}, has_principal=False, encryption="required", store="redis://cache", quota_records=-1
    )

    assert [
        "IDEMPOTENCY_QUOTA_RECORDS:",
        "IDEMPOTENCY_KEY_RING:",
        "IDEMPOTENCY_SECRET:",
        "IDEMPOTENCY_ENCRYPTION",
        "IDEMPOTENCY_STORE:",
    ] == [text.split()[0] for text in told]


def test_on_asks_for_less() -> None:
    """A ring, and a store that can keep data keys. It is the way to `required`, and leaves plain answers readable."""
    settings = load({"SECRET_KEY": "k"}, has_principal=False, encryption="on", store="redis://cache", key_ring=RING)

    assert ("on", None, False) == (settings.encryption, settings.compression, settings.hash_identities)
    (told,) = faults({"SECRET_KEY": "k"}, encryption="on", store="redis://cache")
    assert told.startswith("IDEMPOTENCY_KEY_RING: is not set, and IDEMPOTENCY_ENCRYPTION is on.")


def test_a_ring_that_cannot_be_read_is_told_under_its_name_and_not_called_missing() -> None:
    """What somebody has mistyped may be a key."""
    (told,) = faults(**{**WHOLE, "key_ring": "canary"})

    assert told.startswith("IDEMPOTENCY_KEY_RING: ")
    assert "is not set" not in told


@pytest.mark.parametrize("source", ("{key}:prod", "{key}.{key}:prod", "{key}:{key}"))
def test_a_key_that_was_written_the_wrong_way_round_is_not_said(source: str) -> None:
    """Without its padding it could be the name of a module. Nor does Python quote it."""
    key = b64encode(bytes(range(32))).decode().rstrip("=").replace("+", "x").replace("/", "y")

    with pytest.raises(ConfigurationError) as caught:
        load(**{**WHOLE, "key_ring": source.format(key=key)})

    chain = (caught.value, caught.value.__cause__, caught.value.__context__)
    assert not any(key[:8] in repr(error) for error in chain)
    (told,) = caught.value.faults
    assert "its id comes first" in told


def test_what_was_chosen_goes_before_what_encryption_would_have() -> None:
    """Compression and names have defaults that depend on it, and values of their own."""
    settings = load(**WHOLE, compression="zlib", hash_identities=False)

    assert ("zlib", False) == (settings.compression, settings.hash_identities)
    plain = load({"SECRET_KEY": "k"}, store="redis://cache", compression="off", hash_identities=True)
    assert (None, True, "off") == (plain.compression, plain.hash_identities, plain.encryption)


@pytest.mark.parametrize("name", ("encryption", "compression", "hash_identities", "allow_plaintext_transport"))
def test_other_words_are_refused(name: str) -> None:
    settings: dict[str, Any] = {"secret": "only-tests-9f2c47d1e8b35a60c1d47be2", name: "perhaps"}

    assert any(text.startswith(f"IDEMPOTENCY_{name.upper()}: ") for text in faults(**settings))


def test_the_ring_may_be_a_provider_of_ones_own_and_is_never_shown() -> None:
    """A debug page prints settings."""
    ring = KeyRing({"a": b"canary" + b"k" * 26})

    settings = load(**{**WHOLE, "key_ring": ring})

    assert ring is settings.key_ring
    assert "canary" not in repr(settings)
    assert KEY not in repr(load(**WHOLE))

    class Talkative(KeyRing):
        def __repr__(self) -> str:
            return "canary"

    assert "canary" not in repr(load(**{**WHOLE, "key_ring": Talkative({"a": b"k" * 32})}))


@pytest.mark.parametrize(
    ("settings", "loader", "line"),
    (
        (
            {"store": "memory://"},
            False,
            "store memory; encryption off; names of tenants and principals in clear; quotas off; compression zlib",
        ),
        (
            {**WHOLE, "quota_records": 100, "quota_bytes": 7, "quota_in_flight": 3, "quota_new_keys": (5, 60)},
            True,
            "store rediss; encryption required, newest key 2026-11, 2 in the ring; names of tenants and principals hashed; "
            "quotas records 100, bytes 7, in-flight 3, new-keys 5 in 60 s, by a loader; compression off",
        ),
        (
            {**WHOLE, "store": "redis://:canary@cache", "allow_plaintext_transport": True},
            False,
            "store redis; encryption required, newest key 2026-11, 2 in the ring, plaintext transport allowed; names of "
            "tenants and principals hashed; quotas off; compression off",
        ),
        (
            {
                "secret": "only-tests-9f2c47d1e8b35a60c1d47be2",
                "store": "sqlite:///x",
                "redis_url": "redis://:canary@cache",
                "key_ring": RING,
            },
            False,
            "store sqlite behind redis; encryption off, newest key 2026-11, 2 in the ring; names of tenants and principals in "
            "clear; quotas off; compression zlib",
        ),
        (
            {"enabled": False, "secret": "only-tests-9f2c47d1e8b35a60c1d47be2"},
            False,
            "switched off by IDEMPOTENCY_ENABLED",
        ),
    ),
)
def test_one_line_says_what_is_on(settings: dict[str, Any], loader: bool, line: str) -> None:
    """Without a secret in it, and without a URL."""
    assert line == summary(load(**settings), quota_loader=loader)


def test_a_key_service_that_is_down_does_not_keep_the_application_from_starting() -> None:
    """Nor is what it says quoted."""

    class Down:
        wrap = unwrap = len

        @property
        def newest(self) -> str:
            raise OSError("canary")

        def kids(self) -> list[str]:
            return ["a"]

    line = summary(load(**{**WHOLE, "key_ring": Down()}), quota_loader=False)

    assert "encryption required, the key ring does not respond (OSError)" in line
