"""Loaders name the tenant and the caller of a request."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.quota import Quota
from flask_idempotency.web.callbacks import Callbacks, load_tenant
from flask_idempotency.web.principals import Credentials
from tests.apps import is_replay, new_world


@pytest.fixture
def app() -> Flask:
    app = Flask(__name__)
    app.config["SECRET_KEY"] = "s"
    return app


def principal(app: Flask, loaders: Callbacks | None = None, /, **headers: str) -> str | None:
    with app.test_request_context("/", method="POST", headers=headers) as context:
        loader = (loaders or Callbacks()).principal
        return Credentials().principal(loader, context.request, app)


def test_a_loader_names_the_caller(app: Flask) -> None:
    """Whatever credentials the request carries."""
    assert principal(app, Callbacks(principal=lambda: "alice"), Authorization="Bearer x") == "alice"
    assert principal(app, Callbacks(principal=lambda: None)) is None


@pytest.mark.parametrize("value", ("", 7, b"alice", object()))
def test_a_loader_must_return_a_name_or_none(app: Flask, value: Any) -> None:
    """All callers without a name would share an empty one, and 7 may become "7" after an upgrade."""
    with pytest.raises(ConfigurationError, match="principal_loader"):
        principal(app, Callbacks(principal=lambda: value))
    with app.test_request_context("/"), pytest.raises(ConfigurationError, match="tenant_loader"):
        load_tenant(Callbacks(tenant=lambda: value), app)


def test_a_loader_may_be_async(app: Flask) -> None:
    """As Flask's own callbacks may."""

    async def load() -> str:
        return "alice"

    assert "alice" == principal(app, Callbacks(principal=load))  # type: ignore[arg-type]


def test_a_tenant_is_optional(app: Flask) -> None:
    """Without a loader, or when it says None."""
    with app.test_request_context("/"):
        assert load_tenant(Callbacks(), app) is None
        assert load_tenant(Callbacks(tenant=lambda: None), app) is None
        assert "acme" == load_tenant(Callbacks(tenant=lambda: "acme"), app)


def test_what_a_loader_raises_is_the_applications_error_and_claims_nothing() -> None:
    """Also for a replay, because the loader runs before the claim."""
    world = new_world(init=False)
    world.idempotency.quota_loader(lambda tenant: Quota(**plans))
    world.idempotency.init_app(world.app)
    world.view()(lambda: ("paid", 201))
    plans: dict[str, Any] = {}
    world.post(key="known")
    calls = len(world.store.calls)
    plans["records"] = -1

    assert [500, 500] == [world.post(key=key).status_code for key in ("known", "new")]
    assert calls == len(world.store.calls)
    plans.clear()
    assert is_replay(world.post(key="known"))
