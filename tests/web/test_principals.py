"""Whose key it is: the caller's, by a stable name, and never that of all callers that the application forgot to name."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
from flask import Flask, Response, g, jsonify, request, session
from flask_httpauth import HTTPBasicAuth, HTTPTokenAuth, MultiAuth  # type: ignore[import-untyped]
from flask_jwt_extended import (
    JWTManager,
    create_access_token,
    create_refresh_token,
    get_jti,
    get_jwt_identity,
    jwt_required,
    set_access_cookies,
)
from flask_login import AnonymousUserMixin, LoginManager, UserMixin, login_required  # type: ignore[import-untyped]
from flask_principal import Identity, Principal  # type: ignore[import-untyped]

from flask_idempotency import claim_here, current_claim
from flask_idempotency.web.principals import ASSERTED, CERTIFICATES, TOKENS
from tests.apps import World, is_replay, new_world

KEY = "kept-in-tests-only-and-32-bytes-long"
BEARER = {"Authorization": "Bearer x"}

CREDENTIALS = [
    {"Authorization": "Bearer x"},
    {"Proxy-Authorization": "Basic eA=="},
    {"Cookie": "session=x"},
    {"Cookie": "consent=yes"},
    {"Cookie": "csrf_token=x"},
    {"X-API-Key": "x"},
    {"x-api-key": "x"},
    {"Api-Key": "x"},
    {"X-Auth-Token": "x"},
    {"X-Access-Token": "x"},
    {"X-Forwarded-Client-Cert": "Hash=x"},
    {"X-SSL-Client-S-DN": "CN=x"},
    {"SSL-Client-Cert": "x"},
    {"Client-Cert": ":x:"},
    {"X-Forwarded-User": "x"},
    {"X-Remote-User": "x"},
    {"Cf-Access-Jwt-Assertion": "x"},
    {"X-Goog-IAP-JWT-Assertion": "x"},
    {"X-Amzn-Oidc-Data": "x"},
    {"X-Token": "x"},
    {"X-Authorization": "Bearer x"},
    {"X-Goog-Api-Key": "x"},
    {"X-Consumer-Id": "x"},
    {"X-User-Id": "7"},
    {"OIDC-CLAIM-sub": "x"},
    {"X-Forwarded-Tls-Client-Cert": "x"},
    {"X-Client-Verify": "SUCCESS"},
]
"""One of each kind."""

NONE_AT_ALL: list[dict[str, str]] = [
    {},
    {"Authorization": ""},
    {"Cookie": ""},
    {"X-API-Key": "  "},
    {"X-SSL-Client-Verify": "NONE"},
    {"X-Client-Verify": "NONE"},
    {"X-SSL-Client-S-DN": ""},
    {"User-Agent": "x", "X-Request-Id": "7", "X-CSRF-Token": "x"},
]


def shop(*, app: Flask | None = None, **options: Any) -> World:
    world = new_world(app, principal=None, **options)

    @world.view()
    def pay() -> tuple[dict[str, Any], int]:
        world.runs.append(current_claim.principal)
        return {"whose": current_claim.principal}, 201

    return world


def refused(response: Any) -> tuple[int, str]:
    return response.status_code, response.json["code"]


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.ERROR, "flask_idempotency"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "flask_idempotency"]


def test_credentials_that_nothing_names_never_share_a_key_space() -> None:
    """Under one anonymous name, one caller would get the response of another."""
    for loader, headers in product((False, True), CREDENTIALS):
        world = shop()
        if loader:
            world.idempotency.principal_loader(lambda: None)

        assert (403 if loader else 500, "principal-required") == refused(world.post(headers=headers)), (loader, headers)
        assert not world.runs, (loader, headers)
        assert not world.store.calls, (loader, headers)


def test_a_request_without_credentials_is_anonymous() -> None:
    """An empty header, a proxy's "no certificate" and a CSRF token name no caller."""
    for loader, headers in product((False, True), NONE_AT_ALL):
        world = shop()
        if loader:
            world.idempotency.principal_loader(lambda: None)

        assert 201 == world.post(headers=headers).status_code, (loader, headers)
        assert is_replay(world.post(headers=headers)), (loader, headers)
        assert [None] == world.runs, (loader, headers)


