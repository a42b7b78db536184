"""Encryption at rest and quotas as they are configured: `required` is not believed before everything is there."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from sqlalchemy import make_url

from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.settings import Settings, in_one_line, load_settings
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore

KEY, OLD = (b64encode(letter * 32).decode() for letter in (b"k", b"o"))
RING = {"2026-11": KEY, "2025-11": OLD}
WHOLE: dict[str, Any] = {
    "encryption": "required",
    "store": "rediss://:canary@cache/0",
    "secret": "canary",
    "key_ring": RING,
}
HERE_REDIS = ("redis://127.0.0.1", "redis://localhost:6380/0", "redis://[::1]", "redis://", "redis://127.8.8.8")
SAFE_REDIS = (*HERE_REDIS, "rediss://cache", "unix:///run/redis.sock")


@pytest.fixture(autouse=True)
def no_postgresql_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """libpq reads it, and so does the check."""
    for name in ("PGHOST", "PGHOSTADDR", "PGSSLMODE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)


def load(config: dict[str, Any] | None = None, *, identified: bool = True, **settings: Any) -> Settings:
    named = {f"IDEMPOTENCY_{name.upper()}": value for name, value in settings.items() if value is not None}
    return load_settings({**(config or {}), **named}, {}, app_name="shop", lenient=True, identified=identified)


def faults(config: dict[str, Any] | None = None, *, identified: bool = True, **settings: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        load(config, identified=identified, **settings)
    assert "canary" not in str(caught.value)
    return caught.value.faults


def test_required_starts_when_everything_is_there() -> None:
    """
    And means: sealed, uncompressed, and nobody named in clear.
    """
    settings = load(**WHOLE)

    assert ("required", None, True) == (settings.encryption, settings.compression, settings.hashed_names)
    assert settings.key_ring is not None
    assert "2026-11" == settings.key_ring.newest


@pytest.mark.parametrize(
    ("missing", "begins", "remedy"),
    (
        ({"key_ring": None}, "IDEMPOTENCY_KEY_RING: is not set", "keys generate"),
        ({"secret": None}, "IDEMPOTENCY_SECRET: is not set", "outside the store"),
        ({"secret": None, "store": "memory://"}, "IDEMPOTENCY_SECRET: is not set", "made at random"),
        ({"store": "redis://:canary@cache"}, "IDEMPOTENCY_STORE: names a Redis", "rediss://"),
        ({"store": "redis://cache/0", "secret": ["canary"]}, "IDEMPOTENCY_STORE: names a Redis", "PLAINTEXT_TRANSPORT"),
        (
            {"store": FaultyStore(MemoryStore())},
            "IDEMPOTENCY_ENCRYPTION is required, and the store (FaultyStore)",
            "off",
        ),
    ),
)
def test_each_missing_part_is_one_sentence_with_its_remedy(missing: dict[str, Any], begins: str, remedy: str) -> None:
    """
    What is missing alone is told alone.
    """
    told = faults(
        {"SECRET_KEY": "canary"},
        **{**WHOLE, "allow_plaintext_transport": not isinstance(missing.get("store"), str), **missing},
    )

    assert 1 == len(told), told
    assert told[0].startswith(begins)
    assert remedy in told[0]


def test_a_caller_that_nobody_names_is_a_missing_part() -> None:
    """
    Under one anonymous name, answers would be sealed for everybody.
    """
    (told,) = faults(**WHOLE, identified=False)

    assert "nothing says who a caller is" in told
    assert "principal_loader" in told


def test_all_missing_parts_are_told_together() -> None:
    """
    With whatever else is wrong; nobody fixes a deployment one restart at a time.
    """
    told = faults(
        {"SECRET_KEY": "canary"}, identified=False, encryption="required", store="redis://cache", quota_records=-1
    )

    assert [
        "IDEMPOTENCY_QUOTA_RECORDS:",
        "IDEMPOTENCY_KEY_RING:",
        "IDEMPOTENCY_SECRET:",
        "IDEMPOTENCY_ENCRYPTION",
        "IDEMPOTENCY_STORE:",
    ] == [text.split()[0] for text in told]


@pytest.mark.parametrize("url", SAFE_REDIS)
def test_a_redis_here_or_over_tls_is_fine(url: str) -> None:
    assert load(**{**WHOLE, "store": url}).encryption == "required"


@pytest.mark.parametrize(
    "url",
    (
        "redis://10.0.0.1",
        "redis://cache",
        "redis://localhost.example",
        "redis://127.0.0.1.example",
        "redis://user:localhost@cache",
        "redis:///0?host=cache",
        "redis://0.0.0.0",
        "redis://[::1",
        "redis://localhost:pa#ss@cache",
        "redis://localhost:pa/ss@cache",
        "tests.test_assembly:make",
    ),
)
def test_a_redis_elsewhere_without_tls_is_refused_and_can_be_waived(url: str) -> None:
    """
    Also where its host is written in a way that two readers read differently.
    """
    (told,) = faults(**{**WHOLE, "store": url})

    assert told.startswith("IDEMPOTENCY_STORE: ")
    assert "set IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True" in told
    assert load(**{**WHOLE, "store": url, "allow_plaintext_transport": True}).plaintext_transport


@pytest.mark.parametrize(
    ("url", "fine"),
    (
        ("postgresql://db/shop", False),
        ("postgresql+psycopg://shop:x@db/shop?sslmode=prefer", False),
        ("postgresql+psycopg://shop:x@db/shop?sslmode=disable", False),
        ("postgresql+psycopg://shop:x@db/shop?sslmode=require", True),
        ("postgresql+psycopg://shop:x@db/shop?sslmode=verify-ca", True),
        ("postgresql+psycopg://shop:x@db/shop?sslmode=verify-full", True),
        ("postgresql://127.0.0.1:5433/shop", True),
        ("postgresql://[::1]/shop", True),
        ("postgresql:///shop", True),
        ("postgresql:///shop?host=/run/postgresql", True),
        ("postgresql:///shop?host=db", False),
        ("postgresql://localhost/shop?host=db", False),
        ("postgresql:///shop?host=localhost:5432&host=db:5432", False),
        ("postgresql:///shop?host=localhost:5432&host=127.0.0.1:5433", True),
        ("postgresql:///shop?host=/run/postgresql,db", False),
        ("postgresql://localhost/shop?hostaddr=10.0.0.1", False),
        ("postgresql:///shop?service=remote", False),
        ("postgresql://localhost:pa#ss@db/shop", False),
        ("sqlite:////var/lib/shop.db", True),
        ("memory://", True),
    ),
)
def test_a_postgresql_elsewhere_has_to_be_reached_over_tls(url: str, fine: bool) -> None:
    """
    As libpq finds its way. A database on this machine is not reached over anything.
    """
    settings = {**WHOLE, "store": url}

    if fine:
        assert load(**settings).encryption == "required"
    else:
        (told,) = faults(**settings)
        assert told.startswith("IDEMPOTENCY_STORE: ")


@pytest.mark.parametrize(
    ("variable", "value", "url", "fine"),
    (
        ("PGHOST", "db", "postgresql:///shop", False),
        ("PGHOST", "/run/postgresql", "postgresql:///shop", True),
        ("PGHOST", "db", "postgresql://localhost/shop", True),
        ("PGSSLMODE", "require", "postgresql://db/shop", True),
        ("PGSSLMODE", "require", "postgresql://db/shop?sslmode=prefer", False),
        ("PGHOSTADDR", "10.0.0.1", "postgresql://localhost/shop", False),
        ("PGSERVICE", "remote", "postgresql:///shop", False),
    ),
)
def test_the_environment_counts_as_far_as_libpq_heeds_it(
    variable: str, value: str, url: str, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    After what the URL says.
    """
    monkeypatch.setenv(variable, value)
    settings = {**WHOLE, "store": url}

    assert load(**settings).encryption == "required" if fine else 1 == len(faults(**settings))


