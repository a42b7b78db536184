"""`IDEMPOTENCY_GUARD`: which endpoints are guarded, and what of a guarded one belongs under `@exempt`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Blueprint, Flask, Request, Response, after_this_request, flash, make_response, session
from flask.sessions import SecureCookieSession, SecureCookieSessionInterface, SessionInterface, SessionMixin
from flask.views import MethodView
from flask_login import LoginManager, UserMixin, login_user  # type: ignore[import-untyped]

from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.web.policies import claim_here, exempt, idempotent
from tests.apps import World, is_replay, new_world, run, said


class Orders(MethodView):
    """One of its methods is chosen, one is not."""

    @idempotent
    def post(self) -> str:
        return "ordered"

    def put(self) -> str:
        return "changed"


@idempotent
class Chosen(MethodView):
    def post(self) -> str:
        return "made"

    @exempt
    def put(self) -> str:
        return "changed"


class Inherits(Chosen):
    def patch(self) -> str:
        return "patched"


def shop(guard: str | None, **policy: Any) -> World:
    config = {} if guard is None else {"IDEMPOTENCY_GUARD": guard}
    world = new_world(Flask("tests.web.app"), config=config, **policy)
    app = world.app

    def view() -> str:
        return "done"

    def add(owner: Flask | Blueprint, name: str, decorate: Callable[[Any], Any] = lambda view: view) -> None:
        owner.post(f"/{owner.name}-{name}", endpoint=name)(decorate(lambda: view()))

    add(app, "plain")
    add(app, "marked", idempotent)
    add(app, "valued", idempotent(keep=60))
    add(app, "claimed", claim_here)
    add(app, "exempt", exempt)
    blueprints = {name: Blueprint(name, __name__) for name in ("configured", "inner", "free", "nested")}
    for blueprint in blueprints.values():
        add(blueprint, "plain")
        add(blueprint, "exempt", exempt)
    add(blueprints["free"], "marked", idempotent)
    world.idempotency.configure(blueprints["configured"])
    world.idempotency.configure(blueprints["nested"], keep=60)
    blueprints["configured"].register_blueprint(blueprints["inner"])
    blueprints["free"].register_blueprint(blueprints["nested"])
    app.register_blueprint(blueprints["configured"])
    app.register_blueprint(blueprints["free"])
    for each in (Orders, Chosen, Inherits):
        app.add_url_rule(f"/{each.__name__}", view_func=each.as_view(each.__name__))
    return world


CHOSEN = {
    "POST marked",
    "POST valued",
    "POST claimed",
    "POST configured.plain",
    "POST configured.inner.plain",
    "POST free.marked",
    "POST free.nested.plain",
    "POST Orders",
    "POST Chosen",
    "POST Inherits",
    "PATCH Inherits",
}
UNCHOSEN = {"POST plain", "POST free.plain", "PUT Orders"}
EXEMPT = {
    "POST exempt",
    "POST configured.exempt",
    "POST configured.inner.exempt",
    "POST free.exempt",
    "POST free.nested.exempt",
    "PUT Chosen",
    "PUT Inherits",
}


@pytest.mark.parametrize(
    ("guard", "guarded"), [(None, CHOSEN | UNCHOSEN), ("all", CHOSEN | UNCHOSEN), ("chosen", CHOSEN)]
)
def test_the_setting_decides_which_endpoints_are_guarded(guard: str | None, guarded: set[str]) -> None:
    """
    Chosen are a view, a class or a method with a decorator of ours, and all below a configured blueprint. @exempt wins.
    """
    world = shop(guard)
    policies = world.app.extensions["idempotency"].policies
    pairs = [pair for pair in policies.pairs() if pair[1] not in ("GET", "HEAD", "OPTIONS") and pair[0] != "static"]

    assert CHOSEN | UNCHOSEN | EXEMPT == {f"{method} {endpoint}" for endpoint, method in pairs}
    assert guarded == {f"{m} {e}" for e, m in pairs if not policies.resolve(e, m).exempt}


@pytest.mark.parametrize(("guard", "replayed"), [("all", True), ("chosen", False)])
def test_a_view_that_was_not_chosen_runs_as_if_it_had_no_key(guard: str, replayed: bool) -> None:
    world = shop(guard, required=True)
    path = "/tests.web.app-plain"

    assert [False, replayed] == [is_replay(world.post(path)) for _ in range(2)]
    assert (400 if replayed else 200) == world.post(path, key=None).status_code
    assert replayed == bool(world.store.calls)


def test_a_view_that_was_chosen_is_guarded() -> None:
    world = shop("chosen", required=True)

    for path in (
        "/tests.web.app-marked",
        "/tests.web.app-claimed",
        "/configured-plain",
        "/inner-plain",
        "/nested-plain",
    ):
        assert [False, True] == [is_replay(world.post(path, key=path)) for _ in range(2)], path
        assert 400 == world.post(path, key=None).status_code


def test_a_wrong_policy_of_a_view_that_was_not_chosen_is_no_fault() -> None:
    """The application's own value does not concern what is not guarded."""
    world = new_world(config={"IDEMPOTENCY_GUARD": "chosen"})
    world.view()(lambda: "done")

    assert 200 == world.post().status_code