@pytest.mark.parametrize(
    "environ",
    ({"REMOTE_USER": "alice"}, {"SSL_CLIENT_S_DN": "CN=x"}, {"SSL_CLIENT_CERT": "x"}, {"OIDC_CLAIM_sub": "x"}),
    ids=str,
)
def test_what_the_server_says_of_a_caller_is_a_credential(environ: dict[str, str]) -> None:
    world = shop()

    assert "principal-required" == refused(world.post(environ_overrides=environ))[1]
    assert 201 == world.post(environ_overrides={"SSL_CLIENT_VERIFY": "NONE", "REMOTE_USER": ""}).status_code


def test_the_application_adds_names_of_its_own() -> None:
    world = shop(credential_headers=["X-Shop-Token"])

    assert "principal-required" == refused(world.post(headers={"x-shop-token": "x"}))[1]
    assert 201 == world.post(headers={"X-Other-Token": "x"}).status_code


@pytest.mark.parametrize(
    ("allowed", "without", "with_credentials"), [(None, 201, 500), (True, 201, 201), (False, 403, 500)]
)
def test_anonymous_callers_are_let_in_as_it_is_written(
    allowed: bool | None, without: int, with_credentials: int
) -> None:
    """Not written: without credentials only. True: with credentials too. False: never."""
    world = shop() if allowed is None else shop(allow_anonymous=allowed)

    assert without == world.post(key="a").status_code
    assert with_credentials == world.post(key="b", headers=BEARER).status_code


def test_the_refusal_is_logged_once_for_each_endpoint_and_says_what_to_add(errors: Callable[[], list[str]]) -> None:
    """Not for each request, and without any value that the client sent."""
    world = shop()
    world.view("/refunds", endpoint="refund")(lambda: "refunded")
    for _ in range(3):
        answer = world.post(headers={"X-API-Key": "canary"})
        world.post("/refunds", headers={"Cookie": "a=canary"})

    pay, refund = errors()
    assert "pay " in pay
    assert "X-API-Key" in pay
    assert "@idempotency.principal_loader" in pay
    assert "refund " in refund
    assert "Cookie" in refund
    assert "canary" not in pay + refund + answer.text
    assert "principal_loader" not in answer.text


def test_in_debug_mode_the_refusal_shows_the_lines_to_paste() -> None:
    world = shop()
    world.app.debug = True

    detail = world.post(headers=BEARER).json["detail"]  # type: ignore[index]

    lines = detail.partition("\n\n")[2].split("\n")
    assert 4 == len(lines)
    assert "@idempotency.principal_loader" == lines[0]
    exec(compile(detail.partition("\n\n")[2], "pasted", "exec"), {"idempotency": world.idempotency, "g": g})  # noqa: S102 - our own text
    with world.app.test_request_context():
        g.user = type("User", (), {"id": 7})()
        assert "7" == cast(Any, world.app.extensions["idempotency"].loaders.principal)()


def test_only_the_request_that_cannot_be_named_is_refused() -> None:
    """Neither a request without a key, nor another endpoint, nor the next caller."""
    world = shop()
    world.app.get("/")(lambda: "a page")

    assert 500 == world.post(headers=BEARER).status_code
    assert [200, 201] == [
        world.client().get("/", headers=BEARER).status_code,
        world.post(key="other").status_code,
    ]


def test_a_loader_beats_every_extension() -> None:
    world = shop(app=jwt_app())
    world.idempotency.principal_loader(lambda: "written")

    assert {"whose": "written"} == world.post(headers=token(world.app, "7")).json


# Flask-Login


class User(UserMixin):  # type: ignore[misc]
    def __init__(self, user_id: str) -> None:
        self.id = user_id


