"""Which store an application gets for what it wrote."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import fakeredis
import pytest
from flask import Flask

from example_app.demo.servers import RedisServer
from flask_idempotency import ConfigurationError, Idempotency
from flask_idempotency.assembly import build_store
from flask_idempotency.extension import EXTENSION
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.store import RedisStore
from tests.lab.redis import StartRedis


def make() -> MemoryStore:
    """What `tests.test_assembly:make` names."""
    return MemoryStore()


@pytest.mark.parametrize("choice", ["memory://", "tests.test_assembly:make", MemoryStore()])
def test_memory_by_url_by_factory_and_as_an_object(choice: Any) -> None:
    """Three ways to say the same."""
    assert isinstance(build_store(choice), MemoryStore)


def test_a_redis_by_url_and_by_client(redis_server: RedisServer) -> None:
    """The user's own client is used as it is."""
    assert isinstance(build_store(redis_server.url), RedisStore)
    assert isinstance(build_store(redis_server.unix_url), RedisStore)
    assert isinstance(build_store(fakeredis.FakeRedis()), RedisStore)


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("oracle://127.0.0.1/shop", "no store for oracle://127.0.0.1/shop in this release"),
        ("redis+proxy://127.0.0.1", r"no store for redis\+proxy://127.0.0.1 in this release"),
        ("rubbish", r"no store for \*\*\*"),
        ("tests.test_assembly:absent", "cannot be imported"),
        ("no_such_module:make", "cannot be imported"),
        ("no_such.:make", "cannot be imported"),
        ("2fa:make", "cannot be imported"),
        ("tests.test_assembly:EXTENSION", "is not a function"),
        (object(), "neither a Redis client nor a Store; it has no claim, renew"),
        (5, "int is neither"),
    ],
)
def test_what_is_no_store_is_refused_with_a_remedy(choice: Any, sentence: str) -> None:
    """Each by a sentence that begins with the setting."""
    with pytest.raises(ConfigurationError, match=f"IDEMPOTENCY_STORE.*{sentence}"):
        build_store(choice)


def test_a_mistyped_url_does_not_show_its_password() -> None:
    """Whatever cannot be understood may contain one."""
    for choice in ("redis//:canary@127.0.0.1", "redis:/:canary@127.0.0.1", "oracle://:canary@127.0.0.1/shop"):
        with pytest.raises(ConfigurationError) as caught:
            build_store(choice)
        assert "canary" not in str(caught.value)


@pytest.mark.parametrize("store", ("memory://", "sqlite:///shop.sqlite3", "flask-sqlalchemy://", MemoryStore()))
def test_replicas_are_waited_for_in_redis_alone(store: Any) -> None:
    """Elsewhere the setting would be a promise that nobody keeps."""
    with pytest.raises(ConfigurationError, match=r"IDEMPOTENCY_REPLICAS.*Remove this"):
        Idempotency(Flask("shop"), store=store, secret="s-9f2c47d1e8b35a60", replicas=1)


def test_replicas_are_the_stores_to_wait_for() -> None:
    """What is configured is what is sent."""
    store = build_store("redis://127.0.0.1:1", replicas=2)
    assert isinstance(store, RedisStore)

    assert 2 == store.replicas


def test_compression_that_this_host_lacks_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later it would be an error of every first request, after its view."""
    monkeypatch.setattr("flask_idempotency.assembly.zstd_is_installed", lambda: False)

    with pytest.raises(ConfigurationError, match=r"IDEMPOTENCY_COMPRESSION.*pip install 'flask-idempotency\[zstd\]'"):
        Idempotency(Flask("shop"), store="memory://", secret="s-9f2c47d1e8b35a60", compression="zstd")


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    (
        ("redis", "redis", "assembly.build_store('redis://127.0.0.1')"),
        ("sqlalchemy", "sql", "assembly.build_store('sqlite://')"),
        ("sqlalchemy", "sql", "flask_idempotency.Idempotency().outbox()"),
    ),
)
def test_a_missing_package_is_one_sentence(package: str, extra: str, call: str) -> None:
    """The extra to install, and not a traceback out of our own files."""
    # In a process of its own: modules that are unloaded here would be missing in other tests.
    without = f"import sys; sys.modules[{package!r}] = None; import flask_idempotency; from flask_idempotency import assembly\n"

    done = subprocess.run([sys.executable, "-c", without + call], capture_output=True, text=True, check=False)

    assert "ConfigurationError" in done.stderr
    assert f"pip install 'flask-idempotency[{extra}]'" in done.stderr


def test_an_evicting_redis_is_refused_at_start(start_redis: StartRedis, redis_kind: str) -> None:
    """It would forget payments silently: SPEC section 7."""
    server = start_redis(redis_kind, "--maxmemory-policy", "allkeys-lru")

    with pytest.raises(ConfigurationError, match="noeviction"):
        Idempotency(Flask("shop"), store=server.url, secret="s-9f2c47d1e8b35a60")


def test_one_object_serves_two_applications() -> None:
    """P-75: each keeps its own settings, and neither sees the other's records."""
    idempotency = Idempotency()
    first, second = Flask("first"), Flask("second")
    first.config["IDEMPOTENCY_KEEP"] = 60
    for app in (first, second):
        idempotency.init_app(app)

    assert (60.0, 24 * 3600.0) == (
        first.extensions[EXTENSION].settings.policy.keep,
        second.extensions[EXTENSION].settings.policy.keep,
    )
    assert first.extensions[EXTENSION].engine is not second.extensions[EXTENSION].engine


def test_setting_up_twice_is_an_error() -> None:
    """The second configuration would otherwise be ignored, or the hooks run twice."""
    app = Flask("shop")
    idempotency = Idempotency(app)

    with pytest.raises(ConfigurationError, match="once per app"):
        idempotency.init_app(app)


def test_switched_off_leaves_the_application_alone() -> None:
    """`IDEMPOTENCY_ENABLED=False`: not one hook, and no store either."""
    app = Flask("shop")
    app.config.update(
        IDEMPOTENCY_ENABLED=False,
        IDEMPOTENCY_STORE="redis://203.0.113.1",
        IDEMPOTENCY_SECRET="s-9f2c47d1e8b35a60",
    )
    Idempotency(app)

    assert not app.before_request_funcs
    assert not app.after_request_funcs
    assert "idempotency_field" in app.jinja_env.globals


def test_warnings_are_logged_where_somebody_starts_the_application(caplog: pytest.LogCaptureFixture) -> None:
    """The memory store outside debug and testing is one."""
    Idempotency(Flask("shop"))

    assert "forgotten at every restart" in caplog.text
