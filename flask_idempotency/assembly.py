"""Build the engine from the settings. Only this module names concrete stores and codecs, and checks what a store can do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlsplit

from flask_idempotency.codec.compression import COMPRESSIONS, ZSTD_REMEDY, zstd_is_installed
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine.claim import Dependencies
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import ConfigurationError, StoreUnavailable, importing
from flask_idempotency.engine.keys import Identity, owner_mark
from flask_idempotency.engine.lease import LeaseRenewer
from flask_idempotency.engine.observers import Observers
from flask_idempotency.engine.offered import CAPABILITIES, Capabilities, KnowsCache, capabilities_of
from flask_idempotency.engine.tasks import OwnTaskLog
from flask_idempotency.engine.values import valueclass
from flask_idempotency.engine.waiting import Waiters
from flask_idempotency.settings import Settings

_log = logging.getLogger("flask_idempotency")
if TYPE_CHECKING:
    from flask_idempotency.engine.capabilities import DataKeys
    from flask_idempotency.engine.journal import StepTransactions
    from flask_idempotency.engine.outbox import OutboxNames
    from flask_idempotency.engine.store import Codec, Schema, Store, Transactions
    from flask_idempotency.engine.tasks import TaskLog
    from flask_idempotency.stores.sql.outbox import OutboxTable  # needs a package that is optional
    from flask_idempotency.stores.timed import Timing

_FACTORY = re.compile(r"[\w.]+:\w+")
_PORT = ("claim", "renew", "mark_point_of_no_return", "complete", "release", "quarantine", "read", "mark_corrupt")
_REDIS_SCHEMES = frozenset(
    {"redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel"}
)
_SQL_SCHEMES = frozenset({"sqlite", "postgresql", "postgres", "mysql", "mariadb"})


class ApplicationDatabase(Protocol):
    """The application's own database in Flask-SQLAlchemy. The store uses it at the first request, not at set-up."""

    def engine(self) -> Any: ...

    def engines(self) -> list[Any]: ...

    def binds(self) -> Any: ...

    def session(self) -> Any: ...

    def testing(self) -> bool: ...


@valueclass(frozen=True, slots=True, kw_only=True)
class Services(Capabilities):
    """An engine with its codec, and what its store offers. `task_log` has the tasks of all applications that share it."""

    engine: Engine
    codec: Codec
    tasks: TaskLog | None
    """The tasks of this application alone."""
    cache_marker: KnowsCache | None
    """The store, if a cache may stand in front of it. These settings need not name that cache."""


def build(
    settings: Settings,
    *,
    observers: Observers,
    database: ApplicationDatabase | None = None,
    timing: Timing | None = None,
) -> Services:
    """Build the services that these settings describe. `timing` is called with the duration of every store call.

    Raises `ConfigurationError` if the store cannot be built.
    """
    system = build_store(
        settings.store,
        strategy=settings.claim_strategy,
        database=database,
        memory={
            "store_id": settings.store_id,
            "after_loss": settings.after_loss,
            "grace": settings.data_loss_grace,
            "clock_skew": settings.client_clock_skew,
            "shards": settings.tenant_shards,
        },
        replicas=settings.replicas,
    )
    if settings.claim_strategy is not None and system is settings.store:
        raise ConfigurationError(
            "IDEMPOTENCY_CLAIM_STRATEGY: the store is an object, and has its claim strategy already. Remove this setting."
        )
    own = capabilities_of(system)
    if settings.configured_data_loss and system is settings.store and own.data_loss is not None:
        named = ", ".join(f"IDEMPOTENCY_{name.upper()}" for name in settings.configured_data_loss)
        raise ConfigurationError(
            f"{named}: the store is an object, and has its RedisDataLossPolicy already. Remove these settings, and pass "
            "them to that policy."
        )
    _check_shards(settings.tenant_shards, own.tenant_shards, store=type(system).__name__)
    transactions = own.transactions
    store = system if settings.redis_url is None else _tiered(system, settings.redis_url, transactions)
    # Use those of the tiered store: it also removes erased and re-encrypted responses from the cache.
    offered = capabilities_of(store)
    timed = store
    if timing is not None:
        from flask_idempotency.stores.timed import TimedStore  # only for an application that measures its store

        timed = TimedStore(store, timing)
    codec = _codec(settings, offered.data_keys, store=type(system).__name__)
    recovery = offered.recovery
    if recovery is not None and store is system and isinstance(system, KnowsCache):
        # Another host may have a cache in front of this system, and this host cannot invalidate its responses. Then a record
        # with a response is not resolved here: the cache would go on sending the old one.
        from flask_idempotency.stores.tiered import CachedRecovery

        recovery = CachedRecovery(recovery, lambda key, fence: not system.has_cache())
    deps = Dependencies(
        store=timed,
        codec=codec,
        renewer=LeaseRenewer(),
        repeater=LeaseRenewer(),
        waiters=Waiters(settings.max_waiters, notifier=offered.notifier),
        observers=observers,
        transactions=transactions,
        journals=offered.journals,
        step_transactions=cast("StepTransactions | None", transactions if hasattr(transactions, "join_step") else None),
        data_loss=offered.data_loss,
        void=offered.void,
        recovery=recovery,
    )
    found = {name: getattr(offered, name) for name in CAPABILITIES}
    # The tables are those of the database, also behind a cache.
    found |= {"schema": own.schema, "recovery": recovery}
    return Services(
        **found,
        engine=Engine(deps),
        codec=codec,
        tasks=None if offered.task_log is None else OwnTaskLog(offered.task_log, owner=owner_mark(settings.namespace)),
        cache_marker=system if isinstance(system, KnowsCache) else None,
    )


