"""Check what protects stored data: the secrets that name records, encryption at rest, and the way to the store.

Texts show lengths and setting names. They never show a secret, a key or a URL, because a URL may hold a password.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from itertools import pairwise
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.offered import capabilities_of
from flask_idempotency.engine.values import valueclass
from flask_idempotency.stores.redis.urls import is_multi_host, parse_multi_host

if TYPE_CHECKING:
    from flask_idempotency.codec.keyring import KeyProvider  # needs an optional package

# Secrets.

MIN_SECRET_BYTES: Final = 16
MIN_SECRET_BYTES_REQUIRED: Final = 32
"""With encryption `required`: as long as the HMAC that is keyed with the secret."""

MIN_DIFFERENT_BYTES: Final = 6
"""Of 16 random bytes at least 12 differ, and of 32 random hexadecimal digits at least 8."""

MAKE_ONE: Final = "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"

_DERIVED: Final = b"derived from SECRET_KEY:"

_PUBLISHED: Final = frozenset(
    {
        b"192b9bdd22ab9ed4d12e236c78afcb9a393ec15f71bbf5dc987d54727823bcbf",  # Flask
        b'_5#y2L"F4Q8z\n\xec]/',  # Flask
        b"09d25e094faa6ca2556c818166b7a9563b93f7099f6f0f4caa6cf63b88e8d3e7",  # FastAPI
        b"you-will-never-guess",  # the Flask Mega-Tutorial
        b"hard to guess string",
        b"a-string-secret-at-least-256-bits-long",  # jwt.io
        b"your-256-bit-secret",  # jwt.io
        b"your-secret-key-here",
        b"your_secret_key_here",
        b"change-me-in-production",
    }
)
"""Examples that documentation has published, of 16 bytes or more. The list is short on purpose: it stops what is copied, and
the length and the repetitions stop most of the rest."""


def derived_secret(secret_key: str | bytes) -> bytes:
    """Return the secret that an application with no `IDEMPOTENCY_SECRET` derives from this `SECRET_KEY`.

    When you give the application its own secret, list this one last in `IDEMPOTENCY_SECRET` for one `keep`. Otherwise
    every key is new, and retries run again.
    """
    return _DERIVED + _bytes(secret_key)


def load_secrets(
    configured: Any, secret_key: Any, *, in_memory: bool, lenient: bool
) -> tuple[tuple[bytes, ...], list[str]]:
    """Return the secrets, newest first, and warnings. Return no secrets if these cannot be used."""
    if configured is not None:
        is_list = isinstance(configured, Sequence) and not isinstance(configured, str | bytes)
        listed = list(configured) if is_list else [configured]
        return tuple(map(_bytes, listed)) if all(map(_is_secret, listed)) else (), []
    if in_memory:
        return (token_bytes(32),), []  # the records end with this process, so their names may too
    if _is_secret(secret_key):
        warning = (
            "IDEMPOTENCY_SECRET is not set, so it is derived from SECRET_KEY: rotating SECRET_KEY would make every "
            "idempotency key new and run retries again. Set IDEMPOTENCY_SECRET to [a value of its own, "
            "flask_idempotency.settings.derived_secret(SECRET_KEY)], and drop the second after the longest `keep` or "
            "`remember`."
        )
        return (derived_secret(secret_key),), [] if lenient else [warning]
    return (), []


def secret_weaknesses(secrets: Sequence[bytes], *, required: bool, lenient: bool) -> tuple[list[str], list[str]]:
    """Return the faults and the warnings about these secrets: one sentence each, with the length and the remedy.

    A weak former secret may stay in the list for one `keep`, with a warning: without it, every key would be new. With
    encryption `required` it may not. In debug and testing (`lenient`) any secret will do, unless encryption is `required`.
    """
    faults, warnings = [], []
    if lenient and not required:
        return [], []
    least = MIN_SECRET_BYTES_REQUIRED if required else MIN_SECRET_BYTES
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
            faults.append(
                f"{name}: {weakness} {MAKE_ONE}. If it has named records, set IDEMPOTENCY_SECRET to [the new one, the old "
                "one], and drop the second after the longest `keep` or `remember`."
            )
        elif required:
            faults.append(
                f"{name}: {weakness} IDEMPOTENCY_ENCRYPTION is required: drop it, or set that to on until one `keep` has "
                "passed since every process knows the first."
            )
        else:
            warnings.append(
                f"{name}: {weakness} Drop it when the longest `keep` or `remember` has passed since every process knows the "
                "first."
            )
    return faults, warnings


def is_same(secret: bytes, keys: Iterable[Any]) -> bool:
    """Return whether this secret is one of these keys of the application, written as text or bytes."""
    return any(_is_secret(key) and secret == _bytes(key) for key in keys)


def _is_secret(value: Any) -> bool:
    return isinstance(value, str | bytes) and bool(value)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _weakness(secret: bytes, least: int) -> str | None:
    size = f"it has {len(secret)} bytes, and"
    if len(secret) < least:
        return f"{size} must have at least {least}."
    if secret in _PUBLISHED:
        return f"{size} is an example that documentation has published."
    # Steps from byte to byte find what counts up or down, such as 0123456789.
    steps = {after - before for before, after in pairwise(secret)}
    if min(len(set(secret)), len(steps)) < MIN_DIFFERENT_BYTES or secret in (secret * 2)[1:-1]:
        return f"{size} repeats itself."
    return None


# Encryption at rest.

NO_RING = (
    "IDEMPOTENCY_KEY_RING: is not set, and IDEMPOTENCY_ENCRYPTION is {mode}. Make a key with `flask idempotency keys "
    "generate`, keep it outside the store, and set this to its place: env:NAME, file:/path, or a KeyProvider."
)
NO_DATA_KEYS = (
    "IDEMPOTENCY_ENCRYPTION is {mode}, and the store ({store}) cannot keep the data keys of tenants: it has no `data_keys`. "
    "Use a memory, Redis or SQL store of this package, or set it to off."
)


def load_key_ring(source: Any) -> tuple[KeyProvider | None, list[str]]:
    """Return the ring that this option names, or the faults."""
    if source is None:
        return None, []
    try:
        from flask_idempotency.codec import key_sources
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        return None, [
            "IDEMPOTENCY_KEY_RING is set, and the cryptography package is not installed: pip install "
            "'flask-idempotency[crypto]'."
        ]
    try:
        return key_sources.load_ring(source), []
    except ConfigurationError as error:
        return None, [f"IDEMPOTENCY_KEY_RING: {fault}" for fault in error.faults]


def encryption_faults(loaded: Mapping[str, Any], config: Mapping[str, Any], *, has_principal: bool) -> Iterator[str]:
    """Yield one sentence with its remedy for each part that encryption needs and that is missing."""
    mode, store = loaded.get("encryption", "off"), loaded["store"]
    if mode == "off":
        return
    if loaded.get("key_ring") is None:
        yield NO_RING.format(mode=mode)
    if callable(getattr(store, "claim", None)) and capabilities_of(store).data_keys is None:
        yield NO_DATA_KEYS.format(mode=mode, store=type(store).__name__)
    if mode != "required":
        return
    if loaded.get("secret") is None:
        yield (
            "IDEMPOTENCY_SECRET: is not set, and IDEMPOTENCY_ENCRYPTION is required. A secret that is "
            "derived from SECRET_KEY, or made at random, is not enough: set a long random value that is kept outside the "
            "store."
        )
    if not has_principal:
        yield (
            "IDEMPOTENCY_ENCRYPTION is required, and the application cannot name its callers. Set up "
            "Flask-Login or Flask-JWT-Extended first, pass Idempotency(app, principal=…), or register "
            "@idempotency.principal_loader before init_app."
        )
    if not loaded.get("allow_plaintext_transport", False):
        for name in ("store", "redis_url"):
            found = exposure(f"IDEMPOTENCY_{name.upper()}", loaded[name], config) if loaded.get(name) else None
            if found is not None:
                yield (
                    f"{found.setting}: {found.what}, and IDEMPOTENCY_ENCRYPTION is required. {found.remedy}, or, if "
                    "something else protects the way there, set IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True."
                )


# The way to the store.

_ENCRYPTED: Final = frozenset({"require", "verify-ca", "verify-full"})
_FALSE: Final = frozenset({"", "0", "f", "false", "n", "no"})
"""The values that redis-py reads as false."""

_VERIFIED: Final = frozenset({"required", "optional"})
"""Both make a client verify. An allow-list: redis-py may decode another value to `none`."""
_LOCAL_DRIVERS: Final = frozenset({"sqlite", "sqlite+pysqlite", "sqlite+aiosqlite", "sqlite+pysqlcipher"})
"""These open a file. Other SQLite drivers use a network, some of them with only a path in their URL."""


@valueclass(frozen=True, slots=True)
class Exposure:
    """Why data that is sent to a store may be readable on its way. `remedy` begins a sentence."""

    setting: str
    what: str
    remedy: str
    certain: bool = True
    """False: the setting does not tell."""


def exposure(setting: str, choice: Any, config: Mapping[str, Any]) -> Exposure | None:
    """Return how data on its way to this store may be read. None: it is encrypted, or does not leave the machine."""
    if not isinstance(choice, str):
        # Only here, because a worker whose records are elsewhere does not need this store.
        from flask_idempotency.stores.memory import MemoryStore

        return None if isinstance(choice, MemoryStore) else _opaque(setting, f"{type(choice).__name__} object")
    if choice.startswith("flask-sqlalchemy:"):
        return _of_application(config)
    if is_multi_host(choice):
        return _of_several(setting, choice)
    if _is_ambiguous(choice):
        return _opaque(setting, "URL that can be read in two ways")
    scheme = urlsplit(choice).scheme.partition("+")[0]
    if scheme in ("redis", "rediss"):
        return _of_redis(setting, choice)
    if scheme in ("postgresql", "postgres"):
        return _of_postgresql(setting, choice, {})
    if scheme in ("mysql", "mariadb"):
        return _of_mysql(setting, choice, {})
    if scheme == "sqlite":
        return _of_sqlite(setting, choice)
    if scheme in ("memory", "unix"):
        return None
    return _opaque(setting, "store that a function makes")


def _is_ambiguous(url: str) -> bool:
    """Return whether a driver may read another host than we do, such as when a password was not encoded."""
    try:
        authority = urlsplit(url).netloc
    except ValueError:
        return True
    return "@" in url.partition("//")[2][len(authority) :]


def _of_redis(setting: str, url: str) -> Exposure | None:
    parts = urlsplit(url)
    # If the URL names no host before its path, redis-py takes the host from the query.
    if _is_here(parts.hostname or _last(url, "host") or "localhost"):
        return None
    if parts.scheme == "rediss":
        return _unchecked(setting, url)
    return Exposure(setting, "names a Redis on another machine without TLS", "Use rediss:// or unix://")


def _of_several(setting: str, url: str) -> Exposure | None:
    """Judge a URL of several hosts. Their places do not matter: Sentinels and nodes name further hosts."""
    try:
        named = parse_multi_host(url)
    except ValueError:
        return _opaque(setting, "URL that can be read in two ways")
    if named.tls:
        return _unchecked(setting, named.single)
    what = "the nodes of a Cluster" if named.kind == "cluster" else "a Redis that Sentinels choose"
    return Exposure(setting, f"names {what}, wherever they may be, without TLS", f"Use rediss+{named.kind}://")


def _unchecked(setting: str, url: str) -> Exposure | None:
    checked = not {text.lower() for text in _all(url, "ssl_check_hostname")} & _FALSE
    if checked and _VERIFIED.issuperset(_all(url, "ssl_cert_reqs")):
        return None
    return Exposure(
        setting,
        "names a Redis on another machine whose certificate is not verified",
        "Take ssl_cert_reqs and ssl_check_hostname out of the URL (ssl_ca_certs names your own authority)",
    )


def _of_sqlite(setting: str, url: str) -> Exposure | None:
    parts = urlsplit(url)
    if parts.scheme in _LOCAL_DRIVERS and not parts.netloc:
        return None
    return _opaque(setting, "SQLite that is more than a file")


def _of_application(config: Mapping[str, Any]) -> Exposure | None:
    setting = "SQLALCHEMY_DATABASE_URI"
    options = _default_bind(config)
    url = options.get("url")
    if url is None:
        what = "is not set, so it does not tell how the database is reached"
        return Exposure(setting, what, "Set it before init_app", certain=False)
    if {"creator", "pool"} & options.keys():
        return _opaque("SQLALCHEMY_ENGINE_OPTIONS", "database connection that a function makes")
    if _is_ambiguous(str(url)):
        return _opaque(setting, "URL that can be read in two ways")
    scheme = str(url).partition(":")[0].partition("+")[0]
    if scheme in ("postgresql", "postgres"):
        return _of_postgresql(setting, str(url), options.get("connect_args") or {})
    if scheme in ("mysql", "mariadb"):
        return _of_mysql(setting, str(url), options.get("connect_args") or {})
    return _of_sqlite(setting, str(url)) if scheme == "sqlite" else _opaque(setting, "database of this kind")


def _default_bind(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the application's engine, combined from three settings as Flask-SQLAlchemy does it."""
    bind = (config.get("SQLALCHEMY_BINDS") or {}).get(None) or {}
    basic = dict(config.get("SQLALCHEMY_ENGINE_OPTIONS") or {})
    if config.get("SQLALCHEMY_DATABASE_URI") is not None:
        basic["url"] = config["SQLALCHEMY_DATABASE_URI"]
    return {**(bind if isinstance(bind, Mapping) else {"url": bind}), **(basic if "url" in basic else {})}