def login_app() -> Flask:
    app = Flask("tests.web.app")
    app.config["SECRET_KEY"] = KEY
    LoginManager(app).user_loader(User)
    return app


def session_cookie(app: Flask, **values: Any) -> dict[str, str]:
    """The Cookie header of a client whose session holds this."""
    other = Flask("cookie maker")
    other.config["SECRET_KEY"] = app.config["SECRET_KEY"]

    @other.get("/")
    def fill() -> str:
        session.update(values)
        return ""

    return {"Cookie": other.test_client().get("/").headers["Set-Cookie"].partition(";")[0]}


def signed_in(app: Flask, user_id: str) -> dict[str, str]:
    return session_cookie(app, _user_id=user_id, _fresh=True)


def test_flask_login_names_the_user() -> None:
    """A visitor who has not signed in has a session cookie too, and is not named by it."""
    world = shop(app=login_app())

    assert {"whose": "alice"} == world.post(headers=signed_in(world.app, "alice")).json
    assert {"whose": "bob"} == world.post(headers=signed_in(world.app, "bob")).json
    assert (403, "principal-required") == refused(world.post(headers=session_cookie(world.app, cart=1)))
    assert (403, "principal-required") == refused(world.post(headers=BEARER))
    assert {"whose": None} == world.post().json


def test_an_anonymous_user_with_an_id_is_no_principal() -> None:
    """An application's own `anonymous_user` may be a guest with an id: one for all callers that have not signed in."""
    app = login_app()

    class Guest(AnonymousUserMixin):  # type: ignore[misc]
        def get_id(self) -> str:
            return "guest"

    app.login_manager.anonymous_user = Guest  # type: ignore[attr-defined]
    world = shop(app=app)

    assert (403, "principal-required") == refused(world.post(headers={"X-API-Key": "alice's"}))
    assert {"whose": None} == world.post().json
    assert {"whose": "bob"} == world.post(headers=signed_in(app, "bob")).json


def test_looking_for_credentials_adds_no_vary() -> None:
    """To look at the session is to say that the response depends on the cookie."""
    app = Flask("tests.web.app")
    app.config["SECRET_KEY"] = KEY
    world = shop(app=app, allow_anonymous=True)

    assert "Vary" not in world.post(headers=session_cookie(app, cart=1)).headers


def test_a_request_loader_of_flask_login_is_called_without_credentials() -> None:
    """It may look into the query."""
    app = login_app()
    app.login_manager.request_loader(  # type: ignore[attr-defined]
        lambda asked: User("robot") if asked.args.get("key") == "x" else None
    )

    assert {"whose": "robot"} == shop(app=app).post("/?key=x").json


# Set up, and the caller has not signed in


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    with caplog.at_level(logging.INFO, "flask_idempotency"):
        yield lambda: [
            (record.levelname, record.getMessage()) for record in caplog.records if "refused" in record.getMessage()
        ]


def loader_app() -> Flask:
    app = Flask("tests.web.app")
    app.config["SECRET_KEY"] = KEY
    return app


def principal_app() -> Flask:
    app = loader_app()
    Principal(app)
    return app


@pytest.mark.parametrize(
    ("make", "who", "decorator"),
    [
        (lambda: login_app(), "Flask-Login", "@login_required"),
        (lambda: jwt_app(SECRET_KEY=KEY), "Flask-JWT-Extended", "@jwt_required()"),
        (lambda: principal_app(), "Flask-Principal", "@permission.require(401)"),
        (lambda: loader_app(), "principal_loader", "the decorator that signs callers in"),
    ],
    ids=("login", "jwt", "principal", "loader"),
)
def test_a_caller_that_has_not_signed_in_is_no_error_of_the_application(
    make: Callable[[], Flask], who: str, decorator: str, warned: Callable[[], list[tuple[str, str]]]
) -> None:
    """
    A session ends, and the form is sent. The application has all that it needs: its decorator must only come first.
    """
    world = shop(app=make())
    if who == "principal_loader":
        world.idempotency.principal_loader(lambda: None)

    told = [refused(world.post(headers=session_cookie(world.app, cart=1))) for _ in range(3)]

    assert [(403, "principal-required")] * 3 == told
    [(level, message)] = warned()
    assert "WARNING" == level
    assert who in message
    first = message.partition(who)[2].partition(". ")[2]
    assert first.startswith(f"Put @claim_here below {decorator}")
    assert 'g.get("user")' not in message
    assert "Register @idempotency.principal_loader" not in message