def _check_shards(shards: int, expected: int | None, *, store: str) -> None:
    """Raise `ConfigurationError` unless settings and store divide tenants into the same number of shards.

    Otherwise the store would not find the keys that the engine derives.
    """
    if expected is None:
        if shards > 1:
            raise ConfigurationError(
                f"IDEMPOTENCY_TENANT_SHARDS: the store ({store}) has no partitions that a tenant could "
                "outgrow. Remove this setting, or use a Redis store."
            )
    elif shards != expected:
        raise ConfigurationError(
            f"IDEMPOTENCY_TENANT_SHARDS: is {shards}, and the store was made for {expected}. Give it "
            f"rules=RedisDataLossPolicy(shards={shards}), or let it be made from a URL or a client."
        )


def _codec(settings: Settings, data_keys: DataKeys | None, *, store: str) -> Codec:
    if settings.compression == "zstd" and not zstd_is_installed():
        raise ConfigurationError(
            f"IDEMPOTENCY_COMPRESSION is zstd, which Python has from 3.14 on: {ZSTD_REMEDY} on every host first."
        )
    envelope = EnvelopeCodec(compression=COMPRESSIONS[settings.compression] if settings.compression else None)
    if data_keys is None and settings.encryption != "off":
        from flask_idempotency.settings.encryption import NO_DATA_KEYS

        raise ConfigurationError(NO_DATA_KEYS.format(mode=settings.encryption, store=store))
    if data_keys is None or settings.key_ring is None:
        return envelope
    # This needs the optional cryptography package. A key ring needs it, too, so it is installed.
    from flask_idempotency.codec.encryption import DataKeyring, EncryptedCodec

    return EncryptedCodec(
        envelope,
        DataKeyring(settings.key_ring, data_keys),
        sealing=settings.encryption != "off",
        plain_allowed=settings.encryption != "required",
    )


def is_process_local(settings: Settings) -> bool:
    """Return True if the records are in this process's memory, where no other process sees them."""
    if isinstance(settings.store, str):
        return urlsplit(settings.store).scheme == "memory"
    # Only here, because a worker whose records are elsewhere does not need this store.
    from flask_idempotency.stores.memory import MemoryStore

    return isinstance(settings.store, MemoryStore)


def identities(settings: Settings) -> tuple[Identity, ...]:
    """Return one identity for each secret in use, the newest first."""
    return tuple(Identity(secret, tenant_shards=settings.tenant_shards) for secret in settings.secrets)


def build_store(
    choice: Any,
    *,
    strategy: str | None = None,
    database: ApplicationDatabase | None = None,
    memory: Mapping[str, Any] = MappingProxyType({}),
    replicas: int = 0,
) -> Store:
    """Build a store from a URL, a `"package.module:factory"` or a Redis client. Return a `Store` unchanged.

    `memory` has the keywords of `RedisDataLossPolicy`, and `replicas` is how many replicas a write waits for. Both are for a
    Redis store that this function builds.
    """
    if not isinstance(choice, str):
        return _from_object(choice, memory, replicas)
    scheme = choice.partition(":")[0].lower() if ":" in choice else ""
    if scheme == "memory":
        from flask_idempotency.stores.memory import MemoryStore

        return MemoryStore()
    if scheme in _REDIS_SCHEMES:
        return _redis_store(choice, memory, replicas)
    if scheme == "flask-sqlalchemy":
        return _sql_store(strategy, database)
    if scheme.partition("+")[0] in _SQL_SCHEMES:
        return _sql_store(strategy, choice)
    if _FACTORY.fullmatch(choice):
        return _from_object(_factory(choice)(), memory, replicas)
    from flask_idempotency.engine.passwords import without_password

    raise ConfigurationError(
        f"IDEMPOTENCY_STORE: there is no store for {without_password(choice)} in this release. "
        "Use memory://, redis://, rediss://, unix://, redis+cluster://, redis+sentinel://, flask-sqlalchemy://, "
        'postgresql+psycopg://, mysql+pymysql:// or sqlite:///, a Store object, a Redis client, or "package.module:factory".'
    )