@pytest.mark.parametrize(
    ("config", "fine"),
    (
        ({}, False),
        ({"SQLALCHEMY_DATABASE_URI": "sqlite:///shop.db"}, True),
        ({"SQLALCHEMY_DATABASE_URI": "postgresql://:canary@db/shop"}, False),
        ({"SQLALCHEMY_DATABASE_URI": "postgresql://db/shop?sslmode=require"}, True),
        ({"SQLALCHEMY_DATABASE_URI": "mysql://db/shop"}, False),
        (
            {
                "SQLALCHEMY_DATABASE_URI": "postgresql://db/shop",
                "SQLALCHEMY_ENGINE_OPTIONS": {"connect_args": {"sslmode": "verify-full"}},
            },
            True,
        ),
        (
            {
                "SQLALCHEMY_DATABASE_URI": "postgresql://db/shop?sslmode=require",
                "SQLALCHEMY_ENGINE_OPTIONS": {"connect_args": {"sslmode": "disable"}},
            },
            False,
        ),
        (
            {
                "SQLALCHEMY_DATABASE_URI": "postgresql://localhost/shop",
                "SQLALCHEMY_ENGINE_OPTIONS": {"connect_args": {"host": "db"}},
            },
            False,
        ),
        ({"SQLALCHEMY_DATABASE_URI": "sqlite://", "SQLALCHEMY_ENGINE_OPTIONS": {"creator": object}}, False),
        ({"SQLALCHEMY_ENGINE_OPTIONS": {"url": "sqlite://"}}, True),
        ({"SQLALCHEMY_BINDS": {None: "sqlite://"}}, True),
        ({"SQLALCHEMY_BINDS": {None: "postgresql://db/shop"}}, False),
        ({"SQLALCHEMY_BINDS": {None: {"url": "postgresql://localhost/shop", "connect_args": {"host": "db"}}}}, False),
        ({"SQLALCHEMY_BINDS": {"other": "postgresql://db/shop"}, "SQLALCHEMY_DATABASE_URI": "sqlite://"}, True),
        ({"SQLALCHEMY_BINDS": {None: {"creator": object}}, "SQLALCHEMY_DATABASE_URI": "sqlite://"}, False),
        ({"SQLALCHEMY_DATABASE_URI": make_url("postgresql://shop:canary@db/shop")}, False),
        ({"SQLALCHEMY_DATABASE_URI": make_url("postgresql://shop:canary@db/shop?sslmode=require")}, True),
    ),
)
def test_the_applications_own_database_is_looked_at_where_it_is_configured(config: dict[str, Any], fine: bool) -> None:
    """
    `flask-sqlalchemy://` says nothing by itself.
    """
    settings = {**WHOLE, "store": "flask-sqlalchemy://"}

    if fine:
        assert load(config, **settings).encryption == "required"
    else:
        (told,) = faults(config, **settings)
        assert told.startswith("SQLALCHEMY_")


