"""Who may open the console at /idempotency: two made-up people of this company, with HTTP Basic.

A real service asks its own accounts. The console's own checks come beside this: see docs/operate/console.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from hmac import compare_digest

from flask import Response, abort

from example_app.auth import sent_credentials
from example_app.extension import idempotency
from flask_idempotency.console import Console, Operator
from flask_idempotency.operations.records import RecordView


@dataclass(frozen=True, slots=True)
class Account:
    password: str
    tenants: frozenset[str] | None = None
    """None: all of them."""


OPERATORS = {"dana": Account("op_dana"), "gus": Account("op_gus", frozenset({"acme"}))}
"""Dana may do everything. Gus sees and settles the records of company acme alone."""

UNKNOWN = Account("")
CHALLENGE = 'Basic realm="idempotency console", charset="UTF-8"'


def authorize(action: str, record: RecordView | None) -> Operator:
    """Return the operator that the request names, or abort with 401. All of them may do each `action` that they can reach."""
    credentials = sent_credentials()
    basic = credentials if credentials is not None and credentials.type == "basic" else None
    name, password = (basic.username or "", basic.password or "") if basic is not None else ("", "")
    account = OPERATORS.get(name, UNKNOWN)
    # Compared for an unknown name as well, and in constant time: the duration tells neither a name nor a password.
    matches = compare_digest(password.encode(), account.password.encode())
    if account is UNKNOWN or not matches:
        abort(Response("Give the name and password of an operator.\n", 401, {"WWW-Authenticate": CHALLENGE}))
    return Operator(name, tenants=account.tenants)


def console(*, allow_http: bool) -> Console:
    """Return the console. With `allow_http` it opens without TLS as well: for a service that only this machine reaches."""
    return Console(idempotency, authorize=authorize, allow_http=allow_http)
