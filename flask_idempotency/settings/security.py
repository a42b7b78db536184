"""Whether what is sent to a store can be read on its way. A URL is read here and never said: it may hold a password."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

from flask_idempotency.engine.capabilities import KeepsDataKeys
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.urls import is_of_several, several

_ENCRYPTED: Final = frozenset({"require", "verify-ca", "verify-full"})
_FALSE: Final = frozenset({"", "0", "f", "false", "n", "no"})
"""As redis-py reads them."""

_VERIFIED: Final = frozenset({"required", "optional"})
"""In a client both verify. Allowed by name: what else stands there may mean `none` to whoever decodes it once more."""
_LOCAL_DRIVERS: Final = frozenset({"sqlite", "sqlite+pysqlite", "sqlite+aiosqlite", "sqlite+pysqlcipher"})
"""They open a file. Others under that name go over a network, and some do so with nothing but a path in their URL."""
_WAIVE: Final = "or, if something else protects the way there, set IDEMPOTENCY_ALLOW_PLAINTEXT_TRANSPORT to True."


@dataclass(frozen=True, slots=True)
class Exposure:
    """Why what is sent to a store may be read on its way. `remedy` begins a sentence."""

    setting: str
    what: str
    remedy: str
    certain: bool = True
    """False: nobody can tell."""


def transport_fault(setting: str, choice: Any, config: Mapping[str, Any]) -> str | None:
    """What keeps `required` from starting with this store, with a remedy. None: nothing does."""
    found = exposure(setting, choice, config)
    if found is None:
        return None
    return f"{found.setting}: {found.what}, and IDEMPOTENCY_ENCRYPTION is required. {found.remedy}, {_WAIVE}"


def exposure(setting: str, choice: Any, config: Mapping[str, Any]) -> Exposure | None:
    """How what is sent to this store may be read on its way. None: it cannot, or never leaves the machine."""
    if isinstance(choice, MemoryStore):
        return None
    if not isinstance(choice, str):
        return _opaque(setting, f"{type(choice).__name__} object")
    if choice.startswith("flask-sqlalchemy:"):
        return _of_application(config)
    if is_of_several(choice):
        return _of_several(setting, choice)
    if _is_ambiguous(choice):
        return _opaque(setting, "URL that can be read in two ways")
    scheme = urlsplit(choice).scheme.partition("+")[0]
    if scheme in ("redis", "rediss"):
        return _of_redis(setting, choice)
    if scheme in ("postgresql", "postgres"):
        return _of_postgresql(setting, choice, {})
    if scheme == "sqlite":
        return _of_sqlite(setting, choice)
    if scheme in ("memory", "unix"):
        return None
    return _opaque(setting, "store that a function makes")


def _is_ambiguous(url: str) -> bool:
    """Whether a driver may find another host in it than we do: where a password was not encoded, say."""
    try:
        authority = urlsplit(url).netloc
    except ValueError:
        return True
    return "@" in url.partition("//")[2][len(authority) :]


def _of_redis(setting: str, url: str) -> Exposure | None:
    parts = urlsplit(url)
    # Where the URL names no host before its path, redis-py takes one from behind the question mark.
    if _is_here(parts.hostname or _last(url, "host") or "localhost"):
        return None
    if parts.scheme == "rediss":
        return _unchecked(setting, url)
    return Exposure(setting, "names a Redis on another machine without TLS", "Use rediss:// or unix://")


def _of_several(setting: str, url: str) -> Exposure | None:
    """Wherever those are that it names: they say where the others are."""
    try:
        named = several(url)
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
        "names a Redis on another machine whose certificate nobody looks at",
        "Take ssl_cert_reqs and ssl_check_hostname out of the URL (ssl_ca_certs names an authority of your own)",
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
        what = "is not set, so nobody can tell how its database is reached"
        return Exposure(setting, what, "Set it before init_app", certain=False)
    if {"creator", "pool"} & options.keys():
        return _opaque("SQLALCHEMY_ENGINE_OPTIONS", "database connection that a function makes")
    if _is_ambiguous(str(url)):
        return _opaque(setting, "URL that can be read in two ways")
    scheme = str(url).partition(":")[0].partition("+")[0]
    if scheme in ("postgresql", "postgres"):
        return _of_postgresql(setting, str(url), options.get("connect_args") or {})
    return _of_sqlite(setting, str(url)) if scheme == "sqlite" else _opaque(setting, "database of this kind")


def _default_bind(config: Mapping[str, Any]) -> dict[str, Any]:
    """What Flask-SQLAlchemy makes the application's engine from, as it puts that together from three settings."""
    bind = (config.get("SQLALCHEMY_BINDS") or {}).get(None) or {}
    basic = dict(config.get("SQLALCHEMY_ENGINE_OPTIONS") or {})
    if config.get("SQLALCHEMY_DATABASE_URI") is not None:
        basic["url"] = config["SQLALCHEMY_DATABASE_URI"]
    return {**(bind if isinstance(bind, Mapping) else {"url": bind}), **(basic if "url" in basic else {})}