def test_the_cache_in_front_is_looked_at_too() -> None:
    """
    It is sent the same answers.
    """
    settings = {**WHOLE, "store": "sqlite:///shop.db"}

    (told,) = faults(**settings, redis_url="redis://:canary@cache")

    assert told.startswith("IDEMPOTENCY_REDIS_URL: names a Redis on another machine")
    assert load(**settings, redis_url="rediss://cache").encryption == "required"


def test_an_object_cannot_be_looked_into() -> None:
    """
    Unless it is memory, which nothing is sent to.
    """

    class Client:
        def evalsha(self) -> None: ...

    (told,) = faults(**{**WHOLE, "store": Client()})

    assert "nobody can tell from a Client object" in told
    assert load(**{**WHOLE, "store": MemoryStore()}).encryption == "required"


def test_on_asks_for_less() -> None:
    """
    A ring, and a store that can keep data keys. It is the way to `required`, and leaves plain answers readable.
    """
    settings = load({"SECRET_KEY": "k"}, identified=False, encryption="on", store="redis://cache", key_ring=RING)

    assert ("on", None, False) == (settings.encryption, settings.compression, settings.hashed_names)
    (told,) = faults({"SECRET_KEY": "k"}, encryption="on", store="redis://cache")
    assert told.startswith("IDEMPOTENCY_KEY_RING: is not set, and IDEMPOTENCY_ENCRYPTION is on.")


def test_a_ring_that_cannot_be_read_is_told_under_its_name_and_not_called_missing() -> None:
    """
    What somebody has mistyped may be a key.
    """
    (told,) = faults(**{**WHOLE, "key_ring": "canary"})

    assert told.startswith("IDEMPOTENCY_KEY_RING: ")
    assert "is not set" not in told


def test_what_was_chosen_goes_before_what_encryption_would_have() -> None:
    """
    Compression and names have defaults that depend on it, and values of their own.
    """
    settings = load(**WHOLE, compression="zlib", audit_names="clear")

    assert ("zlib", False) == (settings.compression, settings.hashed_names)
    plain = load({"SECRET_KEY": "k"}, store="redis://cache", compression="off", audit_names="hashed")
    assert (None, True, "off") == (plain.compression, plain.hashed_names, plain.encryption)


