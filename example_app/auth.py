"""Who is asking, and how much they may. Four made-up people in three made-up companies, known by bearer tokens."""

from __future__ import annotations

from dataclasses import dataclass

from flask import abort, g, request

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

PLANS = {"initech": Quota(records=3)}
"""Initech is on trial, with three idempotency keys at a time. The others have what the configuration says: no limit."""


def authenticate() -> None:
    """A before_request hook: the library runs it before it claims or replays, so a stranger sees no stored answer."""
    credentials = request.authorization
    token = credentials.token if credentials is not None and credentials.type == "bearer" else None
    if token not in CALLERS:
        abort(401, "Send one of the demo's tokens, for instance: Authorization: Bearer tok_alice")
    g.caller = CALLERS[token]


def principal() -> str:
    """The subject, never the token: tokens rotate, and then a retry would be somebody else's first request."""
    return caller().principal


def tenant() -> str:
    return caller().tenant


def plan(tenant: str | None) -> Quota | None:
    return PLANS.get(tenant or "")


def caller() -> Caller:
    found: Caller = g.caller
    return found