def test_the_decorators_that_the_refusal_shows_send_the_client_to_the_login_page() -> None:
    """
    In debug mode. As they are pasted: what signs the caller in stands above, so it answers before the key is looked at.
    """
    app = login_app()
    app.login_manager.login_view = "login"  # type: ignore[attr-defined]
    world = shop(app=app)
    app.get("/login", endpoint="login")(lambda: "sign in")
    app.debug = True

    detail = world.post(headers=session_cookie(app, cart=1)).json["detail"]  # type: ignore[index]
    pasted = detail.partition("\n\n")[2]
    assert ["@app.post", "@login_required", "@claim_here", "def view"] == [
        line.partition("(")[0] for line in pasted.split("\n")
    ]
    later = login_app()
    later.login_manager.login_view = "login"  # type: ignore[attr-defined]
    corrected = new_world(later, principal=None)
    later.get("/login", endpoint="login")(lambda: "sign in")
    exec(compile(pasted, "pasted", "exec"), {"app": later, "login_required": login_required, "claim_here": claim_here})  # noqa: S102 - our own text
    rule = next(rule.rule for rule in later.url_map.iter_rules() if "POST" in (rule.methods or ()))

    answer = corrected.post(rule, headers=session_cookie(later, cart=1))
    assert (302, True) == (answer.status_code, answer.headers["Location"].startswith("/login"))


def test_the_remedy_fits_a_view_that_already_claims_below_its_decorators(
    warned: Callable[[], list[tuple[str, str]]],
) -> None:
    """They have let the client pass: the page is public, and its visitors need an id."""
    world = new_world(login_app(), principal=None)
    world.view()(claim_here(lambda: "paid"))

    assert 403 == world.post(headers=session_cookie(world.app, cart=1)).status_code
    [(level, message)] = warned()
    assert "WARNING" == level
    assert "Put @claim_here" not in message
    assert "IDEMPOTENCY_ALLOW_ANONYMOUS" in message
    assert "visitor" in message


# Flask-JWT-Extended


def jwt_app(**config: Any) -> Flask:
    app = Flask("tests.web.app")
    app.config.update({"JWT_SECRET_KEY": KEY, **config})
    JWTManager(app)
    return app


def token(
    app: Flask, subject: str, *, make: Callable[..., str] = create_access_token, **options: Any
) -> dict[str, str]:
    with app.test_request_context():
        return {"Authorization": f"Bearer {make(subject, **options)}"}


def test_a_jwt_names_its_subject_and_another_token_of_it_replays() -> None:
    """Tokens rotate: a retry carries another one than the first attempt."""
    world = shop(app=jwt_app())
    first, again = token(world.app, "7", fresh=True), token(world.app, "7")
    assert first != again

    assert {"whose": "jwt:7"} == world.post(headers=first).json
    assert is_replay(world.post(headers=again))
    assert is_replay(world.post(headers=token(world.app, "7", make=create_refresh_token)))
    assert {"whose": "jwt:8"} == world.post(headers=token(world.app, "8")).json


