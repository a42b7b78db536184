"""Settings → Engine. The only module that names concrete stores and codecs."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.claim import Surroundings
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import Observers
from flask_idempotency.engine.key import Identity
from flask_idempotency.engine.lease import LeaseRenewer
from flask_idempotency.engine.ports import Store
from flask_idempotency.engine.waiting import WaitingRoom
from flask_idempotency.settings import Settings
from flask_idempotency.stores.memory import MemoryStore

_FACTORY = re.compile(r"[\w.]+:\w+")
_PORT = ("claim", "renew", "mark", "complete", "release", "hold", "read")
_REDIS_SCHEMES = frozenset({"redis", "rediss", "unix"})


def build_engine(settings: Settings, *, observers: Observers) -> Engine:
    """The engine that these settings describe. Raises `ConfigurationError` for a store that cannot be made."""
    around = Surroundings(
        store=build_store(settings.store),
        codec=EnvelopeCodec(),
        renewer=LeaseRenewer(),
        waiting_room=WaitingRoom(settings.max_waiters),
        observers=observers,
    )
    return Engine(around)


def identities(settings: Settings) -> tuple[Identity, ...]:
    """One for each secret in use, the newest first."""
    return tuple(Identity(secret) for secret in settings.secrets)


def build_store(choice: Any) -> Store:
    """A store from a URL, a `"package.module:factory"`, a Redis client, or a `Store` as it is."""
    if not isinstance(choice, str):
        return _from_object(choice)
    scheme = urlsplit(choice).scheme
    if scheme == "memory":
        return MemoryStore()
    if scheme in _REDIS_SCHEMES:
        return _redis_store(choice)
    if _FACTORY.fullmatch(choice):
        return _from_object(_factory(choice)())
    raise ConfigurationError(
        f"IDEMPOTENCY_STORE: there is no store for {scheme or 'this'} URLs in this release. "
        'Use memory://, redis://, rediss:// or unix://, a Store object, a Redis client, or "package.module:factory".'
    )


def _from_object(choice: Any) -> Store:
    if all(callable(getattr(choice, name, None)) for name in _PORT):
        return choice  # type: ignore[no-any-return]
    if callable(getattr(choice, "evalsha", None)):
        return _redis_store(choice)
    missing = [name for name in _PORT if not callable(getattr(choice, name, None))]
    raise ConfigurationError(
        f"IDEMPOTENCY_STORE: {type(choice).__name__} is neither a Redis client nor a Store; it has no {', '.join(missing)}. "
        "See flask_idempotency.engine.ports.Store, and StoreContract in flask_idempotency.testing."
    )


def _redis_store(choice: Any) -> Store:
    try:
        from flask_idempotency.stores.redis.store import RedisStore
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise ConfigurationError(
            "IDEMPOTENCY_STORE names a Redis, and the redis package is not installed: pip install 'flask-idempotency[redis]'."
        ) from error
    store = RedisStore(choice)
    store.check()
    return store


def _factory(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    try:
        factory = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"IDEMPOTENCY_STORE: {path!r} cannot be imported: {error}.") from error
    if not callable(factory):
        raise ConfigurationError(f"IDEMPOTENCY_STORE: {path!r} is not a function that returns a Store.")
    return factory  # type: ignore[no-any-return]