def _of_postgresql(setting: str, url: str, connect_args: Mapping[str, Any]) -> Exposure | None:
    """Read options in libpq's order: the driver's arguments, then the URL, then the environment."""

    def option(name: str, variable: str) -> str:
        return str(connect_args.get(name) or _last(url, name) or os.environ.get(variable, ""))

    if option("service", "PGSERVICE") or connect_args.get("dsn") or connect_args.get("conninfo"):
        return _opaque(setting, "PostgreSQL service")
    if option("sslmode", "PGSSLMODE") in _ENCRYPTED:
        return None
    named = connect_args.get("host") or _all(url, "host") or urlsplit(url).hostname or os.environ.get("PGHOST", "")
    hosts = [*_hosts(named), *_hosts(option("hostaddr", "PGHOSTADDR"))]
    if all(_is_here(host) for host in hosts):
        return None
    return Exposure(
        setting,
        "names a PostgreSQL on another machine without TLS",
        "Add sslmode=verify-full (or verify-ca, or require)",
    )


def _of_mysql(setting: str, url: str, connect_args: Mapping[str, Any]) -> Exposure | None:
    host = connect_args.get("host") or _last(url, "host") or urlsplit(url).hostname or "localhost"
    if connect_args.get("unix_socket") or _last(url, "unix_socket") or _is_here(host):
        return None
    authority = _last(url, "ssl_ca") or connect_args.get("ssl_ca") or (connect_args.get("ssl") or {}).get("ca")
    # Other drivers go on without TLS if the server, or a stranger on the way, says that it has none.
    if authority and urlsplit(url).scheme.endswith("+pymysql"):
        return None
    return Exposure(
        setting,
        "names a MariaDB or MySQL on another machine without TLS",
        "Use mysql+pymysql:// with ssl_ca=/path/to/authority.pem",
    )


def _opaque(setting: str, kind: str) -> Exposure:
    what = f"a {kind} does not tell whether it is reached over TLS"
    return Exposure(setting, what, "Use a URL", certain=False)


def _hosts(named: str | Sequence[str]) -> list[str]:
    """Split the hosts: libpq takes several, and connects to any of them."""
    several = named.split(",") if isinstance(named, str) else [host for each in named for host in each.split(",")]
    return [host for host in several if host]


def _is_here(host: str) -> bool:
    """Return whether it is this machine: by name, by address, or as the folder of a socket."""
    if host.startswith(("/", "@")) or host == "localhost":
        return True
    for address in (host, host.rpartition(":")[0]):  # libpq's hosts may carry a port here
        try:
            return ip_address(address.strip("[]")).is_loopback
        except ValueError:
            continue
    return host.rpartition(":")[0] == "localhost"


def _all(url: str, name: str) -> list[str]:
    return parse_qs(urlsplit(url).query).get(name, [])


def _last(url: str, name: str) -> str:
    return (_all(url, name) or [""])[-1]
