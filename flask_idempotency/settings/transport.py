"""Judge by its URL whether data on its way to a store may be read.

Texts show setting names. They never show a URL, because it may hold a password.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from flask_idempotency.engine.values import valueclass
from flask_idempotency.stores.redis.urls import is_multi_host, parse_multi_host

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
    if scheme in ("memory", "unix"):
        return None
    return _of_database(setting, choice, scheme, {}, otherwise="store that a function makes")


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


def _of_database(
    setting: str, url: str, scheme: str, connect_args: Mapping[str, Any], *, otherwise: str
) -> Exposure | None:
    match scheme:
        case "postgresql" | "postgres":
            return _of_postgresql(setting, url, connect_args)
        case "mysql" | "mariadb":
            return _of_mysql(setting, url, connect_args)
        case "sqlite":
            parts = urlsplit(url)
            if parts.scheme in _LOCAL_DRIVERS and not parts.netloc:
                return None
            return _opaque(setting, "SQLite that is more than a file")
    return _opaque(setting, otherwise)


def _of_application(config: Mapping[str, Any]) -> Exposure | None:
    setting = "SQLALCHEMY_DATABASE_URI"
    # The options of the application's engine, combined from three settings as Flask-SQLAlchemy does it.
    bind = (config.get("SQLALCHEMY_BINDS") or {}).get(None) or {}
    basic = dict(config.get("SQLALCHEMY_ENGINE_OPTIONS") or {})
    if config.get("SQLALCHEMY_DATABASE_URI") is not None:
        basic["url"] = config["SQLALCHEMY_DATABASE_URI"]
    options = {**(bind if isinstance(bind, Mapping) else {"url": bind}), **(basic if "url" in basic else {})}
    url = options.get("url")
    if url is None:
        what = "is not set, so it does not tell how the database is reached"
        return Exposure(setting, what, "Set it before init_app", certain=False)
    if {"creator", "pool"} & options.keys():
        return _opaque("SQLALCHEMY_ENGINE_OPTIONS", "database connection that a function makes")
    if _is_ambiguous(str(url)):
        return _opaque(setting, "URL that can be read in two ways")
    scheme, connect_args = str(url).partition(":")[0].partition("+")[0], options.get("connect_args") or {}
    return _of_database(setting, str(url), scheme, connect_args, otherwise="database of this kind")


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
