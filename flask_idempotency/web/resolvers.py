"""Resolvers as an application registers them, and as the janitor calls them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flask import Flask

from flask_idempotency.engine.capabilities import Found
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import Identity, marked
from flask_idempotency.engine.model import About, Result
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.recovery import Happened, Resolution, UnknownOutcome
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.responses import capture


def policy_of(policies: Policies, about: About) -> Policy:
    """What holds for the endpoint that this record is of, as the application is set up now."""
    return policies.resolve(about.operation, about.method).policy


def callable_resolvers(
    app: Flask, resolvers: Mapping[str, Callable[[UnknownOutcome], Resolution]], policies: Policies
) -> Mapping[str, Callable[[UnknownOutcome], Resolution]]:
    """By endpoint, each in an application context, and with a `Result` for an answer.

    Raises `ConfigurationError` for endpoints that the application does not have: their keys would wait for ever.
    """
    unknown = [endpoint for endpoint in resolvers if endpoint not in app.view_functions]
    if unknown:
        raise ConfigurationError(
            *(
                f"resolver({endpoint!r}): this application has no such endpoint. Name one as `url_for` would."
                for endpoint in unknown
            )
        )
    return {endpoint: partial(_ask, app, resolver, policies) for endpoint, resolver in resolvers.items()}


def result_of(app: Flask, answer: Any, policy: Policy) -> Result:
    """What a store keeps of an answer that a view might return. Raises `TypeError` for a stream: there is nobody to read it."""
    response = app.make_response(answer)
    taken = capture(response, policy, on_end=lambda end: None, orphans=deque())
    if taken.tee is not None or taken.result is None:
        raise TypeError("the answer of a resolver must not be a stream")
    return taken.result


def downstream_key(identities: Sequence[Identity], namespace: str, found: Found, name: str) -> str:
    """What `current_claim.downstream_key(name)` was for whoever claimed this record.

    Raises `ConfigurationError` where nobody can tell: under another secret it would be a key that the other side has never
    heard of, and that would look as if nothing had been done.
    """
    for who in identities:
        if marked(found.record.token, who.mark(namespace)):
            return who.downstream_key(found.key, name)
    raise ConfigurationError(
        "downstream_key(): this key was claimed while two secrets were listed in IDEMPOTENCY_SECRET, or under one that is not "
        "listed any more, so nobody can tell what the other side was sent. Ask it by something else, or settle the key by "
        "`flask idempotency resolve`."
    )


def _ask(
    app: Flask,
    resolver: Callable[[UnknownOutcome], Resolution],
    policies: Policies,
    unknown: UnknownOutcome,
) -> Resolution:
    with app.app_context():
        said = app.ensure_sync(resolver)(unknown)
        if isinstance(said, Happened) and not isinstance(said.answer, Result):
            return Happened(result_of(app, said.answer, policy_of(policies, unknown.record.about)))
        resolution: Resolution = said
        return resolution