def test_a_jwt_that_is_not_valid_is_never_anonymous() -> None:
    """
    The application's own error handler answers, as it does without a key. ALLOW_ANONYMOUS does not let it in either.
    """
    for what, allow in product(("expired", "garbled", "revoked", "forged"), (None, True)):
        app = jwt_app()
        app.extensions["flask-jwt-extended"].token_in_blocklist_loader(
            lambda header, claims: claims["sub"] == "revoked"
        )
        headers = {
            "expired": token(app, "7", expires_delta=timedelta(seconds=-1)),
            "garbled": {"Authorization": "Bearer x.y.z"},
            "revoked": token(app, "revoked"),
            "forged": token(jwt_app(JWT_SECRET_KEY="another" + KEY), "7"),
        }[what]
        app.config["JWT_SECRET_KEY"] = KEY
        world = shop(app=app) if allow is None else shop(app=app, allow_anonymous=allow)
        app.get("/mine")(jwt_required()(lambda: "mine"))

        theirs = world.client().get("/mine", headers=headers)
        ours = world.post(headers=headers)

        assert (theirs.status_code, theirs.json) == (ours.status_code, ours.json), (what, allow)
        assert ours.status_code in (401, 422), (what, allow)
        assert not world.runs, (what, allow)


def test_another_kind_of_authorization_is_no_jwt_and_no_caller() -> None:
    world = shop(app=jwt_app())

    assert (403, "principal-required") == refused(world.post(headers={"Authorization": "Basic YTpi"}))


def test_a_jwt_in_a_cookie_needs_its_csrf_token() -> None:
    """As in the view: a forged form must not be answered in its victim's name."""
    app = jwt_app(JWT_TOKEN_LOCATION=["cookies"], JWT_COOKIE_SECURE=False)
    world = shop(app=app)

    @app.get("/login")
    def login() -> Response:
        response = jsonify()
        set_access_cookies(response, create_access_token("7"))
        return response

    client = app.test_client()
    client.get("/login")
    csrf = cast(Any, client.get_cookie("csrf_access_token")).value

    without = client.post("/", headers={"Idempotency-Key": "k"})
    with_it = client.post("/", headers={"Idempotency-Key": "k", "X-CSRF-TOKEN": csrf})

    assert (401, 201) == (without.status_code, with_it.status_code)
    assert ["jwt:7"] == world.runs


def test_json_that_can_hold_no_token_holds_none() -> None:
    """Flask-JWT-Extended takes every JSON body for an object: a view that asks for no token got 500."""
    for locations, body in product((["headers", "json"], ["json"]), ([1], "text", 7)):
        app = jwt_app(JWT_TOKEN_LOCATION=locations)
        world = shop(app=app)

        assert {"whose": None} == world.post(json=body).json, (locations, body)
        if "headers" in locations:
            assert {"whose": "jwt:7"} == world.post(key="2", json=body, headers=token(app, "7")).json, (locations, body)


def test_a_view_that_asks_for_no_token_finds_none_that_we_have_looked_at() -> None:
    """A forgotten @jwt_required fails as loudly as it does without a key."""
    world = shop(app=jwt_app())

    @world.view("/forgotten")
    def forgotten() -> str:
        with pytest.raises(RuntimeError):
            get_jwt_identity()
        return "nothing there"

    assert 200 == world.post("/forgotten", headers=token(world.app, "7")).status_code


@pytest.mark.parametrize("deferred", (False, True))
def test_the_views_own_rules_for_tokens_stay_in_force(deferred: bool) -> None:
    """A claim at the hook replays no more than the view's decorator lets in, if @claim_here stands below that."""
    world = shop(app=jwt_app(JWT_TOKEN_LOCATION=["headers"]))

    def change() -> dict[str, Any]:
        world.runs.append(1)
        return {"whose": current_claim.principal, "seen": get_jwt_identity()}

    world.view("/q")(jwt_required(locations="query_string")(claim_here(change) if deferred else change))
    bearer = token(world.app, "7")["Authorization"].partition(" ")[2]

    answer = world.post(f"/q?jwt={bearer}")

    assert {"whose": "jwt:7" if deferred else None, "seen": "7"} == answer.json


