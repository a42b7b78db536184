"""Several servers in one URL: those of a Cluster, or the Sentinels that know where a primary is.

    redis+cluster://user:password@host:port,host:port/?socket_timeout=0.5
    redis+sentinel://user:password@host:port,host:port/service/db?sentinel_password=other

Nothing here needs the redis package: whether a URL asks for TLS is decided before there is a client.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

Kind: TypeAlias = Literal["cluster", "sentinel"]

_FORM: Final = re.compile(r"(rediss?)\+(cluster|sentinel)://([^/?#]*)(/[^?#]*)?(?:\?([^#]*))?", re.IGNORECASE)
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s:@\[\]]+)(?::([0-9]{1,5}))?")
_PORTS: Final[dict[str, int]] = {"cluster": 6379, "sentinel": 26379}
"""Where each listens unless it is told to do otherwise."""


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class MultiHostUrl:
    """What such a URL names. Shown without what may hold a password."""

    kind: Kind
    tls: bool
    addresses: tuple[Address, ...]
    path: tuple[str, ...]
    """Of Sentinels the service, and a database where one is named; of a Cluster nothing."""
    user: str = field(repr=False)
    query: str = field(repr=False)
    """Both as they were written."""

    @property
    def single(self) -> str:
        """A URL of one server with the same user and options, for a driver that knows no other."""
        user = f"{self.user}@" if self.user else ""
        return f"{'rediss' if self.tls else 'redis'}://{user}localhost/?{self.query}"


def is_of_several(url: str) -> bool:
    """Whether it begins like one of these."""
    return url.partition(":")[0].lower() in ("redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")


def several(url: str) -> MultiHostUrl:
    """Raises `ValueError`, without a word of the URL, for one that cannot be read or leaves no doubt that it was mistyped."""
    form = _FORM.fullmatch(url)
    if form is None:
        raise ValueError("not of this form")
    scheme, _, servers, path, query = form.groups(default="")
    kind: Kind = "cluster" if form[2].lower() == "cluster" else "sentinel"
    user, _, hosts = servers.rpartition("@")
    # A password that holds a / was cut in two: what is behind it is no path.
    if "@" in path:
        raise ValueError("a user where a path should be")
    names = tuple(unquote(part) for part in path.split("/") if part)
    addresses = tuple(_address(text, _PORTS[kind]) for text in hosts.split(","))
    return MultiHostUrl(kind, scheme.lower() == "rediss", addresses, _path(kind, names), user, query)


def _path(kind: Kind, names: tuple[str, ...]) -> tuple[str, ...]:
    if kind == "cluster":
        if names not in ((), ("0",)):
            raise ValueError("a Cluster has one database")
        return ()
    if not 1 <= len(names) <= 2 or not all(name.isdigit() for name in names[1:]):
        raise ValueError("a service, and perhaps a database")
    return names


def _address(text: str, port: int) -> Address:
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found[2] or port) < 65536:
        raise ValueError("no address")
    return Address(found[1].strip("[]"), int(found[2] or port))
