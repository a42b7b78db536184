"""Decide who may do what in the console: ask `authorize`, accept only forms that the console made, and limit changes."""

from __future__ import annotations

import hmac
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final, Literal, TypeAlias

from flask import Request, current_app
from werkzeug.exceptions import HTTPException, Unauthorized

from flask_idempotency.assembly import identities
from flask_idempotency.engine.audit import LONGEST_ACTOR, RESOLVER
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.escape import printable
from flask_idempotency.engine.forks import after_fork
from flask_idempotency.engine.keys import encode
from flask_idempotency.engine.values import valueclass
from flask_idempotency.operations.records import RecordView
from flask_idempotency.web.operator import settings

Action: TypeAlias = Literal["view", "settle", "release", "purge", "outbox"]

COOKIE: Final = "idempotency_console"
"""Holds a random value. A form carries a digest of it, so that no other site can make the form."""

TOKEN_FIELD: Final = "console_token"  # noqa: S105 - the name of a form field

LARGEST_FORM: Final = 256 * 1024
"""Bytes. Only the response of a settled request makes a form large."""

MOST_FIELDS: Final = 30

HOUR_SECONDS: Final = 3600.0
MOST_ATTEMPTS: Final = 100_000
"""The most attempts that a process remembers: those of 3,000 operators who may make 30 changes an hour."""

_COOKIE_VALUE: Final = re.compile(r"[0-9A-Za-z_-]{43}")


@valueclass(frozen=True, slots=True)
class Operator:
    """An operator, and the tenants whose records they may see.

    Return it from `authorize`. `name` goes into the audit trail, so it must tell your operators apart. `tenants` are names as
    the `tenant_loader` returns them; None is all of them, and records without a tenant. Raises `ConfigurationError` for a
    name that is empty, too long, or `resolver`.
    """

    name: str
    tenants: Collection[str] | None = None

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name or len(name) > LONGEST_ACTOR or name == RESOLVER:
            raise ConfigurationError(
                f"Operator(): name must be a text of 1 to {LONGEST_ACTOR} characters, and not {RESOLVER}: the audit trail "
                "holds it, and there that is the actor of your resolvers."
            )
        if isinstance(self.tenants, str) or not (self.tenants is None or all(isinstance(t, str) for t in self.tenants)):
            raise ConfigurationError('Operator(): tenants must be a collection of names, such as {"acme"}, or None.')


Authorize: TypeAlias = Callable[[Action, RecordView | None], "Operator | str | Literal[False] | None"]


@dataclass(eq=False)
class Stopped(Exception):
    """Ends a request of the console with a page that says why, and what to do."""

    status: int
    title: str
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)
    page: str | None = None
    """The address where the operator can go on."""


def ask(authorize: Authorize, action: Action, record: RecordView | None) -> Operator | None:
    """Return the operator who may do this, or None. What `authorize` raises passes through, such as `abort(401)`."""
    answer: Any = current_app.ensure_sync(authorize)(action, record)
    if answer is None or answer is False:
        return None
    if isinstance(answer, Operator):
        # A plain `str`: templates would not escape markup.
        return Operator(printable(str(answer.name))[:LONGEST_ACTOR], answer.tenants)
    if isinstance(answer, str):
        return Operator(printable(str(answer)))
    raise ConfigurationError(
        f"authorize({action!r}, …) returned {type(answer).__name__}. Return the operator's name or an Operator, and None to "
        "refuse: the audit trail needs to know who acts."
    )


def may(authorize: Authorize, action: Action, record: RecordView | None) -> bool:
    """Return whether to offer this action. One that needs another sign-in (401) is offered: its page asks for it."""
    try:
        return ask(authorize, action, record) is not None
    except Unauthorized:
        return True
    except HTTPException:
        return False


# Forms.


def cookie_of(request: Request) -> str | None:
    """Return the value of our cookie. None: it is missing, or not one that we set.

    Another host of the domain can plant more of them, and a browser may send those first.
    """
    return next(filter(_COOKIE_VALUE.fullmatch, request.cookies.getlist(COOKIE)), None)


def form_tokens(cookie: str, operator: Operator) -> list[str]:
    """Return the token of a form of this operator, under each secret in use. A new form carries the first."""
    name = operator.name.encode("utf-8", "surrogatepass")
    message = encode(b"form", settings().namespace.encode("utf-8", "surrogatepass"), cookie.encode(), name)
    return [who.console(message).hex() for who in identities(settings())]


def check_origin(request: Request, *, any_scheme: bool) -> None:
    """Stop a form that another site sent. A browser says where a form comes from; one that does not say it passes here.

    `any_scheme`: this process may not know that its clients use HTTPS.
    """
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None and site != "same-origin":
        raise Stopped(403, "This form came from another site", "Nothing was changed. Open the console and start there.")
    origin = request.headers.get("Origin")
    if origin is None:
        return
    scheme, _, host = origin.partition("://")
    if host.lower() != request.host.lower() or not (any_scheme or scheme == request.scheme):
        raise Stopped(
            403,
            "This form came from another site",
            "Nothing was changed. If it came from this console, a proxy hides the host that the browser asked: wrap the "
            "application in werkzeug.middleware.proxy_fix.ProxyFix with x_host=1 and x_proto=1.",
        )


def form_of(request: Request) -> Mapping[str, str]:
    """Return the fields of a posted form. Stops one that is too large, of another type, or has a field twice."""
    if request.mimetype != "application/x-www-form-urlencoded":
        raise Stopped(415, "This is no form", "Send application/x-www-form-urlencoded. Nothing was changed.")
    length = request.content_length
    if length is None or length > LARGEST_FORM:
        raise Stopped(
            413,
            "The form is too large",
            f"A form has a length, of {LARGEST_FORM // 1024} kB at most. Nothing was changed.",
        )
    fields = request.form
    if len(fields) > MOST_FIELDS or any(len(values) > 1 for _, values in fields.lists()):
        raise Stopped(400, "This is no form of the console", "A field came twice, or too many. Nothing was changed.")
    return fields.to_dict()


def check_form(request: Request, fields: Mapping[str, str], operator: Operator) -> None:
    """Stop a form that this operator did not get from the console with this cookie."""
    cookie, token = cookie_of(request), fields.get(TOKEN_FIELD, "")
    sent = token.encode("utf-8", "surrogatepass")
    if cookie is None or not any(hmac.compare_digest(sent, each.encode()) for each in form_tokens(cookie, operator)):
        raise Stopped(
            403,
            "This form is not valid any more",
            "Nothing was changed. It belongs to another operator or session, or the browser holds no cookie of the console. "
            "Open the page again.",
        )


class Attempts:
    """Counts what each operator tried in the last hour, in this process."""

    def __init__(self, *, most: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._monotonic = monotonic
        self._taken: deque[tuple[float, str]] = deque(maxlen=MOST_ATTEMPTS)
        self._unlock()
        after_fork(self._unlock)

    def _unlock(self) -> None:
        self._lock = Lock()

    def take(self, name: str) -> float | None:
        """Count an attempt. Return the seconds to wait if there were too many; that one does not count."""
        now = self._monotonic()
        with self._lock:
            times = [at for at, who in self._taken if who == name and at > now - HOUR_SECONDS]
            if len(times) >= self.most:
                return times[0] + HOUR_SECONDS - now
            self._taken.append((now, name))
            return None