@pytest.mark.parametrize("name", ("encryption", "compression", "audit_names", "allow_plaintext_transport"))
def test_other_words_are_refused(name: str) -> None:
    settings: dict[str, Any] = {"secret": "s", name: "perhaps"}

    assert any(text.startswith(f"IDEMPOTENCY_{name.upper()}: ") for text in faults(**settings))


def test_the_ring_may_be_a_provider_of_ones_own_and_is_never_shown() -> None:
    """
    A debug page prints settings.
    """
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
    ("settings", "quota"),
    (
        ({}, None),
        ({"quota_records": None}, None),
        ({"quota_records": 5}, Quota(records=5)),
        ({"quota_bytes": 0, "quota_in_flight": 2}, Quota(bytes=0, in_flight=2)),
        ({"quota_new_keys": (10, 60)}, Quota(new_keys=NewKeys(10, 60.0))),
        ({"quota_new_keys": [10, 0.5]}, Quota(new_keys=NewKeys(10, 0.5))),
        ({"quota_new_keys": NewKeys(10, 60)}, Quota(new_keys=NewKeys(10, 60.0))),
    ),
)
def test_quotas_are_whole_numbers_and_a_rate(settings: dict[str, Any], quota: Quota | None) -> None:
    """
    Nothing set is None, so that nothing is counted.
    """
    assert quota == load(secret="s", **settings).quota


@pytest.mark.parametrize("name", ("quota_records", "quota_bytes", "quota_in_flight"))
@pytest.mark.parametrize("value", (-1, 1.5, "5", True))
def test_what_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    (told,) = faults(secret="s", **{name: value})

    assert told.startswith(f"IDEMPOTENCY_{name.upper()}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("quota_records", 10**19),
        ("quota_bytes", 2**53 + 1),
        ("quota_in_flight", 2**63),
        ("quota_new_keys", (10**19, 3600)),
    ),
)
def test_what_no_store_can_count_to_is_refused(name: str, value: Any) -> None:
    """
    Else a database says so at the first claim, and all of them are 500. The remedy is no limit at all.
    """
    (told,) = faults(secret="s", **{name: value})

    assert told.startswith(f"IDEMPOTENCY_{name.upper()}: ")
    assert "2**53" in told
    assert "for no limit, leave it out" in told


def test_what_every_store_can_count_to_is_not() -> None:
    most = 2**53

    quota = load(secret="s", quota_records=most, quota_bytes=most, quota_in_flight=most, quota_new_keys=(most, 1)).quota

    assert Quota(most, most, most, NewKeys(most, 1.0)) == quota


@pytest.mark.parametrize(
    "value",
    (5, "10 60", (10,), (10, 0), (10, -1), (10, float("inf")), (1.5, 60), (True, 60), (-1, 60), (1, "60"), (1, 1e9)),
)
def test_what_is_no_rate_is_refused(value: Any) -> None:
    (told,) = faults(secret="s", quota_new_keys=value)

    assert told.startswith("IDEMPOTENCY_QUOTA_NEW_KEYS: ")


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
            {"secret": "s", "store": "sqlite:///x", "redis_url": "redis://:canary@cache", "key_ring": RING},
            False,
            "store sqlite behind redis; encryption off, newest key 2026-11, 2 in the ring; names of tenants and principals in "
            "clear; quotas off; compression zlib",
        ),
        ({"enabled": False, "secret": "s"}, False, "switched off by IDEMPOTENCY_ENABLED"),
    ),
)
def test_one_line_says_what_is_on(settings: dict[str, Any], loader: bool, line: str) -> None:
    """
    Without a secret in it, and without a URL.
    """
    assert line == in_one_line(load(**settings), quota_loader=loader)


def test_a_key_service_that_is_down_does_not_keep_the_application_from_starting() -> None:
    """
    Nor is what it says quoted.
    """

    class Down:
        wrap = unwrap = len

        @property
        def newest(self) -> str:
            raise OSError("canary")

        def kids(self) -> list[str]:
            return ["a"]

    line = in_one_line(load(**{**WHOLE, "key_ring": Down()}), quota_loader=False)

    assert "encryption required, the key ring does not answer (OSError)" in line
