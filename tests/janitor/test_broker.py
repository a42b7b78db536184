"""Which broker the ready-made Celery application has."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.settings import Settings, load_settings
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.web.janitor import LONGEST_BUDGET_SECONDS
from janitor.broker import Broker, broker_of
from tests.lab.tls import TlsFront


def settings_with(store: Any, broker_url: str | None = None) -> Settings:
    config = {
        "IDEMPOTENCY_SECRET": "s-9f2c47d1e8b35a60",
        "IDEMPOTENCY_STORE": store,
        "IDEMPOTENCY_BROKER_URL": broker_url,
    }
    return load_settings(config, {}, app_name="shop", lenient=True)


def test_a_redis_that_keeps_records_carries_tasks_as_well() -> None:
    """Spelled as Celery wants it, and with TLS that looks at certificates, which is not what Celery does by itself."""
    urls = {
        "redis://localhost:6379/3": "redis://localhost:6379/3",
        "redis://:p%40ss@host:6379?db=3&socket_timeout=2": "redis://:p%40ss@host:6379/3",
        "rediss://host:6379/0": "rediss://host:6379/0?ssl_cert_reqs=required",
        "rediss://host/0?ssl_cert_reqs=none&protocol=2": "rediss://host/0?ssl_cert_reqs=none",
        "unix:///run/redis.sock?db=2": "redis+socket:///run/redis.sock?virtual_host=2",
        "unix://:secret@/run/redis.sock": "redis+socket://:secret@/run/redis.sock",
    }
    assert urls == {store: broker_of(settings_with(store)).url for store in urls}


def test_a_named_broker_goes_first_and_is_read_as_a_store_would_be() -> None:
    urls = {
        "rediss://host/0": "rediss://host/0?ssl_cert_reqs=required",
        "unix:///run/redis.sock?db=2": "redis+socket:///run/redis.sock?virtual_host=2",
        "redis://host/0?health_check_interval=5": "redis://host/0?health_check_interval=5",
        "sentinel://host:26379": "sentinel://host:26379",
        "amqp://guest@host//": "amqp://guest@host//",
    }
    for store in ("sqlite:///shop.sqlite3", "redis://other/0"):
        assert urls == {url: broker_of(settings_with(store, url)).url for url in urls}


@pytest.mark.parametrize("store", ("sqlite:///shop.sqlite3", "memory://", "flask-sqlalchemy://", MemoryStore()))
def test_without_a_broker_the_remedies_are_named(store: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        broker_of(settings_with(store))

    remedies = ("IDEMPOTENCY_BROKER_URL", "redis://", "amqp://", "filesystem:///", "register", "flask idempotency reap")
    assert [] == [remedy for remedy in remedies if remedy not in str(refused.value)]


@pytest.mark.parametrize(
    ("url", "why"),
    (
        ("redis+cluster://:canary@a:6379,b", "no queue in a Cluster"),
        ("rediss+sentinel://:canary@a,b/payments", "sentinel://host:26379;sentinel://host:26379"),
    ),
)
def test_what_a_store_can_be_in_and_no_queue_is_refused(url: str, why: str) -> None:
    for settings in (settings_with(url), settings_with("memory://", url)):
        with pytest.raises(ConfigurationError, match=why) as refused:
            broker_of(settings)
        assert "canary" not in str(refused.value)


@pytest.mark.parametrize("url", ("filesystem://", "filesystem:///"))
def test_a_folder_has_to_be_named(url: str) -> None:
    """Celery would use the one that it is started in."""
    with pytest.raises(ConfigurationError, match="needs a folder"):
        broker_of(settings_with("memory://", url))


def test_a_folder_is_made_and_closed_to_others(tmp_path: Path) -> None:
    broker = broker_of(settings_with("memory://", f"filesystem://{tmp_path}/of%20ours"))

    assert "idempotency-folder://" == broker.url
    assert {"messages", "control", "processed"} == {path.name for path in (tmp_path / "of ours").iterdir()}
    assert {0o700} == {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "of ours").iterdir()}
    assert {str(tmp_path / "of ours" / "messages")} == {
        broker.options[f"data_folder_{direction}"] for direction in ("in", "out")
    }


def test_memory_reaches_nobody() -> None:
    with pytest.raises(ConfigurationError, match="beat is another process"):
        broker_of(settings_with("memory://", "memory://"))


def test_redis_gives_no_task_away_while_it_may_be_at_work() -> None:
    """The longest task takes an hour, which is when Celery's default would begin it a second time."""
    seconds = broker_of(settings_with("redis://host/0")).options["visibility_timeout"]

    assert seconds > LONGEST_BUDGET_SECONDS + 600


def test_a_broker_does_not_show_its_password() -> None:
    assert "secret" not in repr(Broker("redis://:secret@host/0"))


def test_the_broker_of_a_store_behind_tls_is_reached_and_checked(redis_tls: TlsFront) -> None:
    trusted, unknown = redis_tls.url, redis_tls.url.partition("?")[0]
    with Connection(broker_of(settings_with(trusted)).url) as connection:
        assert connection.ensure_connection(max_retries=1) is not None
    with Connection(broker_of(settings_with(unknown)).url) as connection, pytest.raises(OperationalError, match="CERT"):
        connection.ensure_connection(max_retries=1)
