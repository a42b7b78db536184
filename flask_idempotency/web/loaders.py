"""Who is asking: the principal and the tenant whose key it is.

Never derived from a cookie or a token. They rotate, and the retry that carries the new one would run a payment again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Flask, Request

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.record import Record
from flask_idempotency.engine.resolution import Resolution, UnknownOutcome

Loader = Callable[[], "str | None"]


class Loaders:
    """What an application registered on the extension. Set while it is being set up, only read afterwards."""

    __slots__ = ("principal", "problem_renderer", "quota", "replay_guard", "resolvers", "tenant")

    def __init__(self, *, principal: Loader | None = None, tenant: Loader | None = None) -> None:
        self.principal = principal
        self.tenant = tenant
        self.quota: Callable[[str | None], Quota | None] | None = None
        self.replay_guard: Callable[[Record], bool] | None = None
        self.problem_renderer: Callable[[Any], Any] | None = None
        self.resolvers: dict[str, Callable[[UnknownOutcome], Resolution]] = {}


def load_principal(loaders: Loaders, request: Request, app: Flask) -> str | None:
    """The stable id of whoever makes this request, or None for nobody.

    Raises `ConfigurationError` for a request with credentials that no loader can put a name to: under a shared name, one
    caller would be given another's answer.
    """
    if loaders.principal is not None:
        return _checked(app.ensure_sync(loaders.principal)(), "principal_loader")
    if hasattr(app, "login_manager"):
        user_id = _login_user_id()
        # An anonymous visitor has a session cookie too; a token that Flask-Login made nothing of is another matter.
        if user_id is not None or not request.headers.get("Authorization"):
            return user_id
    elif not _has_credentials(request, app):
        return None
    raise ConfigurationError(
        "This request carries credentials, and nothing says whose they are. Register @idempotency.principal_loader: "
        "a function that returns a stable id of the signed-in subject (not a cookie or a token), or None for nobody."
    )


def load_tenant(loaders: Loaders, app: Flask) -> str | None:
    """The tenant on whose behalf this request acts, or None."""
    return None if loaders.tenant is None else _checked(app.ensure_sync(loaders.tenant)(), "tenant_loader")


def load_quota(loaders: Loaders, default: Quota | None, tenant: str | None, app: Flask) -> Quota | None:
    """What this tenant may have: the default, and over it what the loader says. None: nothing is to be counted."""
    if loaders.quota is None:
        return default
    own = app.ensure_sync(loaders.quota)(tenant)
    if own is not None and not isinstance(own, Quota):
        raise ConfigurationError(
            f"The quota_loader returned a {type(own).__name__}. It must return a Quota, or None for the default."
        )
    return (default or Quota()).overlaid(own)


def check_counted(loaders: Loaders, default: Quota | None, *, counts: bool) -> None:
    """Raises `ConfigurationError` for quotas over a store that counts nothing."""
    if not counts and (default is not None or loaders.quota is not None):
        named = "A quota_loader is registered" if default is None else "IDEMPOTENCY_QUOTA_* is set"
        raise ConfigurationError(
            f"{named}, and the store cannot count what each tenant has: it has no `ledger`. Remove the quotas, or use a "
            "memory, Redis or SQL store of this package."
        )


def _checked(value: Any, loader: str) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    problem = "an empty string" if value == "" else f"a {type(value).__name__}"
    raise ConfigurationError(f"The {loader} returned {problem}. It must return a non-empty str, or None for nobody.")


def _login_user_id() -> str | None:
    # Optional, so only here: an application that has a login_manager has the package.
    from flask_login import current_user  # type: ignore[import-untyped]

    return _checked(current_user.get_id(), "get_id() of Flask-Login's current_user")


def _has_credentials(request: Request, app: Flask) -> bool:
    # The cookie is looked at from outside: merely touching `session` would add Vary: Cookie to the answer.
    cookie = app.session_interface.get_cookie_name(app)
    return "Authorization" in request.headers or cookie in request.cookies
