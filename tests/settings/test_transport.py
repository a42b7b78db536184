"""What `required` believes of the way to a store: nobody reads what is sent there, or it never leaves the machine."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import make_url

from flask_idempotency.stores.memory import MemoryStore
from tests.settings.test_encryption import WHOLE, faults, load

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
    """Also where its host is written in a way that two readers read differently."""
    (told,) = faults(**{**WHOLE, "store": url})

    assert told.startswith("IDEMPOTENCY_STORE: ")
    assert "set IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True" in told
    assert load(**{**WHOLE, "store": url, "allow_plaintext_transport": True}).allow_plaintext_transport


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
    """As libpq finds its way. A database on this machine is not reached over anything."""
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
    """After what the URL says."""
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
    """`flask-sqlalchemy://` says nothing by itself."""
    settings = {**WHOLE, "store": "flask-sqlalchemy://"}

    if fine:
        assert load(config, **settings).encryption == "required"
    else:
        (told,) = faults(config, **settings)
        assert told.startswith("SQLALCHEMY_")


def test_the_cache_in_front_is_looked_at_too() -> None:
    """It is sent the same answers."""
    settings = {**WHOLE, "store": "sqlite:///shop.db"}

    (told,) = faults(**settings, redis_url="redis://:canary@cache")

    assert told.startswith("IDEMPOTENCY_REDIS_URL: names a Redis on another machine")
    assert load(**settings, redis_url="rediss://cache").encryption == "required"


def test_an_object_cannot_be_looked_into() -> None:
    """Unless it is memory, which nothing is sent to."""

    class Client:
        def evalsha(self) -> None: ...

    (told,) = faults(**{**WHOLE, "store": Client()})

    assert "a Client object does not tell" in told
    assert load(**{**WHOLE, "store": MemoryStore()}).encryption == "required"


@pytest.mark.parametrize("setting", ("store", "redis_url"))
@pytest.mark.parametrize(
    ("url", "fine"),
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
)
def test_a_certificate_that_nobody_looks_at_is_no_tls(setting: str, url: str, fine: bool) -> None:
    """Whoever sits on the way may show one of his own."""
    settings = {**WHOLE, "store": "sqlite:///shop.db", setting: url}

    if fine:
        assert load(**settings).encryption == "required"
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
    """Also those on this machine: they name others, and nobody knows where those are."""
    (told,) = faults(**{**WHOLE, "store": url})

    assert told.startswith("IDEMPOTENCY_STORE: ")
    assert "set IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True" in told
    assert load(**{**WHOLE, "store": url, "allow_plaintext_transport": True}).allow_plaintext_transport
