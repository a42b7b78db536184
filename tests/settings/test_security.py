"""Encryption at rest as it is configured: `required` is not believed before everything is there."""

from __future__ import annotations

import secrets
import sys
from base64 import b64encode
from itertools import product
from typing import Any

import pytest
from sqlalchemy import make_url

from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.settings import Settings, derived_secret, load_settings, summary
from flask_idempotency.settings.encryption import NO_RING
from flask_idempotency.settings.security import _PUBLISHED, MIN_SECRET_BYTES
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FaultyStore
from tests.long import unless_long

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
    told = faults(
        {"SECRET_KEY": "canary"},
        **{**WHOLE, "allow_plaintext_transport": not isinstance(missing.get("store"), str), **missing},
    )

    assert 1 == len(told), told
    assert told[0].startswith(begins)
    assert remedy in told[0]


def test_an_application_that_cannot_name_callers_is_refused() -> None:
    """Under one anonymous name, all callers would share responses."""
    (told,) = faults(**WHOLE, has_principal=False)

    assert "the application cannot name its callers" in told
    assert "principal_loader" in told


def test_all_missing_parts_are_reported_together() -> None:
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


def test_a_ring_that_cannot_be_read_is_not_reported_as_missing() -> None:
    """A mistyped value may be a key."""
    (told,) = faults(**{**WHOLE, "key_ring": "canary"})

    assert told.startswith("IDEMPOTENCY_KEY_RING: ")
    assert "is not set" not in told


@pytest.mark.parametrize("source", ("{key}:prod", "{key}.{key}:prod", "{key}:{key}"))
def test_a_key_that_is_swapped_with_its_id_is_not_shown(source: str) -> None:
    """Without its padding it could be the name of a module. Nor does Python quote it."""
    key = b64encode(bytes(range(32))).decode().rstrip("=").replace("+", "x").replace("/", "y")

    with pytest.raises(ConfigurationError) as caught:
        load(**{**WHOLE, "key_ring": source.format(key=key)})

    chain = (caught.value, caught.value.__cause__, caught.value.__context__)
    assert not any(key[:8] in repr(error) for error in chain)
    (told,) = caught.value.faults
    assert "its id comes first" in told


def test_what_was_chosen_goes_before_what_encryption_would_have() -> None:
    settings = load(**WHOLE, compression="zlib", hash_identities=False)

    assert ("zlib", False) == (settings.compression, settings.hash_identities)
    plain = load({"SECRET_KEY": "k"}, store="redis://cache", compression="off", hash_identities=True)
    assert (None, True, "off") == (plain.compression, plain.hash_identities, plain.encryption)


@pytest.mark.parametrize("name", ("encryption", "compression", "hash_identities", "allow_plaintext_transport"))
def test_other_words_are_refused(name: str) -> None:
    settings: dict[str, Any] = {"secret": "only-tests-9f2c47d1e8b35a60c1d47be2", name: "perhaps"}

    assert any(text.startswith(f"IDEMPOTENCY_{name.upper()}: ") for text in faults(**settings))


def test_a_ring_without_the_cryptography_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    monkeypatch.delitem(sys.modules, "flask_idempotency.codec.key_sources", raising=False)
    monkeypatch.delattr("flask_idempotency.codec.key_sources", raising=False)

    assert [told for told in faults(**WHOLE) if "the cryptography package is not installed" in told]


def test_what_the_function_of_a_ring_does_not_find_is_not_the_cryptography_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def factory() -> None:
        raise ModuleNotFoundError("no recipes", name="cryptography.recipes")

    monkeypatch.setattr(sys.modules[__name__], "factory", factory, raising=False)

    with pytest.raises(ModuleNotFoundError, match="no recipes"):
        load(**{**WHOLE, "key_ring": f"{__name__}:factory"})


def test_the_ring_may_be_a_provider_of_ones_own_and_is_never_shown() -> None:
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
    assert line == summary(load(**settings), quota_loader=loader)


def test_a_key_service_that_is_down_does_not_keep_the_application_from_starting() -> None:
    class Down:
        wrap = unwrap = len

        @property
        def newest(self) -> str:
            raise OSError("canary")

        def kids(self) -> list[str]:
            return ["a"]

    line = summary(load(**{**WHOLE, "key_ring": Down()}), quota_loader=False)

    assert "encryption required, the key ring does not respond (OSError)" in line