@pytest.mark.parametrize("guard", ["some", "", None, True, "CHOSEN"])
def test_another_value_is_refused(guard: Any) -> None:
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_GUARD"):
        new_world(config={"IDEMPOTENCY_GUARD": guard})


def test_the_policy_command_says_what_was_not_chosen() -> None:
    world = shop("chosen")
    rows = {(row["endpoint"], *row["methods"]): row for row in said(run(world, "policy", "--json"))["endpoints"]}

    assert (True, False) == (rows["plain", "POST"]["exempt"], rows["plain", "POST"]["chosen"])
    assert (False, True) == (rows["marked", "POST"]["exempt"], rows["marked", "POST"]["chosen"])
    assert (True, True) == (rows["exempt", "POST"]["exempt"], rows["exempt", "POST"]["chosen"])
    assert "not chosen (IDEMPOTENCY_GUARD)" in run(world, "policy", "plain").output
    assert "not chosen" not in run(shop("all"), "policy").output


def test_the_line_in_the_log_says_that_only_chosen_endpoints_are_guarded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flask_idempotency")
    shop("chosen")

    assert any("chosen endpoints only" in message for message in caplog.messages)


# ---- Responses that set cookies


def cookie() -> Response:
    response = make_response("signed in")
    response.set_cookie("token", "secret-token")
    return response


def late_cookie() -> str:
    @after_this_request
    def add(response: Response) -> Response:
        response.set_cookie("token", "secret-token")
        return response

    return "signed in"


def deleted_cookie() -> Response:
    response = make_response("signed out")
    response.delete_cookie("token")
    return response


def new_session() -> str:
    session["user"] = "secret-token"
    return "signed in"


def cleared_session() -> str:
    session.clear()
    return "signed out"


def flashed() -> str:
    flash("secret-token")
    return "saved"


def login() -> str:
    login_user(User())
    return "signed in"


class User(UserMixin):  # type: ignore[misc]
    id = "alice"


def only_read() -> str:
    return str(session.get("user"))


def declined() -> tuple[Response, int]:
    return cookie(), 503


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "set a cookie" in message]