def _of_postgresql(setting: str, url: str, connect_args: Mapping[str, Any]) -> Exposure | None:
    """As libpq finds its way: what the driver is given goes before what the URL says, and that before the environment."""

    def said(name: str, variable: str) -> str:
        return str(connect_args.get(name) or _last(url, name) or os.environ.get(variable, ""))

    if said("service", "PGSERVICE") or connect_args.get("dsn") or connect_args.get("conninfo"):
        return _opaque(setting, "PostgreSQL service")
    if said("sslmode", "PGSSLMODE") in _ENCRYPTED:
        return None
    named = connect_args.get("host") or _all(url, "host") or urlsplit(url).hostname or os.environ.get("PGHOST", "")
    hosts = [*_hosts(named), *_hosts(said("hostaddr", "PGHOSTADDR"))]
    if all(_is_here(host) for host in hosts):
        return None
    return Exposure(
        setting,
        "names a PostgreSQL on another machine without TLS",
        "Add sslmode=verify-full (or verify-ca, or require)",
    )


def _opaque(setting: str, kind: str) -> Exposure:
    what = f"nobody can tell from a {kind} whether it is reached over TLS"
    return Exposure(setting, what, "Use a URL", certain=False)


def _hosts(named: str | Sequence[str]) -> list[str]:
    """libpq takes several, each of which may be the one."""
    several = named.split(",") if isinstance(named, str) else [host for each in named for host in each.split(",")]
    return [host for host in several if host]


def _is_here(host: str) -> bool:
    """Whether it is this machine: by name, by address, or as the folder of a socket."""
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


# Encryption at rest: the ring, and what has to be there before `required` is believed.

if TYPE_CHECKING:
    from flask_idempotency.codec.keyring import KeyProvider

NO_RING = (
    "IDEMPOTENCY_KEY_RING: is not set, and IDEMPOTENCY_ENCRYPTION is {mode}. Make a key with `flask idempotency keys "
    "generate`, keep it outside the store, and name its place: env:NAME, file:/path, or a KeyProvider."
)
NO_DATA_KEYS = (
    "IDEMPOTENCY_ENCRYPTION is {mode}, and the store ({store}) cannot keep the data keys of tenants: it has no `data_keys`. "
    "Use a memory, Redis or SQL store of this package, or set it to off."
)


def load_ring(source: Any) -> tuple[KeyProvider | None, list[str]]:
    """The ring that this setting names, or what is wrong with it. Says no key."""
    if source is None:
        return None, []
    try:
        from flask_idempotency.codec import keyring
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        return None, [
            "IDEMPOTENCY_KEY_RING is set, and the cryptography package is not installed: pip install "
            "'flask-idempotency[crypto]'."
        ]
    try:
        return keyring.load_ring(source), []
    except ConfigurationError as error:
        return None, [f"IDEMPOTENCY_KEY_RING: {fault}" for fault in error.faults]


def faults_of_encryption(loaded: Mapping[str, Any], config: Mapping[str, Any], *, identified: bool) -> Iterator[str]:
    """One sentence for each part that is missing, with its remedy.

    `identified`: whether something says who a caller is.
    """
    mode, store = loaded.get("encryption", "off"), loaded["store"]
    if mode == "off":
        return
    if loaded.get("key_ring") is None:
        yield NO_RING.format(mode=mode)
    if callable(getattr(store, "claim", None)) and not isinstance(store, KeepsDataKeys):
        yield NO_DATA_KEYS.format(mode=mode, store=type(store).__name__)
    if mode != "required":
        return
    if loaded.get("secret") is None:
        yield (
            "IDEMPOTENCY_SECRET: is not set, and IDEMPOTENCY_ENCRYPTION is required. One that is derived from SECRET_KEY, or "
            "made at random, does not do: set a long random value that is kept outside the store."
        )
    if not identified:
        yield (
            "IDEMPOTENCY_ENCRYPTION is required, and nothing says who a caller is. Register @idempotency.principal_loader "
            "before init_app, pass Idempotency(app, principal=…), or set up Flask-Login or Flask-JWT-Extended first."
        )
    if not loaded.get("allow_plaintext_transport", False):
        for name in ("store", "redis_url"):
            fault = transport_fault(f"IDEMPOTENCY_{name.upper()}", loaded[name], config) if loaded.get(name) else None
            if fault is not None:
                yield fault
