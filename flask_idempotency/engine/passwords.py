"""Hide the passwords of URLs. Only an error that quotes a URL needs this module."""

from __future__ import annotations

import re
from urllib.parse import unquote

from flask_idempotency.engine.escape import printable

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_USER = re.compile(r"[\w.%~+-]*")
_HOST = re.compile(r"(?:[\w.-]*|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])(?::[0-9]{1,5})?")
_SECRET = re.compile(r"pass|pwd|secret|token|key|auth|cred|sig", re.IGNORECASE)
_OPTION = re.compile(r"[A-Za-z_]{1,40}")
_NUMBER = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?|true|false|yes|no", re.IGNORECASE)
_VALUE = re.compile(r"[\w.,:/+%~-]*")
_PATH = re.compile(r"[\w./%~+-]*")
_REDIS_PATH = re.compile(r"/?[0-9]{0,3}")
_SERVICE_PATH = re.compile(r"/[\w.-]+(?:/[0-9]{0,3})?")
_HIDDEN = "***"


def without_password(url: str) -> str:
    """Return this URL for an error message: user, host, port, database and options, without the password.

    A mistyped URL may have a piece of the password anywhere. So show a part only if it cannot be one. If the URL can be read
    in two ways, show only the text behind its last @, or none of it if that @ may be in a password.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        return _HIDDEN
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    behind = rest[len(authority) :]
    if "@" in behind:
        # The intended @ may be in this later part. Then the first part is the beginning of a password.
        before, _, last = rest.rpartition("@")
        authority = re.split(r"[/?#]", last, maxsplit=1)[0]
        hosts = _hosts(authority) if not {"?", "#"} & set(before) else None
        return f"{scheme}://{_HIDDEN}" + (f"@{hosts}{_behind(scheme, last[len(authority) :])}" if hosts else "")
    user, at, hosts = authority.rpartition("@")
    shown = _hosts(hosts)
    if shown is None:
        # Such as `redis://user:password` without a host: the rest may be the end of the password.
        return f"{scheme}://{_HIDDEN}" if not at else f"{scheme}://{_user(scheme, user)}@{_HIDDEN}"
    return printable(f"{scheme}://{_user(scheme, user) + '@' if at else ''}{shown}{_behind(scheme, behind)}")


def _user(scheme: str, written: str) -> str:
    name, colon, _ = written.partition(":")
    # Redis has no user without a password: a single word is a password without its colon.
    alone = not colon and scheme.lower().startswith(("redis", "rediss", "unix", "valkey"))
    shown = name if _USER.fullmatch(name) and not alone else _HIDDEN
    return f"{shown}:{_HIDDEN}" if colon else shown


def _hosts(written: str) -> str | None:
    """Return a list of hosts, separated by commas, unchanged. Return None for any other text."""
    return written if all(map(_HOST.fullmatch, written.split(","))) else None


def _behind(scheme: str, written: str) -> str:
    """Return the path and the options. Hide options behind a secret one: they may be the end of the secret."""
    path, question, query = written.partition("#")[0].partition("?")
    items, secret = list[str](), False
    for item in query.split("&") if question else ():
        name, equals, value = item.partition("=")
        plain = unquote(name).lower()
        if not equals or not _OPTION.fullmatch(plain) or (secret and not _is_known(plain)):
            items.append(_HIDDEN)
            continue
        is_secret = _SECRET.search(plain) is not None
        secret = secret or is_secret
        form = _VALUE if _is_known(plain) else _NUMBER
        items.append(f"{name}={_HIDDEN if is_secret or not form.fullmatch(value) else value}")
    fragment = f"#{_HIDDEN}" if "#" in written else ""
    return _path(scheme.lower(), path) + (question + "&".join(items)) + fragment


def _path(scheme: str, written: str) -> str:
    """Return the database. For Redis it is a number: any other text may be the end of a password."""
    form = _SERVICE_PATH if scheme.endswith("+sentinel") else _REDIS_PATH if scheme.startswith("redis") else _PATH
    return written if form.fullmatch(written) else f"/{_HIDDEN}"


def _is_known(name: str) -> bool:
    return name in ("host", "sslmode") or name.startswith(("ssl_", "socket_"))