HERE_REDIS = ("redis://127.0.0.1", "redis://localhost:6380/0", "redis://[::1]", "redis://", "redis://127.8.8.8")
SAFE_REDIS = (*HERE_REDIS, "rediss://cache", "unix:///run/redis.sock")


@pytest.fixture(autouse=True)
def no_postgresql_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """libpq reads it, and so does the check."""
    for name in ("PGHOST", "PGHOSTADDR", "PGSSLMODE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)


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
    (told,) = faults(**{**WHOLE, "store": url})

    assert told.startswith("IDEMPOTENCY_STORE: ")
    assert "set IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True" in told
    assert load(**{**WHOLE, "store": url, "allow_plaintext_transport": True}).allow_plaintext_transport


@pytest.mark.parametrize(
    ("url", "fine"),
    (
        ("mysql+pymysql://db/shop", False),
        ("mysql+pymysql://shop:x@db/shop?ssl_ca=/etc/ca.pem", True),
        ("mariadb+pymysql://shop:x@db/shop?ssl_ca=/etc/ca.pem", True),
        ("mysql+mysqldb://db/shop?ssl_ca=/etc/ca.pem", False),
        ("mysql+pymysql://127.0.0.1:3307/shop", True),
        ("mysql+pymysql://shop:x@/shop?unix_socket=/run/mysqld/mysqld.sock", True),
        ("mysql+pymysql://localhost/shop?host=db", False),
    ),
)
def test_a_mariadb_elsewhere_has_to_be_reached_over_tls(url: str, fine: bool) -> None:
    """By a driver that refuses a server without TLS if it gets an authority."""
    settings = {**WHOLE, "store": url}

    if fine:
        assert load(**settings).encryption == "required"
    else:
        (told,) = faults(**settings)
        assert "Use mysql+pymysql:// with ssl_ca=" in told


def test_a_postgresql_elsewhere_has_to_be_reached_over_tls() -> None:
    """As libpq finds its way. A database on this machine is not reached over anything."""
    for url, fine in (
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
    ):
        settings = {**WHOLE, "store": url}

        if fine:
            assert load(**settings).encryption == "required", (url, fine)
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
        ({"SQLALCHEMY_DATABASE_URI": "mysql+pymysql://db/shop?ssl_ca=/etc/ca.pem"}, True),
        ({"SQLALCHEMY_DATABASE_URI": "oracle://db/shop"}, False),
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
    settings = {**WHOLE, "store": "flask-sqlalchemy://"}

    if fine:
        assert load(config, **settings).encryption == "required"
    else:
        (told,) = faults(config, **settings)
        assert told.startswith("SQLALCHEMY_")


def test_the_cache_in_front_is_looked_at_too() -> None:
    settings = {**WHOLE, "store": "sqlite:///shop.db"}

    (told,) = faults(**settings, redis_url="redis://:canary@cache")

    assert told.startswith("IDEMPOTENCY_REDIS_URL: names a Redis on another machine")
    assert load(**settings, redis_url="rediss://cache").encryption == "required"


def test_an_object_cannot_be_looked_into() -> None:
    class Client:
        def evalsha(self) -> None: ...

    (told,) = faults(**{**WHOLE, "store": Client()})

    assert "a Client object does not tell" in told
    assert load(**{**WHOLE, "store": MemoryStore()}).encryption == "required"


def test_a_certificate_that_is_not_verified_is_no_tls() -> None:
    """An attacker on the way may show another certificate."""
    for (url, fine), setting in product(
        (
            ("rediss://cache?ssl_cert_reqs=none", False),
            ("rediss://:canary@cache/0?db=1&ssl_cert_reqs=none", False),
            ("rediss://cache?ssl_cert_reqs=required&ssl_cert_reqs=none", False),
            ("rediss://cache?ssl_cert_reqs=none&ssl_cert_reqs=required", False),
            ("rediss://cache?ssl_cert_reqs=%6eone", False),
            ("rediss:///0?host=cache&ssl_cert_reqs=none", False),
            ("rediss://cache?ssl_cert_reqs=required", True),
            ("rediss://cache?ssl_cert_reqs=optional", True),
            ("rediss://127.0.0.1?ssl_cert_reqs=none", True),
        ),
        ("store", "redis_url"),
    ):
        settings = {**WHOLE, "store": "sqlite:///shop.db", setting: url}

        if fine:
            assert load(**settings).encryption == "required", (url, fine, setting)
        else:
            (told,) = faults(**settings)
            assert told.startswith(f"IDEMPOTENCY_{setting.upper()}: ")
            assert "ssl_cert_reqs" in told


@pytest.mark.parametrize(
    ("url", "fine"),
    (
        ("sqlite+libsql://db.example.com:8080/?secure=false", False),
        ("sqlite+libsql://db.example.com/?secure=true", False),
        ("sqlite+libsql:///replica.db?sync_url=http://db.example.com", False),
        ("sqlite+rqlite://10.0.0.1:4001/", False),
        ("sqlite://db.example.com/shop.db", False),
        ("sqlite+pysqlite://db.example.com/shop.db", False),
        ("sqlite+pysqlite:////var/lib/shop.db", True),
        ("sqlite+aiosqlite:///shop.db", True),
        ("sqlite:///file:shop?mode=memory&uri=true", True),
        ("sqlite://", True),
    ),
)
def test_a_sqlite_that_is_somewhere_else_is_not_believed(url: str, fine: bool) -> None:
    """Some drivers under that name go over a network, and not all of their words for TLS are known here."""
    of_application = {"SQLALCHEMY_DATABASE_URI": url}

    if fine:
        assert load(**{**WHOLE, "store": url}).encryption == "required"
        assert load(of_application, **{**WHOLE, "store": "flask-sqlalchemy://"}).encryption == "required"
    else:
        told = (
            *faults(**{**WHOLE, "store": url}),
            *faults(of_application, **{**WHOLE, "store": "flask-sqlalchemy://"}),
        )
        assert ["IDEMPOTENCY_STORE:", "SQLALCHEMY_DATABASE_URI:"] == [text.split()[0] for text in told]


@pytest.mark.parametrize(
    "url",
    (
        "rediss+cluster://a,b:6380",
        "rediss+sentinel://a,b:26380/payments/0?sentinel_password=x",
        "rediss+cluster://user:p%40@a/?ssl_ca_certs=/etc/ca.pem&ssl_cert_reqs=required",
    ),
)
def test_several_over_tls_are_fine(url: str) -> None:
    assert load(**{**WHOLE, "store": url}).encryption == "required"


@pytest.mark.parametrize(
    "url",
    (
        "redis+cluster://127.0.0.1",
        "redis+sentinel://localhost,127.0.0.1/payments",
        "redis+sentinel://sentinel/payments",
        "rediss+cluster://a?ssl_cert_reqs=none",
        "rediss+sentinel://a/payments?ssl_check_hostname=false",
        "rediss+cluster://user:pa/ss@a",
        "rediss+sentinel://user:pa#ss@a/payments",
    ),
)
def test_several_that_may_lead_elsewhere_without_tls_are_refused(url: str) -> None:
    """Also those on this machine, because they name further hosts."""
    (told,) = faults(**{**WHOLE, "store": url})

    assert told.startswith("IDEMPOTENCY_STORE: ")
    assert "set IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True" in told
    assert load(**{**WHOLE, "store": url, "allow_plaintext_transport": True}).allow_plaintext_transport


STRONG = "kUq3vN8xZt5bWm1cYr7d"
STRONGER = "kUq3vN8xZt5bWm1cYr7d-hLs2eJg9pAo4fQi6"

WEAK: list[Any] = [
    # Too short.
    "a",
    "changeme",
    "fifteen-bytes-x",
    # A repetition, or bytes that count.
    "changeme-changeme-",
    "dev" * 6,
    "x" * 16,
    "ab" * 20,
    "0123456789abcdef",
    "12345678901234567890",
    "abcdefghijklmnopqrstuvwxyz",
    bytes(32),
    bytes(range(32)),
    # Published.
    "your-secret-key-here",
    "a-string-secret-at-least-256-bits-long",
    b'_5#y2L"F4Q8z\n\xec]/',
    "192b9bdd22ab9ed4d12e236c78afcb9a393ec15f71bbf5dc987d54727823bcbf",
    "09d25e094faa6ca2556c818166b7a9563b93f7099f6f0f4caa6cf63b88e8d3e7",
]


def load_secret(secret: Any = None, *, lenient: bool = False, secret_key: Any = None, **named: Any) -> Settings:
    config = {f"IDEMPOTENCY_{name.upper()}": value for name, value in named.items()}
    if secret is not None:
        config["IDEMPOTENCY_SECRET"] = secret
    return load_settings(
        {"IDEMPOTENCY_STORE": "redis://127.0.0.1", "SECRET_KEY": secret_key, **config},
        {},
        app_name="shop",
        lenient=lenient,
    )


def secret_faults(*arguments: Any, **named: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_secret(*arguments, **named)
    return str(caught.value)


def test_a_weak_secret_is_refused_outside_debug_and_testing() -> None:
    """Who reads the store could try candidates. The text tells the length and the command, and not the value."""
    for weak in WEAK:
        told = secret_faults(weak)

        assert f"it has {len(weak if isinstance(weak, bytes) else weak.encode())} bytes" in told, weak
        assert "secrets.token_urlsafe(32)" in told, weak
        assert repr(weak) not in told, weak
        assert "a" == weak or str(weak) not in told, weak
        load_secret(weak, lenient=True)


def test_a_secret_that_is_derived_is_as_strong_as_its_secret_key() -> None:
    for weak in WEAK:
        assert "SECRET_KEY" in secret_faults(secret_key=weak), weak
        assert "SECRET_KEY" in secret_faults(derived_secret(weak)), weak
        load_secret(secret_key=weak, lenient=True)
        load_secret(secret_key=STRONG)


def test_every_published_example_is_refused_for_what_it_is() -> None:
    """One that is too short is refused in any case, so it would only make the list longer."""
    assert {len(example) >= MIN_SECRET_BYTES for example in _PUBLISHED} == {True}
    assert [example for example in _PUBLISHED if "has published" not in secret_faults(example)] == []


def test_a_sentence_of_ones_own_is_no_placeholder() -> None:
    """Words are not judged: a list of them would refuse passphrases, and never end."""
    load_secret("my secret token: keep this database key outside, please")


def test_random_secrets_are_accepted() -> None:
    for _ in range(unless_long(40, long=1_000)):
        for strong in (
            secrets.token_bytes(16),
            secrets.token_hex(8),
            secrets.token_urlsafe(16),
            str(secrets.randbits(128) | 1 << 127),
        ):
            load_secret(strong)


def test_a_random_secret_of_memory_needs_nothing() -> None:
    load_secret(store="memory://", secret_key="dev")


@pytest.mark.parametrize("lenient", (False, True))
def test_under_required_a_secret_has_32_bytes_in_debug_and_testing_too(lenient: bool) -> None:
    """It keys an HMAC-SHA256. Other secret_faults may stand beside it."""
    ring = NO_RING.partition("{")[0]
    for weak in ("a", STRONG, "x" * 40, [STRONGER, STRONG]):
        told = secret_faults(weak, lenient=lenient, encryption="required")
        assert "IDEMPOTENCY_SECRET" in told
        assert "must have at least 32" in told or "repeats itself" in told

    told = secret_faults(STRONGER, lenient=lenient, encryption="required")
    assert ring in told
    assert "IDEMPOTENCY_SECRET" not in told


def test_a_weak_secret_may_be_rotated_out() -> None:
    """Removing it immediately would make every key new, and retries would run again. Each start warns."""
    settings = load_secret([STRONG, "changeme"])

    assert (STRONG.encode(), b"changeme") == settings.secrets
    (warning,) = settings.warnings
    assert "number 2 of 2: it has 8 bytes" in warning
    assert "changeme" not in warning
    assert "number 1 of 2: it has 8 bytes" in secret_faults(["changeme", STRONG])


def test_an_application_that_is_switched_off_needs_no_secret_of_any_strength() -> None:
    assert not load_secret("a", enabled=False).enabled
