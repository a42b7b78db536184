"""What a database says when it cannot be used, in words that may stand in a log."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote, quote_plus

from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotency.stores.sql.dialects import SQLITE

_HIDDEN: Final = "***"
_HOST: Final = re.compile(r"[\w.-]+|[0-9A-Fa-f:.]+")
_NAME: Final = re.compile(r"[\w.-]+")


def complaint(error: SQLAlchemyError, url: URL) -> str:
    """Where the database is and what it says, without its password: not whole, and not in pieces."""
    if _is_torn(url):
        # What drivers say quotes host and database, which are pieces of the password here.
        return (
            "The database (not named here, because its URL may be torn in the middle of a password: write @ in it as "
            f"%40, / as %2F, ? as %3F and % as %25): {type(getattr(error, 'orig', None) or error).__name__}."
        )
    return f"{_place(url)}: {_without_secrets(_said(error), url)}."


def _is_torn(url: URL) -> bool:
    """Whether host and database may be the rest of a password: a URL is split at its first @, be it the password's.

    The @ that was meant is then in what follows, or went with a query of no parameters, and the database with it.
    """
    if url.get_backend_name() == SQLITE and url.password is None:
        return False
    plain = _NAME.fullmatch(url.database or "") and (url.host is None or _HOST.fullmatch(url.host))
    return not plain or "@" in str(dict(url.query))


def _place(url: URL) -> str:
    return f"The database {url.database!r}" if url.host is None else f"The database {url.database!r} on {url.host}"


def _said(error: SQLAlchemyError) -> str:
    """The first line, without its full stop: what follows quotes the statement."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0].rstrip(".")


def _without_secrets(words: str, url: URL) -> str:
    secrets = [str(url.password or ""), *(str(value) for name, value in url.query.items() if "pass" in name)]
    for secret in filter(None, secrets):
        for spelling in (secret, quote(secret, safe=""), quote_plus(secret)):
            words = words.replace(spelling, _HIDDEN)
    return words
