"""Authenticate callers and limit tenants: four made-up people in three made-up companies, with bearer tokens.

The visitors of the shop page have no account. A signed cookie tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex

from flask import abort, g, request, session
from werkzeug.datastructures import Authorization

from example_app.openapi import PUBLIC
from flask_idempotency import Quota


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    principal: str


CALLERS = {
    "tok_alice": Caller("acme", "alice"),
    "tok_bob": Caller("acme", "bob"),
    "tok_carol": Caller("globex", "carol"),
    "tok_dave": Caller("initech", "dave"),
}

POLICY = frozenset({"idempotency_policy", "idempotency_policy_schema"})
"""The endpoints of the policy document, which every client may read."""

PAGES = frozenset({"static", "idempotency_browser_module"})
"""The endpoints of the scripts that the shop page loads."""

CONSOLE = "idempotency_console"
"""The blueprint of the console. It has operators and not callers: see `operators.py`."""

PLANS = {"initech": Quota(records=3)}
"""Initech is on trial, with three idempotency keys at a time. The configuration sets no limit for the others."""


def authenticate() -> None:
    """Set the caller, or abort with 401. The library runs this hook before it claims or replays a key."""
    if request.endpoint in PUBLIC | POLICY | PAGES or request.blueprint == CONSOLE:
        return
    if request.blueprint == "shop":
        g.caller = Caller("shop", _visitor())
        return
    credentials = sent_credentials()
    token = credentials.token if credentials is not None and credentials.type == "bearer" else None
    if token not in CALLERS:
        abort(401, "Send one of the demo's tokens, for instance: Authorization: Bearer tok_alice")
    g.caller = CALLERS[token]


def sent_credentials() -> Authorization | None:
    """Return what the request's `Authorization` carries. None: there is none, or it cannot be read."""
    try:
        return request.authorization
    except ValueError:  # Werkzeug 3.1 raises it for a Basic header with a byte above 127
        return None


def _visitor() -> str:
    """Return who this visitor is. The session's cookie is SameSite=Lax, so no page of another site can pay for a visitor."""
    if "visitor" not in session:
        if request.method == "POST":
            abort(401, "Open /shop first, and allow its cookie.")
        session["visitor"] = token_hex(16)
    visitor: str = session["visitor"]
    return visitor


def principal() -> str:
    """Return the subject, never the token: after a token rotation, a retry would count as another principal's request."""
    return caller().principal


def tenant() -> str:
    return caller().tenant


def plan(tenant: str | None) -> Quota | None:
    return PLANS.get(tenant or "")


def caller() -> Caller:
    found: Caller = g.caller
    return found
