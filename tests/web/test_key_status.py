"""`key_status`: a client asks what became of its key, and never gets `absent` for a key that was used."""

from __future__ import annotations

import logging
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, cast
from urllib.parse import unquote

import pytest
from flask import Blueprint, Flask, Response, g, make_response, request
from flask_httpauth import HTTPTokenAuth  # type: ignore[import-untyped]
from flask_jwt_extended import JWTManager, create_access_token, jwt_required
from flask_login import LoginManager, UserMixin  # type: ignore[import-untyped]
from werkzeug.test import TestResponse

from example_app.demo.servers import RedisServer
from flask_idempotency import Idempotency, claim_here, exempt, idempotent, key_status, webhook
from flask_idempotency.assembly import identities
from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord
from flask_idempotency.engine.keys import Scope, new_token
from flask_idempotency.engine.model import CORRUPT, ClaimRequest, RequestInfo
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.testing import FaultyStore, FrozenClock
from tests.apps import KEY, FaultyMemory, World, new_world
from tests.backends import BACKENDS
from tests.sql_backends import maria_database, sql_databases, sql_stores
from tests.stages import CORE

__all__ = ["maria_database", "sql_databases", "sql_stores"]

PAY = {"method": "POST", "path": "/payments"}
WRITES = {"claim", "renew", "mark_point_of_no_return", "complete", "release", "quarantine", "mark_corrupt"}


def shop(
    app: Flask | None = None, *, effects: str = "plain", store: FaultyStore | None = None, **settings: Any
) -> World:
    """A shop that takes payments at /payments, with a status view for its callers."""
    world = new_world(
        app,
        status_url="/idempotency/status",
        effects=effects,
        store=cast("FaultyMemory | None", store),
        **settings,
    )

    @world.view("/payments")
    def pay() -> Any:
        world.runs.append(request.get_data(as_text=True))
        if "X-Fail" in request.headers:
            raise RuntimeError("the provider timed out")
        return {"paid": True}, int(request.headers.get("X-Status", 201))

    return world