@pytest.mark.parametrize(
    "view",
    [cookie, late_cookie, deleted_cookie, new_session, cleared_session, login],
    ids=lambda view: view.__name__,
)
def test_a_kept_response_that_sets_a_cookie_is_warned_of_once(
    view: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The replay has no cookie, so a retry of a login would not be signed in. No value of it is in the warning."""
    world = new_world()
    manager = LoginManager(world.app)
    manager.user_loader(lambda name: User())
    world.app.post("/login", endpoint="the_view")(view)
    first = world.post("/login", key="a")
    replayed = world.post("/login", key="a")
    world.post("/login", key="b")

    assert "Set-Cookie" in first.headers or view is cleared_session
    assert "Set-Cookie" not in replayed.headers
    assert 1 == len(warnings(caplog))
    assert warnings(caplog)[0].startswith("the_view ")
    assert "@exempt" in warnings(caplog)[0]
    assert "secret-token" not in caplog.text


def test_each_endpoint_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    world = new_world()
    for name in ("one", "two"):
        world.view(f"/{name}", endpoint=name)(cookie)
    for name in ("one", "two", "one"):
        world.post(f"/{name}", key=name)

    assert ["one", "two"] == [message.split()[0] for message in warnings(caplog)]


@pytest.mark.parametrize("view", [only_read, declined, lambda: "paid"], ids=["only read", "released", "no cookie"])
def test_other_responses_are_not_warned_of(view: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    world = new_world(effects="deduplicated")
    world.view(endpoint="the_view")(view)
    world.post()

    assert [] == warnings(caplog)


def flashed_in_a_form() -> str:
    session.pop("_flashes", None)  # as get_flashed_messages() does while a page is rendered
    flash("saved")
    return "saved"


def flashed_and_signed_in() -> str:
    flash("saved")
    session["user"] = "secret-token"
    return "saved"


def flashed_and_appended() -> str:
    flash("saved")
    session["cart"].append("secret-token")
    return "saved"


def flashed_and_removed() -> str:
    flash("saved")
    del session["cart"]
    return "saved"


def flashed_beside_a_cookie() -> Response:
    flash("saved")
    return cookie()


class ListedSession(SessionMixin):
    """A session that is no dict."""

    modified = False

    def __init__(self) -> None:
        self.items_of: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self.items_of[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.modified = True
        self.items_of[name] = value

    def __delitem__(self, name: str) -> None:
        self.modified = True
        del self.items_of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


class Listed(SessionInterface):
    def open_session(self, app: Flask, request: Any) -> Any:
        return ListedSession()

    def save_session(self, app: Flask, session: Any, response: Any) -> None: ...


def with_cart(view: Callable[[], Any]) -> World:
    """The view's client has something in its session. The hook that looks at it changes nothing."""
    world = new_world()

    @world.app.post("/cart")
    @exempt
    def put() -> str:
        session["cart"] = ["tea"]
        flash("earlier")
        return "put"

    world.app.post("/flash", endpoint="the_view")(view)
    return world


def sent(world: World) -> Any:
    with world.client() as client:
        client.post("/cart")
        return client.post("/flash", headers={"Idempotency-Key": "a"})


@pytest.mark.parametrize("view", [flashed, flashed_in_a_form], ids=lambda view: view.__name__)
def test_a_flash_message_alone_is_not_warned_of(view: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    """Nearly every form has one, and its view does not sign the user in."""
    assert "Set-Cookie" in sent(with_cart(view)).headers
    assert [] == warnings(caplog)


@pytest.mark.parametrize(
    "view",
    [flashed_and_signed_in, flashed_and_appended, flashed_and_removed, flashed_beside_a_cookie],
    ids=lambda view: view.__name__,
)
def test_a_flash_message_hides_no_other_change(view: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    """Not one within a value either, which the session itself cannot see."""
    sent(with_cart(view))

    assert 1 == len(warnings(caplog))


def test_a_session_that_cannot_be_compared_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    world = new_world()
    world.app.session_interface = Listed()
    world.app.post("/flash", endpoint="the_view")(flashed)
    world.post("/flash")

    assert 1 == len(warnings(caplog))


class Uncopied:
    """What a session on a server may hold."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not to be copied")


def test_a_value_that_cannot_be_copied_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Then the session cannot be compared."""
    world = new_world()

    class Kept(SecureCookieSessionInterface):
        def open_session(self, app: Flask, request: Any) -> Any:
            return SecureCookieSession({"basket": Uncopied()})

        def save_session(self, app: Flask, session: Any, response: Any) -> None: ...

    world.app.session_interface = Kept()
    world.app.post("/flash", endpoint="the_view")(flashed)

    assert 200 == world.post("/flash").status_code
    assert 1 == len(warnings(caplog))


def test_comparing_sessions_adds_no_vary() -> None:
    """A view that leaves the session alone gives the same response whatever the cookie is."""
    world = with_cart(lambda: "saved")

    assert "Vary" not in sent(world).headers


def test_an_exempt_view_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    world = new_world()
    world.view()(exempt(lambda: cookie()))  # the mark stays on the function

    assert ["Set-Cookie" in world.post().headers for _ in range(2)] == [True, True]
    assert [] == warnings(caplog)


@pytest.mark.parametrize("where", ["before", "after"])
def test_cookies_of_the_applications_hooks_are_not_the_views(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """They run on replays as well, so nothing is lost."""
    world = new_world()
    if where == "before":

        @world.app.before_request
        def visits() -> None:
            session["visits"] = 1
    else:

        @world.app.after_request
        def track(response: Response) -> Response:
            response.set_cookie("track", "1")
            session["visits"] = 1
            return response

    world.view()(lambda: "paid")

    assert ["Set-Cookie" in world.post().headers for _ in range(2)] == [True, True]
    assert [] == warnings(caplog)


def test_a_session_that_cannot_tell_whether_it_was_changed_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Flask's mixin says of such a class that it was always modified."""

    class Untold(dict[str, Any], SessionMixin):
        """Has `modified` of the mixin, which is True."""

    class Sessions(SessionInterface):
        def open_session(self, app: Flask, request: Request) -> Untold:
            return Untold()

        def save_session(self, *arguments: Any) -> None:
            pass

    world = new_world()
    world.app.session_interface = Sessions()
    world.view()(lambda: "paid")
    world.post()

    assert [] == warnings(caplog)
