"""Whose key it is, and that nobody is taken for somebody else."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask, session
from flask_login import LoginManager, UserMixin  # type: ignore[import-untyped]

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.quota import Quota
from flask_idempotency.web.loaders import Loaders, load_principal, load_tenant
from tests.web.apps import is_replay, new_world


@pytest.fixture
def app() -> Flask:
    app = Flask(__name__)
    app.config["SECRET_KEY"] = "s"
    return app


def principal(app: Flask, loaders: Loaders | None = None, /, **headers: str) -> str | None:
    with app.test_request_context("/", method="POST", headers=headers) as context:
        return load_principal(loaders or Loaders(), context.request, app)


def test_a_loader_is_asked_and_believed(app: Flask) -> None:
    """
    Whatever credentials the request carries; None is nobody.
    """
    assert principal(app, Loaders(principal=lambda: "alice"), Authorization="Bearer x") == "alice"
    assert principal(app, Loaders(principal=lambda: None), Authorization="Bearer x") is None


@pytest.mark.parametrize("value", ("", 7, b"alice", object()))
def test_a_loader_must_return_a_name_or_none(app: Flask, value: Any) -> None:
    """
    An empty name would be shared by everybody without one, and 7 is not "7" after an upgrade.
    """
    with pytest.raises(ConfigurationError, match="principal_loader"):
        principal(app, Loaders(principal=lambda: value))
    with app.test_request_context("/"), pytest.raises(ConfigurationError, match="tenant_loader"):
        load_tenant(Loaders(tenant=lambda: value), app)


def test_a_loader_may_be_async(app: Flask) -> None:
    """
    As Flask's own callbacks may.
    """

    async def load() -> str:
        return "alice"

    assert "alice" == principal(app, Loaders(principal=load))  # type: ignore[arg-type]


@pytest.mark.parametrize("headers", ({"Authorization": "Bearer x"}, {"Cookie": "session=x"}, {"Cookie": "session="}))
def test_credentials_that_nobody_can_name_are_a_configuration_error(app: Flask, headers: dict[str, str]) -> None:
    """
    Under one anonymous name, one caller would be given another's answer. The text names the remedy.
    """
    with pytest.raises(ConfigurationError, match="principal_loader"):
        principal(app, Loaders(), **headers)


def test_a_request_without_credentials_is_anonymous(app: Flask) -> None:
    """
    Other cookies are no credentials, and the session cookie goes by its configured name.
    """
    app.config["SESSION_COOKIE_NAME"] = "sid"

    assert principal(app) is None
    assert principal(app, Cookie="session=x; lang=en") is None
    with pytest.raises(ConfigurationError):
        principal(app, Cookie="sid=x")


def test_a_tenant_is_optional(app: Flask) -> None:
    """
    Without a loader, or when it says None.
    """
    with app.test_request_context("/"):
        assert load_tenant(Loaders(), app) is None
        assert load_tenant(Loaders(tenant=lambda: None), app) is None
        assert "acme" == load_tenant(Loaders(tenant=lambda: "acme"), app)


def test_flask_login_names_the_user(app: Flask) -> None:
    """
    With a login manager no loader is needed; an anonymous visitor has a session cookie too.
    """

    class User(UserMixin):  # type: ignore[misc]
        id = "alice"

    LoginManager(app).user_loader(lambda user_id: User())
    cookie = session_cookie(app, _user_id="alice", _fresh=True)

    assert "alice" == principal(app, Cookie=cookie)
    assert principal(app, Cookie=session_cookie(app, cart=1)) is None
    assert principal(app) is None


def test_a_token_that_flask_login_makes_nothing_of_is_not_anonymous(app: Flask) -> None:
    """
    An API beside the pages: its callers must not all be one.
    """
    LoginManager(app).user_loader(lambda user_id: None)

    with pytest.raises(ConfigurationError, match="principal_loader"):
        principal(app, Authorization="Bearer x")


def session_cookie(app: Flask, **values: Any) -> str:
    """The Cookie header of a client whose session holds this."""

    def fill() -> str:
        session.update(values)
        return ""

    other = Flask("cookie maker")
    other.config["SECRET_KEY"] = app.config["SECRET_KEY"]
    other.get("/")(fill)
    return other.test_client().get("/").headers["Set-Cookie"].partition(";")[0]


def test_what_a_loader_raises_is_the_applications_error_and_claims_nothing() -> None:
    """
    For replays too: it is asked before anybody knows that it is one.
    """
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