def ask(
    world: World, key: str | None = "k", *, url: str = "/idempotency/status", asked: Any = None, **headers: str
) -> TestResponse:
    """Ask for the status of a key."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        names.setdefault(KEY, key)
    return world.client(use_cookies=False).get(url, query_string=PAY if asked is None else asked, headers=names)


def state(response: TestResponse) -> Any:
    """The state that a response tells, or the code of its problem."""
    document = response.get_json()
    return document.get("state", document.get("code"))


def hold(world: World, key: str = "k", *, lease: float = 30.0, endpoint: str = "pay", **scope: Any) -> bytes:
    """Claim the key as a worker of this view would that then says nothing more. Return its token."""
    settings = world.app.extensions["idempotency"].settings
    named = {"principal": "alice", "tenant": None, "operation": None, **scope}
    storage_key = identities(settings)[0].storage_key(Scope(settings.namespace, **named), key)
    policy = world.app.extensions["idempotency"].policies.look(endpoint, "POST").policy
    info = RequestInfo("", "alice", "POST", endpoint)
    token = new_token(storage_key.mark)
    asked = ClaimRequest(storage_key, bytes(17), policy.on_expiry, info)
    world.store.claim(asked, token=token, lease=lease)
    return token


# Each state, on every kind of store.


@pytest.fixture(params=CORE)
def on_store(request: pytest.FixtureRequest) -> Iterator[Callable[..., World]]:
    with ExitStack() as ends:
        make = BACKENDS[request.param](request, ends)

        def build(**settings: Any) -> World:
            clock = FrozenClock(float(int(time.time())))
            # SQL stores are shared by all tests: the keys of each test are its own.
            store: Any = FaultyStore(make(clock))
            store.recovery = store._store.recovery
            world = shop(store=store, secret=(secrets.token_hex(16),), **settings)
            world.clock = clock
            return world

        yield build


def absent(world: World) -> None: ...


def in_flight(world: World) -> None:
    hold(world)
    world.clock.advance(10)


def lapsed(world: World) -> None:
    hold(world)
    world.clock.advance(31)


def quarantined(world: World) -> None:
    assert 500 == world.post("/payments", headers={"X-Fail": "yes"}).status_code


def released(world: World) -> None:
    assert 503 == world.post("/payments", headers={"X-Status": "503"}).status_code


def done(world: World) -> None:
    assert 201 == world.post("/payments").status_code


def expired(world: World) -> None:
    done(world)
    world.clock.advance(86_400 * 2)


def test_each_state_is_told_without_a_write(on_store: Callable[..., World]) -> None:
    for happens, effects, expected in (
        (absent, "plain", {"state": "absent"}),
        (in_flight, "plain", {"state": "in-flight", "attempt": 1, "seconds_left": 20}),
        (lapsed, "marked", {"state": "paused", "attempt": 1}),
        (lapsed, "plain", {"state": "outcome-unknown", "attempt": 1}),
        (quarantined, "plain", {"state": "outcome-unknown", "attempt": 1}),
        (released, "plain", {"state": "absent"}),
        (done, "plain", {"state": "done", "attempt": 1, "status": 201, "seconds_left": 86_400}),
        (expired, "plain", {"state": "absent"}),
    ):
        world = on_store(effects=effects)
        begun = world.clock.now
        happens(world)
        world.store.calls.clear()
        response = ask(world)

        told = dict(response.get_json())
        since = told.pop("since", None)
        assert (200, "application/json", "no-store") == (
            response.status_code,
            response.content_type,
            response.headers["Cache-Control"],
        ), (happens, effects, expected)
        assert expected == told, (happens, effects, expected)
        assert {"read"} == set(world.store.verbs()), (happens, effects, expected)
        assert ("5" if expected["state"] == "in-flight" else None) == response.headers.get("Retry-After"), (
            happens,
            effects,
            expected,
        )
        if expected["state"] == "absent":
            assert since is None, (happens, effects, expected)
        else:
            assert abs(datetime.fromisoformat(since).timestamp() - begun) <= 1


def test_a_lease_that_is_nearly_over_says_so() -> None:
    world = shop()
    hold(world, lease=2.5)
    response = ask(world)

    assert (3, "3") == (response.get_json()["seconds_left"], response.headers["Retry-After"])


def test_nothing_of_the_response_is_shown() -> None:
    world = shop()
    world.view("/secrets", endpoint="secret")(
        lambda: make_response("card 4242", 402, {"Location": "/cards/4242", "ETag": '"4242"'})
    )
    world.post("/secrets")
    response = ask(world, asked={"method": "POST", "path": "/secrets"})

    assert (200, 402) == (response.status_code, response.get_json()["status"])
    assert "4242" not in response.text + str(response.headers)


# What a client must name.


def test_an_operation_that_takes_no_keys_is_no_absent_key() -> None:
    for asked in (
        {},
        {"method": "POST"},
        {"path": "/payments"},
        {"method": "", "path": ""},
        {"method": "POST", "path": ""},
        {"method": "POST", "path": "payments"},
        {"method": "POST", "path": "/payment"},
        {"method": "POST", "path": "/PAYMENTS"},
        {"method": "POST", "path": "/payments/"},
        {"method": "POST", "path": "http://localhost/payments"},
        {"method": "GET", "path": "/payments"},
        {"method": "DELETE", "path": "/payments"},
        {"method": "OPTIONS", "path": "/payments"},
        {"method": "GET", "path": "/idempotency/status"},
        {"method": "POST", "path": "/login"},
        "method=POST&path=/payments&path=/login",
        "method=POST&method=GET&path=/payments",
        "method=POST&path=%2Fpayments%00",
        "method=%FF&path=%FF",
    ):
        world = shop()
        world.view("/login")(exempt(lambda: "welcome"))
        world.store.calls.clear()
        response = ask(world, asked=asked)

        assert (400, "unknown-operation") == (response.status_code, state(response)), asked
        assert "application/problem+json" == response.content_type, asked
        assert "no-store" == response.headers["Cache-Control"], asked
        assert [] == world.store.calls, asked


@pytest.mark.parametrize("key", ("/id", "Idempotency-Key", lambda request: request.json["id"]))
def test_the_event_of_a_webhook_is_no_absent_key(key: Any) -> None:
    """It was handled, under the name of its provider. Whoever hears `absent` sends it again."""
    world = shop()
    world.view("/stripe")(webhook("stripe", key=key)(lambda: "ok"))
    asked = {"method": "POST", "path": "/stripe"}
    before = ask(world, "evt_1", asked=asked)
    assert 200 == world.post("/stripe", key="evt_1", json={"id": "evt_1"}).status_code
    world.store.calls.clear()

    for response in (before, ask(world, "evt_1", asked=asked), ask(world, None, asked=asked)):
        assert (400, "unknown-operation") == (response.status_code, state(response))
    assert [] == world.store.calls


@pytest.mark.parametrize("mode", ("observe", "warn"))
def test_a_key_of_an_endpoint_that_is_only_observed_is_not_absent(mode: str) -> None:
    """Its request ran, and no record of it is kept."""
    world = shop(mode=mode)
    assert 201 == world.post("/payments").status_code

    assert "unknown-operation" == state(ask(world))


def test_a_message_has_no_status_for_clients() -> None:
    world = shop()
    with world.app.app_context():
        world.idempotency.inbox("billing").process("k", lambda: None)

    for path in ("inbox:billing", "/inbox:billing"):
        for method in ("message", "POST", "GET"):
            assert "unknown-operation" == state(ask(world, asked={"method": method, "path": path}))


@pytest.mark.parametrize("asked", ("method=post&path=/payments", "method=POST&path=%2Fpayments%3Fa=1"))
def test_a_method_in_small_letters_and_a_query_do_no_harm(asked: str) -> None:
    world = shop()
    done(world)

    assert "done" == state(ask(world, asked=asked))


def test_path_is_required_with_a_key_space_for_each_operation() -> None:
    """Case 63, B28: asked without it, a key that was used would be `absent`."""
    world = shop(scope="operation")
    world.view("/refunds")(lambda: "refunded")
    done(world)

    assert 400 == ask(world, asked={"method": "POST"}).status_code
    assert "done" == state(ask(world))
    assert "absent" == state(ask(world, asked={"method": "POST", "path": "/refunds"}))


ROUTES = (
    ("/accounts/<int:account>/payments", "/accounts/7/payments", "/accounts/seven/payments"),
    ("/files/<path:name>", "/files/a/b%20c", "/files/"),
    ("/people/<name>", "/people/J%C3%BCrgen", "/people/a/b"),
    ("/coupons/<name>", "/coupons/50%25", "/coupons"),
    ("/orders/", "/orders/", "/order"),
)


@pytest.mark.parametrize("root", ("", "/api", "/a%20p%C3%AF"))
@pytest.mark.parametrize(("rule", "path", "other"), ROUTES)
def test_the_path_is_that_of_the_url(root: str, rule: str, path: str, other: str) -> None:
    """Mounted anywhere, with converters, and in whatever way the client has encoded it."""
    world = shop(scope="operation")
    world.view(rule, endpoint="it")(lambda **_: "done")
    base = f"http://localhost{root}"
    world.client().post(path, base_url=base, headers={KEY: "k"})

    def told(named: str) -> Any:
        return state(
            world.client().get(
                "/idempotency/status",
                base_url=base,
                query_string={"method": "POST", "path": named},
                headers={KEY: "k"},
            )
        )

    assert ["done", "done"] == [told(root + path), told(unquote(root + path))]
    assert "unknown-operation" == told(root + other)
    if root:
        other_mount = "/" + "x" * (len(unquote(root)) - 1)
        assert ["unknown-operation"] * 3 == [told(path), told(root + "x" + path), told(other_mount + path)]


def test_a_redirect_leads_where_the_client_would_send_its_key_again() -> None:
    world = shop(scope="operation")
    world.view("/orders/", endpoint="order")(lambda: "done")
    world.view("/old", endpoint="old", redirect_to="/orders/")(lambda: "done")
    world.view("/away", endpoint="away", redirect_to="http://other.example/orders/")(lambda: "done")
    world.view("/round", endpoint="round", redirect_to="/round")(lambda: "done")
    world.post("/orders/")

    told = {
        path: state(ask(world, asked={"method": "POST", "path": path})) for path in ("/orders", "//orders/", "/old")
    }
    assert {"done"} == set(told.values())
    assert "unknown-operation" == state(ask(world, asked={"method": "POST", "path": "/away"}))
    assert "unknown-operation" == state(ask(world, asked={"method": "POST", "path": "/round"}))


@pytest.mark.parametrize("matching", ("host", "subdomain"))
def test_the_host_chooses_the_operation(matching: str) -> None:
    hosts = matching == "host"
    app = Flask("tests.web.app", host_matching=hosts, static_host="static.test" if hosts else None)
    app.subdomain_matching = not hosts
    where: Any = (lambda name: {"host": f"{name}.test"}) if hosts else (lambda name: {"subdomain": name})
    new_world(app, config={"SERVER_NAME": None if hosts else "test"}, status_url="/status", scope="operation")
    for name in ("eu", "us"):
        app.add_url_rule("/pay", f"pay_{name}", lambda: "paid", methods=["POST"], **where(name))
    app.add_url_rule("/only", "only", lambda: "paid", methods=["POST"], **where("us"))
    client = app.test_client()
    assert 200 == client.post("/pay", base_url="http://eu.test", headers={KEY: "k"}).status_code

    def told(host: str, path: str = "/pay") -> Any:
        asked = {"method": "POST", "path": path}
        return state(client.get("/status", base_url=f"http://{host}.test", query_string=asked, headers={KEY: "k"}))

    assert ["done", "absent"] == [told("eu"), told("us")]
    assert ["unknown-operation", "absent"] == [told("eu", "/only"), told("us", "/only")]


# The key, in the header and grammar of the operation.


@pytest.mark.parametrize(
    ("key", "code"),
    (
        (None, "missing-key"),
        ("", "invalid-key"),
        ("a,b", "invalid-key"),
        ("k" * 256, "invalid-key"),
        ("ü", "invalid-key"),
    ),
)
def test_a_bad_key_is_a_problem(key: str | None, code: str) -> None:
    response = ask(shop(), key)

    assert (400, code) == (response.status_code, state(response))


def test_the_operation_decides_about_header_grammar_and_dialect() -> None:
    world = shop()
    world.view("/x", endpoint="x")(idempotent(profile="x-idempotency", key_format="uuid")(lambda: "done"))
    world.view("/stripe", endpoint="stripe")(
        idempotent(profile="stripe", header=["Stripe-Key", "Alias"])(lambda: "done")
    )
    key = "f9d6fcd6-3f6c-4d53-9d1c-8a3a0e2f5a11"
    world.post("/x", key=None, headers={"X-Idempotency-Key": key})
    world.post("/stripe", key=None, headers={"Alias": "s"})
    x, stripe = ({"method": "POST", "path": path} for path in ("/x", "/stripe"))

    assert "missing-key" == state(ask(world, key, asked=x))
    assert "done" == state(ask(world, None, asked=x, X_Idempotency_Key=f'"{key}"'))
    assert "invalid-key" == state(ask(world, None, asked=x, X_Idempotency_Key="k"))
    assert "done" == state(ask(world, None, asked=stripe, Alias="s"))
    assert "missing_key" == ask(world, "s", asked=stripe).get_json()["error"]["code"]


def test_a_form_on_the_status_request_is_not_read() -> None:
    world = shop(form_field="idempotency_key")
    response = world.client().get("/idempotency/status", query_string=PAY, data={"idempotency_key": "k"})

    assert "missing-key" == state(response)


# The caller.


def test_the_key_of_another_principal_is_absent() -> None:
    world = shop()
    done(world)

    assert "done" == state(ask(world))
    assert "absent" == state(ask(world, X_User="mallory"))


def test_the_key_of_another_tenant_is_absent() -> None:
    world = new_world(status_url="/idempotency/status", tenant=lambda: request.headers.get("X-Tenant"))
    world.view("/payments")(lambda: "paid")
    world.post("/payments", headers={"X-Tenant": "acme"})

    assert ["done", "absent"] == [state(ask(world, X_Tenant=each)) for each in ("acme", "evil")]
    unnamed = ask(world)
    assert (403, "principal-required") == (unnamed.status_code, state(unnamed))
    assert "tenant_loader finds no tenant" in unnamed.get_json()["detail"]


@pytest.mark.parametrize("loader", (lambda: None, None), ids=("a loader that finds nobody", "no loader"))
@pytest.mark.parametrize("header", ({"Authorization": "Bearer t"}, {"Cookie": "session=1"}, {"X-API-Key": "t"}))
def test_credentials_without_a_principal_are_never_absent(loader: Any, header: dict[str, str]) -> None:
    """Case 63, B28: a blueprint's hook signs callers in, and the status view is not on that blueprint."""
    world = shop(principal=loader)
    world.store.calls.clear()
    response = ask(world, **header)

    assert (403, "principal-required") == (response.status_code, state(response))
    assert [] == world.store.calls