def test_a_request_within_another_one_is_named_by_its_own_token() -> None:
    """Both share `g`, where the view around it has left its caller."""
    world = shop(app=jwt_app())
    outer, inner = token(world.app, "7"), token(world.app, "8")

    def batch() -> Any:
        answer = world.post(headers=inner)
        assert "7" == get_jwt_identity()
        return answer.json

    world.app.post("/batch")(jwt_required()(batch))
    assert {"whose": "jwt:8"} == world.client().post("/batch", headers=outer).json


def test_a_hook_of_the_application_may_look_for_tokens_elsewhere() -> None:
    """What it has verified counts, if the configured places have none."""
    app = jwt_app(JWT_TOKEN_LOCATION=["headers"])
    app.before_request(jwt_required(locations=["query_string"])(lambda: None))
    bearer = token(app, "7")["Authorization"].partition(" ")[2]

    assert {"whose": "jwt:7"} == shop(app=app).post(f"/?jwt={bearer}").json


# Flask-HTTPAuth


def basic(name: str) -> dict[str, str]:
    return {"Authorization": "Basic " + b64encode(f"{name}:{name}".encode()).decode()}


def http_shop(auth: Any, **options: Any) -> World:
    world = new_world(principal=None, **options)

    def pay() -> tuple[dict[str, Any], int]:
        world.runs.append(1)
        return {"whose": current_claim.principal}, 201

    world.view()(auth.login_required(claim_here(pay)))
    return world


@pytest.mark.parametrize(
    "verified",
    (lambda name: True, lambda name: name, lambda name: User(name), lambda name: Row(name)),
    ids=("True", "a name", "get_id()", "an id"),
)
def test_flask_httpauth_names_the_caller_below_its_decorator(verified: Callable[[str], Any]) -> None:
    """By what `verify_password` returns: True, a name, or a user with an id."""
    auth = HTTPBasicAuth()
    auth.verify_password(lambda name, password: verified(name) if name and name == password else None)
    world = http_shop(auth)

    assert {"whose": "httpauth:alice"} == world.post(headers=basic("alice")).json
    assert {"whose": "httpauth:bob"} == world.post(headers=basic("bob")).json
    assert is_replay(world.post(headers=basic("alice")))
    assert 401 == world.post().status_code


class Row:
    def __init__(self, name: str) -> None:
        self.id = name


def test_flask_httpauth_above_a_claim_at_the_hook_is_refused_with_the_remedy(errors: Callable[[], list[str]]) -> None:
    """The decorator runs later than hooks do. A hook of the application that runs it is as good as @claim_here."""
    auth = HTTPBasicAuth()
    auth.verify_password(lambda name, password: name)
    world = new_world(principal=None)
    world.view()(auth.login_required(lambda: ("paid", 201)))

    assert (500, "principal-required") == refused(world.post(headers=basic("alice")))
    assert "@claim_here" in errors()[0]

    hooked = shop(app=Flask("hooked"))
    hooked.app.before_request(auth.login_required(lambda: None))
    assert {"whose": "httpauth:alice"} == hooked.post(headers=basic("alice")).json


def test_a_token_is_never_a_name() -> None:
    """A callback that returns the token which it was given: the retry with the next token would run again."""
    bearers, keys = HTTPTokenAuth(), HTTPTokenAuth(header="X-API-Key")
    bearers.verify_token(lambda token: token)
    keys.verify_token(lambda token: token)
    world = http_shop(MultiAuth(bearers, keys))

    assert [500, 500] == [world.post(headers=sent).status_code for sent in (BEARER, {"X-API-Key": "x"})]
    assert not world.runs


def test_an_optional_login_without_a_user_is_refused_with_credentials_only() -> None:
    auth = HTTPBasicAuth()
    auth.verify_password(lambda name, password: None)
    world = new_world(principal=None)
    world.view()(auth.login_required(optional=True)(claim_here(lambda: ("paid", 201))))

    assert (403, "principal-required") == refused(world.post(headers=basic("alice")))
    assert 201 == world.post().status_code


# Flask-Principal


