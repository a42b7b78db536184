"""Parse the URLs that name several servers: the nodes of a Cluster, or Sentinels.

    redis+cluster://user:password@host:port,host:port/?socket_timeout=0.5
    redis+sentinel://user:password@host:port,host:port/service/db?sentinel_password=other

This module does not import the redis package, because the settings check a URL for TLS before a client exists.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import Final, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

from flask_idempotency.engine.values import valueclass

Kind: TypeAlias = Literal["cluster", "sentinel"]

_FORM: Final = re.compile(r"(rediss?)\+(cluster|sentinel)://([^/?#]*)(/[^?#]*)?(?:\?([^#]*))?", re.IGNORECASE)
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s:@\[\]]+)(?::([0-9]{1,5}))?")
_PORTS: Final[dict[str, int]] = {"cluster": 6379, "sentinel": 26379}
"""Default ports."""


class Address(NamedTuple):
    """The host and port of a server."""

    host: str
    port: int


@valueclass(frozen=True, slots=True)
class MultiHostUrl:
    """The parts of such a URL. Its `repr` leaves out the parts that may hold a password."""

    kind: Kind
    tls: bool
    addresses: tuple[Address, ...]
    path: tuple[str, ...]
    """With Sentinels: the service, and the database if the URL names one. With a Cluster: empty."""
    user: str = field(repr=False)
    query: str = field(repr=False)
    """Both as the URL has them, still percent-encoded."""

    @property
    def single(self) -> str:
        """A URL of one server with the same user and options, because redis-py parses no other."""
        user = f"{self.user}@" if self.user else ""
        return f"{'rediss' if self.tls else 'redis'}://{user}localhost/?{self.query}"


def is_multi_host(url: str) -> bool:
    """Return whether this URL has a scheme of Cluster or Sentinel."""
    return url.partition(":")[0].lower() in ("redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")


def parse_multi_host(url: str) -> MultiHostUrl:
    """Parse a URL of Cluster or Sentinel.

    Raises `ValueError` if the URL is malformed. The error quotes no part of the URL, which may hold a password.
    """
    form = _FORM.fullmatch(url)
    if form is None:
        raise ValueError("the URL does not have this form")
    scheme, _, servers, path, query = form.groups(default="")
    kind: Kind = "cluster" if form[2].lower() == "cluster" else "sentinel"
    user, _, hosts = servers.rpartition("@")
    # An unescaped / in the password ends the servers too early, and the rest of the password becomes the path.
    if "@" in path:
        raise ValueError("the path contains an @: write / in a password as %2F")
    names = tuple(unquote(part) for part in path.split("/") if part)
    addresses = tuple(_address(text, _PORTS[kind]) for text in hosts.split(","))
    if kind == "cluster" and names not in ((), ("0",)):
        raise ValueError("a Cluster has only database 0")
    if kind == "sentinel" and not (1 <= len(names) <= 2 and all(name.isdigit() for name in names[1:])):
        raise ValueError("the path must be a service, or a service and a database number")
    path_names = names if kind == "sentinel" else ()
    return MultiHostUrl(kind, scheme.lower() == "rediss", addresses, path_names, user, query)


def _address(text: str, port: int) -> Address:
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found[2] or port) < 65536:
        raise ValueError("an address must be a host, or a host and a port from 1 to 65535")
    return Address(found[1].strip("[]"), int(found[2] or port))