def test_callers_without_a_name_may_be_refused_altogether() -> None:
    world = shop(principal=lambda: None, allow_anonymous=False)

    assert (403, "principal-required") == (ask(world).status_code, state(ask(world)))


def test_anonymous_callers_share_their_key_space_as_with_the_operation() -> None:
    world = shop(principal=lambda: None)
    done(world)

    assert "done" == state(ask(world))


def test_the_view_stands_where_callers_are_signed_in() -> None:
    """On the blueprint whose hook signs them in, and below a decorator that does."""
    world = new_world(Flask("tests.web.app"), principal=lambda: g.get("user"), status_url="/status")
    api, mine = Blueprint("api", "api", url_prefix="/api"), Blueprint("mine", "mine", url_prefix="/mine")

    @api.before_request
    def sign_in() -> None:
        g.user = request.headers["Authorization"].removeprefix("Bearer ")

    def signed_in(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def inner(**arguments: Any) -> Any:
            g.user = request.headers["Authorization"].removeprefix("Bearer ")
            return view(**arguments)

        return inner

    api.post("/pay")(lambda: "paid")
    api.get("/status")(key_status)
    mine.post("/pay", endpoint="pay")(signed_in(claim_here(lambda: "paid")))
    mine.get("/status", endpoint="of_keys")(signed_in(key_status))
    for blueprint in (api, mine):
        world.app.register_blueprint(blueprint)
    alice = {"Authorization": "Bearer alice"}
    for path in ("/api/pay", "/mine/pay"):
        assert 200 == world.post(path, key=path, headers=alice).status_code

        asked = {"method": "POST", "path": path}
        near = path.replace("pay", "status")
        assert "principal-required" == state(ask(world, path, url="/status", asked=asked, **alice))
        assert "done" == state(ask(world, path, url=near, asked=asked, **alice))
        assert "absent" == state(ask(world, path, url=near, asked=asked, Authorization="Bearer mallory"))


@pytest.mark.parametrize("named", ("by a hook", "by a preprocessor", "by a decorator", "by nothing"))
def test_a_nameless_caller_is_told_of_no_absence_where_the_operation_may_name_it(named: str) -> None:
    """B28 with a token that is no credential as far as we know: the key is used, under a name that nothing gives here."""
    world = new_world(Flask("tests.web.app"), principal=lambda: g.get("user"), status_url="/status")
    api = Blueprint("api", "api", url_prefix="/api")

    def sign_in(*_: Any) -> None:
        g.user = request.headers.get("X-My-Own", "nobody")

    def signed_in(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def inner(**arguments: Any) -> Any:
            sign_in()
            return view(**arguments)

        return inner

    if named == "by a hook":
        api.before_request(sign_in)
    elif named == "by a preprocessor":
        api.url_value_preprocessor(sign_in)
    pay = (lambda: "paid") if named != "by a decorator" else signed_in(claim_here(lambda: "paid"))
    api.post("/pay", endpoint="pay")(pay)
    api.get("/status", endpoint="of_keys")(signed_in(key_status) if named == "by a decorator" else key_status)
    world.app.register_blueprint(api)
    assert 200 == world.post("/api/pay", headers={"X-My-Own": "alice"}).status_code
    asked = {"method": "POST", "path": "/api/pay"}

    far = ask(world, url="/status", asked=asked, X_My_Own="alice")
    if named == "by nothing":
        assert "done" == state(far)
        assert "absent" == state(ask(world, "unused", url="/status", asked=asked))
        return
    assert (403, "principal-required") == (far.status_code, state(far))
    near = {key: state(ask(world, key, url="/api/status", asked=asked, X_My_Own="alice")) for key in ("k", "unused")}
    assert {"k": "done", "unused": "absent"} == near


def test_a_token_of_flask_jwt_extended_names_the_caller() -> None:
    world = new_world(Flask("tests.web.app"), init=False, principal=None, status_url="/status")
    world.app.config["JWT_SECRET_KEY"] = "a secret of more than thirty-two characters"
    JWTManager(world.app)
    world.idempotency.init_app(world.app)
    world.view("/payments")(lambda: "paid")
    with world.app.app_context():
        alice, evil = (f"Bearer {create_access_token(name)}" for name in ("alice", "evil"))
        expired = f"Bearer {create_access_token('alice', expires_delta=timedelta(seconds=-60))}"
    world.post("/payments", headers={"Authorization": alice})

    told = [ask(world, url="/status", Authorization=token) for token in (alice, evil, expired)]
    assert ["done", "absent"] == [state(each) for each in told[:2]]
    assert 401 == told[2].status_code


def test_a_decorator_of_flask_httpauth_names_the_caller() -> None:
    world = new_world(Flask("tests.web.app"), principal=None, status_url="/far")
    auth = HTTPTokenAuth()
    auth.verify_token(lambda token: token.partition("-")[0] or None)
    world.view("/payments")(auth.login_required(claim_here(lambda: "paid")))
    world.app.get("/status")(auth.login_required(key_status))
    alice, evil = ({"Authorization": f"Bearer {name}-{name}"} for name in ("alice", "evil"))
    assert 200 == world.post("/payments", headers=alice).status_code

    assert ["done", "absent"] == [state(ask(world, url="/status", **who)) for who in (alice, evil)]
    assert 401 == ask(world, url="/status").status_code
    assert "principal-required" == state(ask(world, url="/far", **alice))


def test_with_anonymous_callers_allowed_credentials_still_rule_out_an_absence() -> None:
    world = shop(principal=lambda: None, allow_anonymous=True)
    done(world)

    assert ["done", "principal-required"] == [state(ask(world, key, Cookie="a=b")) for key in ("k", "unused")]
    assert "absent" == state(ask(world, "unused"))


@pytest.mark.parametrize("elsewhere", (None, "default"))
def test_a_tenant_that_a_hook_of_the_operation_finds_is_not_guessed(elsewhere: str | None) -> None:
    world = new_world(status_url="/status", tenant=lambda: g.get("tenant", elsewhere))
    api = Blueprint("api", "api", url_prefix="/api")

    @api.before_request
    def find() -> None:
        g.tenant = request.headers["X-Tenant"]

    api.post("/pay", endpoint="pay")(lambda: "paid")
    api.get("/status")(key_status)
    world.app.register_blueprint(api)
    world.post("/api/pay", headers={"X-Tenant": "acme"})
    asked = {"method": "POST", "path": "/api/pay"}

    assert "principal-required" == state(ask(world, url="/status", asked=asked, X_Tenant="acme"))
    assert "done" == state(ask(world, url="/api/status", asked=asked, X_Tenant="acme"))


def test_a_tenant_in_the_url_is_asked_for_at_its_own_url() -> None:
    """Elsewhere the loader finds another tenant or none, under which the key was never used."""
    world = new_world(status_url="/status", tenant=lambda: (request.view_args or {}).get("tenant"))
    shop = Blueprint("shop", "shop", url_prefix="/<tenant>")
    shop.post("/payments")(lambda tenant: "paid")
    shop.get("/status")(key_status)
    world.app.register_blueprint(shop)
    world.post("/acme/payments")

    asked = {"method": "POST", "path": "/acme/payments"}
    assert "done" == state(ask(world, url="/acme/status", asked=asked))
    assert "absent" == state(ask(world, url="/evil/status", asked={**asked, "path": "/evil/payments"}))
    assert ["unknown-operation"] * 2 == [state(ask(world, url=url, asked=asked)) for url in ("/status", "/evil/status")]
    assert "depends on its URL" in ask(world, url="/status", asked=asked).get_json()["detail"]


def test_the_request_is_as_before_after_the_loaders() -> None:
    seen: list[Any] = []
    world = shop(principal=lambda: "alice")

    @world.app.after_request
    def look(response: Response) -> Response:
        seen.append((request.endpoint, request.view_args))
        return response

    ask(world)

    assert [("idempotency_status", {})] == seen


def test_a_replay_that_is_forbidden_tells_nothing() -> None:
    world = shop()
    asked: list[str] = []

    @world.idempotency.replay_guard
    def allowed(record: Any) -> bool:
        asked.append(record.info.principal)
        return False

    assert "absent" == state(ask(world))
    done(world)
    response = ask(world)

    assert (403, "replay-forbidden") == (response.status_code, state(response))
    assert ["alice"] == asked
    quarantined_key = world.post("/payments", key="q", headers={"X-Fail": "yes"})
    assert (500, "outcome-unknown") == (quarantined_key.status_code, state(ask(world, "q")))


def test_the_guard_of_replays_sees_the_operation() -> None:
    world = new_world(status_url="/status")
    seen: list[Any] = []
    world.view("/accounts/<int:account>/pay", endpoint="pay")(lambda account: "paid")

    @world.idempotency.replay_guard
    def allowed(record: Any) -> bool:
        seen.append((request.endpoint, request.view_args))
        return True

    world.post("/accounts/7/pay")
    asked = {"method": "POST", "path": "/accounts/7/pay"}

    assert "done" == state(ask(world, url="/status", asked=asked))
    assert [("pay", {"account": 7})] == seen


def test_an_unknown_caller_is_logged_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    world = shop(principal=lambda: None)
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        for _ in range(2):
            ask(world, "key-in-question", Authorization="Bearer token-in-question")

    (line,) = [each.getMessage() for each in caplog.records if "status of a key" in each.getMessage()]
    assert "Register key_status where these callers are authenticated" in line
    assert not re.search("key-in-question|token-in-question|alice", caplog.text)


# Names that the operation may give its caller, and this view does not.


def tenants(loader: Callable[[], Any], **settings: Any) -> World:
    """A shop with a tenant_loader, and payments with and without a tenant in the URL."""
    world = new_world(status_url="/status", tenant=loader, **settings)
    world.view("/payments")(lambda: "paid")
    world.view("/t/<name>/payments", endpoint="of_tenant")(lambda name: "paid")
    return world


@pytest.mark.parametrize("of", ("of the operation", "of the view", "of both"))
def test_a_hook_that_may_name_another_caller_rules_out_an_absence(of: str) -> None:
    """A cookie of the web site names a caller everywhere, and a hook of one blueprint the caller of its token."""
    world = new_world(Flask("tests.web.app"), principal=lambda: g.get("user"))
    api, other = Blueprint("api", "api"), Blueprint("other", "other")
    world.app.before_request(lambda: setattr(g, "user", request.cookies.get("sid")))
    for blueprint in {"of the operation": (api,), "of the view": (other,), "of both": (api, other)}[of]:
        blueprint.before_request(lambda: setattr(g, "user", f"{request.blueprint}:{request.headers['Authorization']}"))
    api.post("/payments")(lambda: "paid")
    api.get("/near")(key_status)
    other.get("/far")(key_status)
    world.app.get("/status")(key_status)
    for blueprint in (api, other):
        world.app.register_blueprint(blueprint)
    both = {"Authorization": "t", "Cookie": "sid=web"}
    assert 200 == world.client(use_cookies=False).post("/payments", headers={KEY: "k", **both}).status_code

    near = [state(ask(world, key, url="/near", **both)) for key in ("k", "unused")]
    far = ask(world, "unused", url="/far", **both)
    wide = ask(world, "unused", url="/status", **both)
    assert ["done", "absent"] == near
    assert (403, "principal-required") == (far.status_code, state(far))
    assert "Register key_status on the blueprint of the operation" in far.get_json()["detail"]
    assert ("absent" if of == "of the view" else "principal-required") == state(wide)


def test_a_hook_of_the_application_is_the_same_everywhere() -> None:
    """The ordinary application: one hook signs callers in, and one status view answers for every operation."""
    world = new_world(Flask("tests.web.app"), principal=lambda: g.get("user"), status_url="/status")
    world.app.before_request(lambda: setattr(g, "user", request.headers["Authorization"]))
    outer, inner = Blueprint("outer", "outer", url_prefix="/o"), Blueprint("inner", "inner", url_prefix="/i")
    for blueprint in (outer, inner, world.app):
        blueprint.post("/<int:account>/payments")(lambda account: "paid")
    outer.register_blueprint(inner)
    world.app.register_blueprint(outer)
    for path in ("/7/payments", "/o/7/payments", "/o/i/7/payments"):
        world.post(path, key=path, headers={"Authorization": "alice"})
        asked = {"method": "POST", "path": path}

        told = [ask(world, key, url="/status", asked=asked, Authorization="alice") for key in (path, "unused")]
        assert ["done", "absent"] == [state(each) for each in told]


@pytest.mark.parametrize(
    ("loader", "url"),
    (
        (lambda: request.args.get("account"), "/payments?account=acme"),
        (lambda: request.values.get("account"), "/payments?account=acme"),
        (lambda: request.full_path, "/payments?account=acme"),
        (lambda: request.url, "/payments"),
        (lambda: request.environ["PATH_INFO"], "/t/acme/payments"),
        (lambda: request.path.split("/")[1], "/t/acme/payments"),
        (lambda: request.path.split("/")[2] if request.path.startswith("/t/") else None, "/t/acme/payments"),
        (lambda: request.method, "/payments"),
        (lambda: request.environ["REQUEST_METHOD"], "/payments"),
        (lambda: request.endpoint, "/payments"),
    ),
)
def test_a_tenant_of_the_request_line_is_never_absent_elsewhere(loader: Callable[[], Any], url: str) -> None:
    world = tenants(loader)
    assert 200 == world.client().post(url, headers={KEY: "k"}).status_code

    for path in (url, url.partition("?")[0]):
        response = ask(world, url="/status", asked={"method": "POST", "path": path})
        assert state(response) in ("unknown-operation", "principal-required")


@pytest.mark.parametrize("key", ("k", "unused"))
def test_a_tenant_of_the_query_or_the_body_is_found_if_the_client_sends_it_here_too(key: str) -> None:
    of_query = tenants(lambda: request.args.get("account"))
    of_query.client().post("/payments?account=acme", headers={KEY: "k"})
    asked = {"method": "POST", "path": "/payments?account=acme", "account": "acme"}
    found = ask(of_query, key, url="/status", asked=asked)
    other = ask(of_query, key, url="/status", asked={**asked, "account": "evil"})

    of_body = tenants(lambda: (request.get_json(silent=True) or {}).get("account"))
    of_body.client().post("/payments", json={"account": "acme"}, headers={KEY: "k"})
    told = [
        of_body.client().get("/status", query_string=PAY, headers={KEY: key}, **body)
        for body in ({"json": {"account": "acme"}}, {})
    ]

    expected = "done" if key == "k" else "absent"
    assert [expected, expected, "principal-required"] == [state(each) for each in (found, *told)]
    assert "unknown-operation" == state(other)


def test_a_tenant_that_a_preprocessor_takes_from_the_url_is_asked_for_at_its_own() -> None:
    world = new_world(tenant=lambda: g.get("tenant"))
    api = Blueprint("api", "api", url_prefix="/<tenant>")
    api.url_value_preprocessor(lambda endpoint, values: setattr(g, "tenant", (values or {}).pop("tenant")))
    api.post("/payments")(lambda: "paid")
    api.get("/status")(key_status)
    world.app.register_blueprint(api)
    world.post("/acme/payments")
    asked = {"method": "POST", "path": "/acme/payments"}

    assert ["done", "unknown-operation"] == [
        state(ask(world, url=url, asked=asked)) for url in ("/acme/status", "/evil/status")
    ]
    assert "absent" == state(ask(world, "unused", url="/acme/status", asked=asked))


def test_the_request_has_its_own_url_again_after_the_loaders() -> None:
    world = tenants(lambda: "acme" if request.method == "GET" or (request.url and request.full_path) else "")
    seen: list[Any] = []

    @world.app.after_request
    def look(response: Response) -> Response:
        line = (request.method, request.path, request.full_path, request.url, dict(request.args))
        seen.append((*line, request.environ["PATH_INFO"], request.environ["REQUEST_METHOD"]))
        return response

    ask(world, url="/status", asked={**PAY, "path": "/payments?a=1"})
    full = "/status?method=POST&path=/payments?a%3D1"

    args = {**PAY, "path": "/payments?a=1"}
    assert [("GET", "/status", full, f"http://localhost{full}", args, "/status", "GET")] == seen


def with_login_and_tokens(**settings: Any) -> tuple[World, HTTPTokenAuth]:
    """Flask-Login names a caller by a cookie, and Flask-HTTPAuth by a token."""
    app = Flask("tests.web.app")
    manager = LoginManager(app)

    def load(sent: Any) -> Any:
        user = UserMixin()
        user.id = "web"
        return user if "sid" in sent.cookies else None

    manager.request_loader(load)
    auth = HTTPTokenAuth()
    auth.verify_token(lambda token: f"user of {token}" if token else None)
    return new_world(app, principal=None, status_url="/far", **settings), auth


def test_decorators_that_may_name_another_caller_rule_out_an_absence() -> None:
    """A cookie of Flask-Login names a caller here, and the decorator of the operation the caller of the token."""
    world, auth = with_login_and_tokens()
    world.view("/payments")(auth.login_required(claim_here(lambda: "paid")))
    world.app.get("/status")(auth.login_required(key_status))
    both = {"Authorization": "Bearer t", "Cookie": "sid=1"}
    world.client(use_cookies=False).post("/payments", headers={KEY: "k", **both})

    far = ask(world, "unused", url="/far", **both)
    assert (403, "principal-required") == (far.status_code, state(far))
    assert "Register key_status below the same decorators" in far.get_json()["detail"]
    assert ["done", "absent"] == [state(ask(world, key, url="/status", **both)) for key in ("k", "unused")]


@pytest.mark.parametrize("settings", ({}, {"allow_anonymous": True}), ids=("named", "anonymous"))
def test_decorators_of_the_view_alone_name_no_caller_of_an_earlier_claim(settings: dict[str, bool]) -> None:
    """Without @claim_here the claim was made before the decorators ran: for the cookie's caller, or for none."""
    world, auth = with_login_and_tokens(**settings)
    world.view("/payments")(auth.login_required(lambda: "paid"))
    world.app.get("/status")(auth.login_required(key_status))
    sent = world.post("/payments", headers={"Authorization": "Bearer t"})
    assert (200 if settings else 403) == sent.status_code

    told = ask(world, url="/status", Authorization="Bearer t")
    assert ("principal-required" if settings else "absent") == state(told)


def test_a_decorator_that_signs_no_caller_in_makes_no_caller_known() -> None:
    """A rate limiter above key_status. The operation names callers by a token in its query, which is no credential to us."""
    world = new_world(Flask("tests.web.app"), principal=lambda: g.get("user"))

    def signed_in(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def inner(**arguments: Any) -> Any:
            g.user = request.args["token"]
            return view(**arguments)

        return inner

    def limited(view: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(view)(lambda **arguments: view(**arguments))

    world.view("/payments")(signed_in(claim_here(lambda: "paid")))
    world.app.get("/status")(limited(key_status))
    world.client().post("/payments?token=t", headers={KEY: "k"})

    assert "principal-required" == state(ask(world, url="/status"))


def test_a_token_counts_where_the_decorator_found_it() -> None:
    """Of two tokens, the cookie comes first in the settings, and the decorator reads the header alone."""
    world = new_world(Flask("tests.web.app"), init=False, principal=None, status_url="/far")
    world.app.config.update(
        JWT_SECRET_KEY="a secret of more than thirty-two characters",
        JWT_TOKEN_LOCATION=["cookies", "headers"],
        JWT_COOKIE_CSRF_PROTECT=False,
    )
    JWTManager(world.app)
    world.idempotency.init_app(world.app)
    of_header = jwt_required(locations=["headers"])
    world.view("/payments")(of_header(claim_here(lambda: "paid")))
    world.app.get("/status")(of_header(key_status))
    with world.app.app_context():
        web, service = create_access_token("web"), create_access_token("service")
    both = {"Authorization": f"Bearer {service}", "Cookie": f"access_token_cookie={web}"}
    world.client(use_cookies=False).post("/payments", headers={KEY: "k", **both})

    told = [state(ask(world, key, url="/status", **both)) for key in ("k", "unused")]
    assert ["done", "absent"] == told
    assert "principal-required" == state(ask(world, url="/far", **both))


# Other operations.


@pytest.mark.parametrize("other", ("/refunds", "/payments"))
def test_the_key_of_another_operation_is_in_use(other: str) -> None:
    world = shop()
    world.view("/refunds")(lambda: "refunded")
    world.app.patch("/payments", endpoint="change")(lambda: "changed")
    world.client().open(other, method="POST" if other == "/refunds" else "PATCH", headers={KEY: "k", "X-User": "alice"})
    response = ask(world, X_User="alice")

    assert (422, "key-reused") == (response.status_code, state(response))
    assert "first seen" in response.get_json()["detail"]
    assert 422 == world.client().post("/payments", headers={KEY: "k", "X-User": "alice"}).status_code


def test_one_endpoint_keeps_the_keys_of_its_methods_apart() -> None:
    world = new_world(status_url="/status")
    world.app.route("/payments", methods=["POST", "PATCH"])(lambda: "paid")
    world.post("/payments")

    assert "key-reused" == state(ask(world, url="/status", asked={**PAY, "method": "PATCH"}))


def test_an_endpoint_that_was_renamed_keeps_its_keys() -> None:
    """A claim compares the path, so a retry gets the response of the earlier endpoint."""
    old = shop()
    done(old)
    world = new_world(store=old.store, status_url="/status")
    world.view("/payments", endpoint="charge")(lambda: "paid")

    assert "done" == state(ask(world, url="/status"))


# Secrets and names that change.


def test_every_secret_in_use_is_read_under() -> None:
    old = shop(secret=("old",))
    done(old)
    hold(old, "running")
    store = old.store

    world = shop(store=store, secret=("new", "old"))
    assert ["done", "in-flight", "absent"] == [state(ask(world, key)) for key in ("k", "running", "x")]
    assert "absent" == state(ask(shop(store=store, secret=("new",))))


def test_former_names_are_read_under_and_those_of_others_are_not_shown() -> None:
    old = shop(principal=None)
    done(old)
    named = Flask("tests.web.app")
    world = shop(
        named, store=old.store, principal=lambda: request.headers.get("X-User"), former_identity={"principal": False}
    )

    assert "done" == state(ask(world, X_User="alice"))


def test_what_another_caller_does_under_a_shared_former_name_shows_in_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims are made under the former name as well. That of bob is not told to alice, and not waited for either."""
    world = shop(principal=lambda: request.headers.get("X-User"), former_identity={"principal": False})
    slots: list[Any] = []
    waiters = world.app.extensions["idempotency"].engine._deps.waiters

    def full(key: Any, *_: Any, **kind: Any) -> Any:
        slots.append(key)
        return nullcontext()

    monkeypatch.setattr(waiters, "slot", full)
    asked = {"method": "POST", "path": "/slow"}
    with world.running(headers={"X-User": "bob"}):
        running = [state(ask(world, asked=asked, X_User=user, Prefer="wait=60")) for user in ("alice", "bob")]

    assert (["absent", "in-flight"], 1) == (running, len(slots))
    assert ["absent", "done"] == [state(ask(world, asked=asked, X_User=user)) for user in ("alice", "bob")]


@pytest.mark.parametrize("who", ("acme", "evil"))
def test_a_record_of_another_tenant_under_a_shared_former_name_is_absent(who: str) -> None:
    """Formerly there were no tenants. The records of this store tell whose they are."""
    tenants = lambda: request.headers.get("X-Tenant")  # noqa: E731
    first = new_world(tenant=tenants)
    first.view("/payments", endpoint="pay")(lambda: "paid")
    first.post("/payments", headers={"X-Tenant": "acme"})
    # Every tenant of today had the name of acme before.
    second = new_world(
        Flask("tests.web.app"),
        init=False,
        store=first.store,
        status_url="/idempotency/status",
        former_identity={"principal": lambda: "alice", "tenant": lambda: "acme"},
        principal=lambda: "alice of " + request.headers["X-Tenant"],
    )
    second.idempotency.tenant_loader(tenants)
    second.idempotency.init_app(second.app)
    second.view("/payments", endpoint="pay")(lambda: "paid")
    first.store.calls.clear()

    asked = state(ask(second, X_Tenant=who))
    assert not WRITES & set(first.store.verbs())
    claimed = second.post("/payments", headers={"X-Tenant": who})
    assert ("done" == asked) == ("true" == claimed.headers.get("Idempotency-Replayed"))


# Failures.


def test_a_store_that_is_away_is_no_absent_key(caplog: pytest.LogCaptureFixture) -> None:
    world = shop()
    world.store.down = True
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        response = ask(world, "key-in-question")

    assert (503, "store-unavailable", "2") == (
        response.status_code,
        state(response),
        response.headers["Retry-After"],
    )
    assert "key-in-question" not in caplog.text
    assert "status" in caplog.text


def test_a_fault_of_the_store_is_a_problem_and_the_log_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As for a request with the key: where developers look on, it is raised."""
    world = shop()

    def read(key: object) -> None:
        raise ConfigurationError("the database has no tables: run db upgrade")

    monkeypatch.setattr(world.store, "read", read)
    assert ask(world).status_code == 500
    caplog.clear()
    world.app.testing = False
    response = ask(world)

    assert (503, "store-unavailable", "2") == (response.status_code, state(response), response.headers["Retry-After"])
    (line,) = caplog.messages
    assert "The status of a key" in line
    assert "run db upgrade" in line


def test_an_endpoint_that_may_run_without_a_store_has_no_status_without_one() -> None:
    world = shop(on_store_down="allow")
    world.store.down = True

    assert 503 == ask(world).status_code


def test_a_record_that_cannot_be_read_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    world = shop()

    def read(key: object) -> None:
        raise CorruptRecord("damaged")

    monkeypatch.setattr(world.store, "read", read)

    assert (500, "record-corrupt") == (ask(world).status_code, state(ask(world)))


def test_a_response_that_could_not_be_read_is_in_quarantine() -> None:
    world = shop()
    done(world)
    record = world.record()
    assert record is not None
    assert record.payload is not None
    world.store.mark_corrupt(world.store.calls[-1].key, record.payload)

    assert "outcome-unknown" == state(ask(world))
    assert CORRUPT == getattr(world.record(), "reason", "")


def test_a_redis_that_was_emptied_calls_no_used_key_absent(redis_server: RedisServer, redis_client: Any) -> None:
    """Case 63, B29."""
    app = Flask(__name__)
    app.config.update(IDEMPOTENCY_STORE=redis_server.url, IDEMPOTENCY_SECRET="s-9f2c47d1e8b35a60c1d47be2a5583f09")
    Idempotency(app, principal=lambda: "alice", status_url="/status", after_loss="refuse")
    app.post("/payments", endpoint="pay")(lambda: ("paid", 201))
    assert 0 == app.test_cli_runner().invoke(args=["idempotency", "redis", "init"]).exit_code
    client = app.test_client()

    def told(key: str = "k") -> TestResponse:
        return client.get("/status", query_string=PAY, headers={KEY: key})

    assert "absent" == state(told())
    assert 201 == client.post("/payments", headers={KEY: "k"}).status_code
    assert "done" == state(told())
    redis_client.flushall()
    before = redis_client.dbsize()
    lost = [told("k"), told("never-used")]

    assert [(503, "memory-lost", "30")] * 2 == [
        (each.status_code, state(each), each.headers["Retry-After"]) for each in lost
    ]
    assert 0 == before == redis_client.dbsize()
    assert (503, "memory-lost") == (
        client.post("/payments", headers={KEY: "k"}).status_code,
        client.post("/payments", headers={KEY: "k"}).get_json()["code"],
    )
    closing = app.extensions["idempotency"].built.engine._deps.store
    assert isinstance(closing, RedisStore)
    closing.close()


def test_a_closed_endpoint_says_that_it_is_closed() -> None:
    world = shop()
    world.view("/closed")(idempotent(effects="transactional")(lambda: "done"))
    response = ask(world, asked={"method": "POST", "path": "/closed"})

    assert (500, "misconfigured") == (response.status_code, state(response))


# The view in the application.


def test_the_setting_is_off_by_default() -> None:
    world = new_world()

    assert "idempotency_status" not in world.app.view_functions


@pytest.mark.parametrize("url", ("status", "", "//evil.example/status", 5, True))
def test_the_setting_is_a_path(url: Any) -> None:
    with pytest.raises(ConfigurationError, match="status_url"):
        new_world(status_url=url)


@pytest.mark.parametrize("rule", ("get", "route"))
def test_the_path_of_another_view_is_a_fault(rule: str) -> None:
    app = Flask("tests.web.app")
    getattr(app, rule)("/status")(lambda: "mine")

    with pytest.raises(ConfigurationError, match=r"IDEMPOTENCY_STATUS_URL is '/status', and the view '<lambda>' has"):
        new_world(app, status_url="/status")


def test_a_view_for_another_method_at_this_path_is_none() -> None:
    app = Flask("tests.web.app")
    app.post("/status")(lambda: "mine")

    new_world(app, status_url="/status")


def test_a_view_that_takes_the_path_later_is_reported_at_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    world = new_world(Flask("tests.web.app"), status_url="/status")
    world.app.get("/status", endpoint="mine")(lambda: "mine")

    for _ in range(2):
        assert world.client().get("/status").get_json()["code"] == "unknown-operation"

    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(told) == 1
    assert "'/status', and the view 'mine' has the same path" in told[0]


def test_a_status_fixes_no_policy() -> None:
    """B30: only a request of the operation itself does."""
    world = shop()
    policies = world.app.extensions["idempotency"].policies

    assert "absent" == state(ask(world))
    assert ("pay", "POST") not in policies.resolved
    done(world)
    assert policies.resolved["pay", "POST"] is policies.look("pay", "POST")


def test_a_post_to_the_view_claims_nothing() -> None:
    world = new_world()
    world.app.add_url_rule("/status", "status", key_status, methods=["GET", "POST"])
    world.view("/payments")(lambda: "paid")
    response = world.post("/status", query_string=PAY)

    assert (200, "absent") == (response.status_code, state(response))
    assert ["read"] == world.store.verbs()


@pytest.mark.slow
def test_the_import_of_the_view_costs_other_applications_nothing() -> None:
    """The decorator @exempt would connect a receiver of request_started, for every application of the process."""
    code = "import flask_idempotency.web.key_status; from flask import request_started; assert not request_started.receivers"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_head_request_has_the_fields_and_no_body() -> None:
    world = shop()
    hold(world)
    response = world.client().head("/idempotency/status", query_string=PAY, headers={KEY: "k"})

    assert (200, b"", "5") == (response.status_code, response.data, response.headers["Retry-After"])


def test_a_switched_off_extension_says_nothing_about_keys() -> None:
    world = shop(enabled=False)

    assert (400, "unknown-operation") == (ask(world).status_code, state(ask(world)))


def test_an_application_without_the_extension_is_told_what_to_do() -> None:
    app = Flask(__name__)
    app.config["PROPAGATE_EXCEPTIONS"] = True
    app.get("/status")(key_status)

    with pytest.raises(ConfigurationError, match="init_app"):
        app.test_client().get("/status")


def test_problems_go_through_the_applications_renderer() -> None:
    world = shop()
    world.idempotency.problem_renderer(lambda problem, **_: (f"oh no: {problem.code}", problem.status))

    assert "oh no: unknown-operation" == ask(world, asked={}).text


def test_one_extension_serves_the_status_of_two_applications() -> None:
    idempotency = Idempotency(principal=lambda: "alice", status_url="/status")
    apps = []
    for name in ("one", "two"):
        app = Flask(name)
        app.config.update(TESTING=True, SECRET_KEY="s", IDEMPOTENCY_STORE=MemoryStore())
        idempotency.init_app(app)
        app.post("/payments", endpoint="pay")(lambda: "paid")
        apps.append(app.test_client())
    apps[0].post("/payments", headers={KEY: "k"})

    assert ["done", "absent"] == [state(client.get("/status", query_string=PAY, headers={KEY: "k"})) for client in apps]


# Waiting.


def test_it_waits_for_the_response_and_says_so() -> None:
    world = shop(in_flight="reject", wait=60.0)
    waiters = world.app.extensions["idempotency"].engine._deps.waiters
    taken = waiters.slot

    with world.running() as go_on:

        def take(*keys: Any, **kind: Any) -> Any:
            go_on.set()
            return taken(*keys, **kind)

        waiters.slot = take
        response = ask(world, asked={"method": "POST", "path": "/slow"}, Prefer="wait=30")

    assert ("done", "wait=30") == (state(response), response.headers["Preference-Applied"])


@pytest.mark.parametrize(
    ("prefer", "applied"),
    (
        ("wait=1", "wait=1"),
        ("wait=9999999999999999999999", "wait=2"),
        ("respond-async, wait=1", "wait=1"),
        ("wait=0", None),
        ("wait", None),
        ("respond-async", None),
    ),
)
def test_it_waits_at_most_as_long_as_the_operation_allows(
    prefer: str, applied: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = shop(wait=2.0)
    hold(world)
    now = [0.0]
    deps = world.app.extensions["idempotency"].engine._deps
    monkeypatch.setattr(type(deps), "monotonic", staticmethod(lambda: now[0]), raising=False)
    read = world.store.read

    def slowly(key: Any) -> Any:
        now[0] += 1.0
        return read(key)

    monkeypatch.setattr(world.store, "read", slowly)
    response = ask(world, Prefer=prefer)

    assert ("in-flight", applied) == (state(response), response.headers.get("Preference-Applied"))


def test_without_a_free_slot_it_answers_at_once_and_says_nothing_of_waiting() -> None:
    world = shop(max_waiters=0, wait=3600.0)
    hold(world)
    response = ask(world, Prefer="wait=3600")

    assert ("in-flight", None) == (state(response), response.headers.get("Preference-Applied"))


@pytest.mark.parametrize("prefer", ({}, {"Prefer": "wait=999"}), ids=("without", "with a preference"))
def test_clients_that_ask_leave_a_slot_for_a_duplicate(prefer: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two status requests of one caller held both slots of a key, and its duplicate got 409."""
    world = shop(in_flight="wait", wait=60.0, max_waiters=2)
    waiters = world.app.extensions["idempotency"].engine._deps.waiters
    seated = threading.Semaphore(0)
    taken, seats = waiters.slot, []

    @contextmanager
    def take(*keys: Any, **kind: Any) -> Iterator[Any]:
        with taken(*keys, **kind) as seat:
            seats.append((kind.get("status", False), seat is not None))
            seated.release()
            yield seat

    monkeypatch.setattr(waiters, "slot", take)
    found: list[Any] = []
    asked = {"method": "POST", "path": "/slow"}

    def look() -> None:
        found.append(state(ask(world, asked=asked, Prefer="wait=999")))

    def send() -> None:
        found.append(world.post("/slow", headers=prefer).status_code)

    threads = [threading.Thread(target=each) for each in (look, look, send)]
    with world.running():
        for thread in threads:
            thread.start()
            assert seated.acquire(timeout=60)
    for thread in threads:
        thread.join(60)

    assert [(True, True), (True, False), (False, True)] == seats
    assert ["200", "done", "in-flight"] == sorted(str(each) for each in found)