def test_flask_principal_names_the_identity() -> None:
    """Its hook has run before ours."""
    app = Flask("tests.web.app")
    principals = Principal(app, use_sessions=False)
    principals.identity_loader(
        lambda: Identity(int(request.headers["X-API-Key"])) if "X-API-Key" in request.headers else None
    )
    world = shop(app=app)

    assert {"whose": "identity:7"} == world.post(headers={"X-API-Key": "7"}).json
    assert (403, "principal-required") == refused(world.post(headers=BEARER))
    assert {"whose": None} == world.post().json


# Several at once


def test_what_came_with_the_request_itself_goes_before_a_session_that_happens_to_be_there() -> None:
    """The cookie may be gone at the retry; the token is there, because the view asks for it."""
    app = login_app()
    app.config["JWT_SECRET_KEY"] = KEY
    JWTManager(app)
    world = shop(app=app)
    bearer, cookie = token(app, "7"), signed_in(app, "7")

    assert {"whose": "jwt:7"} == world.post(headers=bearer | cookie).json
    assert is_replay(world.post(headers=bearer))
    assert {"whose": "7"} == world.post(headers=cookie).json
    assert {"whose": "7"} == world.post(key="2", headers={"Authorization": "Bearer x"} | cookie).json


@pytest.mark.parametrize("what", ("expired", "revoked"))
def test_a_token_that_was_valid_at_the_first_attempt_never_gives_way_to_the_session(what: str) -> None:
    """The retry would have another name, and run again. With a new token it is answered."""
    app = login_app()
    app.config["JWT_SECRET_KEY"] = KEY
    revoked: list[str] = []
    JWTManager(app).token_in_blocklist_loader(lambda header, claims: claims["jti"] in revoked)
    world = shop(app=app)
    bearer, cookie = token(app, "7"), signed_in(app, "7")
    late = token(app, "7", expires_delta=timedelta(seconds=-1)) if what == "expired" else bearer

    assert 201 == world.post(headers=bearer | cookie).status_code
    with app.test_request_context(headers=bearer):
        revoked.extend([cast(str, get_jti(bearer["Authorization"].partition(" ")[2]))])

    assert 401 == world.post(headers=late | cookie).status_code
    assert is_replay(world.post(headers=token(app, "7") | cookie))
    assert ["jwt:7"] == world.runs


def test_a_valid_refresh_token_names_the_caller_whose_access_token_has_expired() -> None:
    """Both are in cookies, and the session beside them."""
    app = login_app()
    app.config.update(
        JWT_SECRET_KEY=KEY, JWT_TOKEN_LOCATION=["cookies"], JWT_COOKIE_SECURE=False, JWT_COOKIE_CSRF_PROTECT=False
    )
    JWTManager(app)
    world = shop(app=app)
    with app.test_request_context():
        access = create_access_token("7", expires_delta=timedelta(seconds=-1))
        refresh = create_refresh_token("7")
    session_of_it = signed_in(app, "7")["Cookie"]

    def post(*cookies: str) -> Any:
        return world.post(headers={"Cookie": "; ".join((session_of_it, *cookies))})

    assert 401 == post(f"access_token_cookie={access}").status_code
    both = post(f"access_token_cookie={access}", f"refresh_token_cookie={refresh}")
    assert {"whose": "jwt:7"} == both.json


def test_no_id_of_one_extension_is_taken_for_that_of_another() -> None:
    """A user may sign up under the name `jwt:7`."""
    app = login_app()
    app.config["JWT_SECRET_KEY"] = KEY
    JWTManager(app)
    world = shop(app=app)

    names = [
        world.post(headers=headers).json["whose"]  # type: ignore[index]
        for headers in (token(app, "7"), *(signed_in(app, name) for name in ("7", "jwt:7", "login:jwt:7")))
    ]

    assert 4 == len(set(names)) == len(world.runs)


def test_the_documentation_lists_every_credential() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "identity.md").read_text(encoding="utf-8")

    assert [] == [name for name in (*TOKENS, *ASSERTED, *CERTIFICATES) if name != "Cookie" and f"`{name}`" not in page]