def _from_object(choice: Any, memory: Mapping[str, Any], replicas: int) -> Store:
    missing = [name for name in _PORT if not callable(getattr(choice, name, None))]
    if not missing:
        if replicas:
            raise ConfigurationError(
                "IDEMPOTENCY_REPLICAS: the store is an object, and has its number of replicas already. Remove this setting."
            )
        return choice  # type: ignore[no-any-return]
    if callable(getattr(choice, "evalsha", None)):
        return _redis_store(choice, memory, replicas)
    raise ConfigurationError(
        f"IDEMPOTENCY_STORE: {type(choice).__name__} is neither a Redis client nor a Store; it has no {', '.join(missing)}. "
        "See flask_idempotency.engine.store.Store, and StoreContract in flask_idempotency.testing.contract."
    )


def _redis_store(choice: Any, memory: Mapping[str, Any], replicas: int) -> Store:
    missing = "IDEMPOTENCY_STORE names a Redis, and the redis package is not installed: pip install 'flask-idempotency[redis]'."
    with importing("redis", otherwise=missing):
        from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
        from flask_idempotency.stores.redis.store import RedisStore
    store = RedisStore(choice, rules=RedisDataLossPolicy(**memory), replicas=replicas)
    store.check()
    return store


def _sql_store(strategy: str | None, bind: str | ApplicationDatabase | None) -> Store:
    missing = (
        "IDEMPOTENCY_STORE names a SQL database, and SQLAlchemy is not installed: pip install 'flask-idempotency[sql]'."
    )
    with importing("sqlalchemy", otherwise=missing):
        from flask_idempotency.stores.sql.database import Database
        from flask_idempotency.stores.sql.store import SqlStore
    if bind is None:
        raise ConfigurationError(
            "IDEMPOTENCY_STORE: flask-sqlalchemy:// needs a Flask application, and there is none here."
        )
    if isinstance(bind, str):
        return SqlStore(Database(bind), strategy=strategy or "insert")
    # This needs SQLAlchemy's ORM, which an application with a database of its own for records may not use.
    from flask_idempotency.stores.sql.transactional.session import TransactionalSqlStore

    return TransactionalSqlStore(
        Database(bind.engine, shared=bind.engines),
        sessions=bind.session,
        binds=bind.binds,
        testing=bind.testing,
        strategy=strategy or "insert",
    )


def build_outbox(settings: Settings, database: ApplicationDatabase, *, keep: float) -> tuple[OutboxNames, OutboxTable]:
    """Return what derives the names of messages, and their table in the application's database.

    The names are from the secret that stays the longest in a rotation. The table connects when it is first used.
    """
    # These need SQLAlchemy, which is optional.
    from flask_idempotency.engine.outbox import OutboxNames
    from flask_idempotency.stores.sql.database import Database
    from flask_idempotency.stores.sql.outbox import OutboxTable
    from flask_idempotency.stores.sql.transactional.joining import Joining

    former = settings.former_identity
    digest = identities(settings)[-1].outbox
    names = OutboxNames(settings.namespace, digest, None if former is None else former.namespace)
    joining = Joining(database.session, database.testing)
    return names, OutboxTable(Database(database.engine, shared=database.engines, joining=joining), names, keep=keep)


def engines_made(database: Any) -> list[Any]:
    """Return the engines that Flask-SQLAlchemy, or Flask-SQLAlchemy-Lite, has made by now for its applications.

    It enters no application context: a child of a fork asks.
    """
    made = [*getattr(database, "_app_engines", {}).values()]
    made += [state.engines for state in getattr(database, "_app_state", {}).values()]
    return [engine for engines in made for engine in engines.values()]


def _tiered(system: Store, redis_url: str, transactions: Transactions | None) -> Store:
    missing = (
        "IDEMPOTENCY_REDIS_URL is set, and the redis package is not installed: pip install 'flask-idempotency[redis]'."
    )
    with importing("redis", otherwise=missing):
        from flask_idempotency.stores.redis.replay_cache import RedisReplayCache
        from flask_idempotency.stores.tiered import TieredStore
    tiered = TieredStore(system, RedisReplayCache(redis_url))
    if transactions is not None:
        transactions.on_committed(tiered.committed)
    return tiered


def _factory(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    try:
        factory = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"IDEMPOTENCY_STORE: {path!r} cannot be imported: {error}.") from error
    if not callable(factory):
        raise ConfigurationError(f"IDEMPOTENCY_STORE: {path!r} is not a function that returns a Store.")
    return factory  # type: ignore[no-any-return]


def log_faults(schema: Schema) -> bool:
    """Log what is wrong with the tables. Do not raise: the command that repairs them must be able to start.

    Returns False if it is not known yet which database they are in.
    """
    try:
        for fault in schema.faults():
            _log.error(fault)
        for advice in schema.advice():
            _log.warning(advice)
    except ConfigurationError:
        return False
    except StoreUnavailable as error:
        _log.warning("%s Keyed requests are refused until it responds.", error)
    return True
