"""Refusals that leave the outcome open say where to ask, and a client may shorten its wait."""

from __future__ import annotations

import http.client
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from flask import Blueprint, Flask, Response, g, request
from werkzeug.serving import make_server
from werkzeug.test import TestResponse

from flask_idempotency import key_status
from flask_idempotency.client.responses import read
from flask_idempotency.engine.errors import StoreDataLoss
from flask_idempotency.web.requests import preferred_wait
from tests.apps import KEY, World, new_world
from tests.web.sending import request_of

LINK = re.compile(r'<([^>]*)>; rel="status"')
SECONDS = 60


def link(response: TestResponse) -> str | None:
    """The status link of a response. Most clients show one line of `Link`, so it must be in the first."""
    lines = response.headers.getlist("Link")
    assert len(lines) <= 1
    found = LINK.search(lines[0]) if lines else None
    return None if found is None else found[1]


def pay() -> tuple[str, int]:
    if "X-Fail" in request.headers:
        raise RuntimeError("the provider timed out")
    return "paid", int(request.headers.get("X-Status", 201))


def shop(**settings: Any) -> World:
    world = new_world(**{"status_url": "/status", **settings})
    world.view("/payments")(pay)
    return world


def running(world: World, *, path: str = "/busy", **headers: str) -> TestResponse:
    """Send a duplicate of a request that is still running, and return its response."""
    with world.running(path, key="busy"):
        return world.post(path, key="busy", headers=headers)


def unknown(world: World) -> TestResponse:
    world.post("/payments", headers={"X-Fail": "yes"})
    return world.post("/payments", headers={"X-Fail": "yes"})


def down(world: World) -> TestResponse:
    world.store.down = True
    return world.post("/payments")


def forgotten(world: World) -> TestResponse:
    def claim(*_: Any, **__: Any) -> None:
        raise StoreDataLoss("lost", loss="changed")

    world.store.claim = claim  # type: ignore[method-assign,assignment]
    return world.post("/payments")


@pytest.mark.parametrize("renderer", (False, True), ids=("problem", "own renderer"))
@pytest.mark.parametrize(
    ("happens", "code"),
    ((running, 409), (unknown, 409), (down, 503), (forgotten, 503)),
)
def test_what_leaves_the_outcome_open_says_where_to_ask(
    happens: Callable[[World], TestResponse], code: int, renderer: bool
) -> None:
    world = shop()
    if renderer:
        world.idempotency.problem_renderer(lambda problem, **_: (problem.title, problem.status))
    response = happens(world)

    path = "/busy" if happens is running else "/payments"
    assert code == response.status_code
    assert f"/status?method=POST&path={path}" == link(response)
    assert renderer or 'rel="describedby", <' in response.headers["Link"]
    assert "Location" not in response.headers


def test_the_link_leads_to_an_answer() -> None:
    world = shop()
    response = unknown(world)
    url = link(response)
    assert url is not None

    told = world.client().get(url, headers={KEY: "k"})

    assert "outcome-unknown" == told.get_json()["state"]


def test_the_python_client_finds_the_link() -> None:
    response = unknown(shop())
    headers: Any = response.headers
    reading = read(response.status_code, headers, response.data, url="http://localhost/payments")

    assert ("outcome-unknown", "http://localhost/status?method=POST&path=/payments") == (
        reading.code,
        reading.status_url,
    )


@pytest.mark.parametrize("profile", ("stripe", "playbook", "x-idempotency"))
def test_every_dialect_has_the_link(profile: str) -> None:
    world = shop(profile=profile, on_error="quarantine", keep_statuses=[], header="Idempotency-Key")

    assert "/status?method=POST&path=/payments" == link(unknown(world))


def missing_key(world: World) -> TestResponse:
    return world.post("/payments", key="")


def reused(world: World) -> TestResponse:
    world.post("/payments")
    return world.post("/payments", data=b"other")


def first(world: World) -> TestResponse:
    return world.post("/payments")


def again(world: World) -> TestResponse:
    world.post("/payments")
    return world.post("/payments")


def own_conflict(world: World) -> TestResponse:
    return world.post("/payments", headers={"X-Status": "409"})


@pytest.mark.parametrize("happens", (missing_key, reused, first, again, own_conflict))
def test_nothing_else_has_the_link(happens: Callable[[World], TestResponse]) -> None:
    assert link(happens(shop())) is None


@pytest.mark.parametrize("happens", (unknown, down))
def test_without_a_status_view_there_is_no_link(happens: Callable[[World], TestResponse]) -> None:
    assert link(happens(shop(status_url=None))) is None


def nested(world: World, *, views: str) -> None:
    """Build `/api/v1/pay` in a nested blueprint, and a status view at each place of these."""
    app = world.app
    api, v1 = Blueprint("api", "api", url_prefix="/api"), Blueprint("v1", "v1", url_prefix="/v1")
    other = Blueprint("other", "other", url_prefix="/other")
    v1.post("/pay")(pay)
    for blueprint, name in ((other, "other"), (api, "api"), (v1, "v1")):
        if name in views:
            blueprint.get("/status")(key_status)
    app.register_blueprint(other)
    api.register_blueprint(v1)
    app.register_blueprint(api)
    if "app" in views:
        app.get("/status")(key_status)


@pytest.mark.parametrize(
    ("views", "expected"),
    (
        ("v1 api other app", "/api/v1/status"),
        ("api other app", "/api/status"),
        ("other app", "/status"),
        ("other", "/other/status"),
    ),
)
def test_the_view_of_the_same_blueprint_comes_first(views: str, expected: str) -> None:
    """Case 65: callers are signed in there."""
    world = new_world()
    nested(world, views=views)
    world.store.down = True

    assert f"{expected}?method=POST&path=/api/v1/pay" == link(world.post("/api/v1/pay"))


@pytest.mark.parametrize(("hooked", "linked"), ((None, True), ("one", False), ("two", False), ("app", True)))
def test_no_link_to_a_blueprint_where_other_hooks_run(hooked: str | None, linked: bool) -> None:
    """They may name another caller, and the view would refuse to say `absent` there."""
    world = new_world(principal=lambda: g.get("user", "alice"))
    one, two = Blueprint("one", "one", url_prefix="/one"), Blueprint("two", "two", url_prefix="/two")
    if hooked is not None:
        place = {"one": one, "two": two, "app": world.app}[hooked]
        place.before_request(lambda: setattr(g, "user", "bob"))
    one.post("/payments")(pay)
    two.get("/status")(key_status)
    world.app.register_blueprint(two)
    world.app.register_blueprint(one)
    world.store.down = True

    assert ("/two/status?method=POST&path=/one/payments" if linked else None) == link(world.post("/one/payments"))


def fail() -> str:
    raise RuntimeError("no such header")


@pytest.mark.parametrize(
    ("loaders", "linked"),
    (
        ({"tenant": lambda: request.headers.get("X-Tenant")}, True),
        ({"principal": lambda: "alice"}, True),
        ({"tenant": lambda: request.args.get("account")}, False),
        ({"tenant": lambda: request.path}, False),
        ({"tenant": lambda: request.method}, False),
        ({"tenant": lambda: (request.view_args or {}).get("name")}, False),
        ({"principal": lambda: (request.view_args or {}).get("name")}, False),
        ({"tenant": lambda: "acme" if request.method == "POST" else fail()}, False),
    ),
)
def test_no_link_to_a_view_that_would_find_another_name(loaders: dict[str, Any], linked: bool) -> None:
    world = new_world(init=False, status_url="/status", principal=loaders.get("principal", lambda: "alice"))
    if "tenant" in loaders:
        world.idempotency.tenant_loader(loaders["tenant"])
    world.idempotency.init_app(world.app)
    world.view("/t/<name>/payments", endpoint="pay")(lambda name: pay())
    world.store.down = True
    seen: list[str] = []

    @world.app.after_request
    def look(response: Response) -> Response:
        seen.append(f"{request.method} {request.url}")
        return response

    url = "/t/acme/payments"
    response = world.post(f"{url}?account=acme", headers={"X-Tenant": "acme"})

    assert ("/status?method=POST&path=/t/acme/payments" if linked else None) == link(response)
    assert [f"POST http://localhost{url}?account=acme"] == seen


def test_no_link_for_a_tenant_in_the_subdomain() -> None:
    """The view is at every subdomain, and its URL has another argument than the one that the loader reads."""
    app = Flask("tests.web.app", subdomain_matching=True)
    world = new_world(
        app,
        config={"SERVER_NAME": "ex.test"},
        status_url="/status",
        tenant=lambda: (request.view_args or {}).get("tenant"),
    )
    app.post("/payments", subdomain="<tenant>", endpoint="pay")(lambda tenant: pay())
    world.store.down = True

    assert link(world.post("/payments", base_url="http://acme.ex.test")) is None


def test_the_link_has_the_arguments_and_the_mount_point_of_the_request() -> None:
    world = new_world()
    shop = Blueprint("shop", "shop", url_prefix="/t/<tenant>")
    shop.post("/pay/<name>")(lambda tenant, name: pay())
    shop.get("/status")(key_status)
    world.app.register_blueprint(shop)
    world.store.down = True
    response = world.post("/t/acme/pay/J%C3%BC%25%3Cb%3E", base_url="http://localhost/mount")
    url = link(response)
    world.store.down = False

    assert "/mount/t/acme/status?method=POST&path=/mount/t/acme/pay/J%25C3%25BC%2525%253Cb%253E" == url
    told = world.client().get(url, base_url="http://localhost", environ_overrides=mounted(url), headers={KEY: "k"})
    assert "absent" == told.get_json()["state"]


def test_a_url_argument_that_is_zero_is_an_argument() -> None:
    world = new_world()
    world.app.get("/<int:shop>/status")(key_status)
    world.view("/<int:shop>/pay", endpoint="pay")(lambda shop: pay())
    world.store.down = True

    assert "/0/status?method=POST&path=/0/pay" == link(world.post("/0/pay"))


def mounted(url: str) -> dict[str, str]:
    return {"SCRIPT_NAME": "/mount", "PATH_INFO": url.partition("?")[0].removeprefix("/mount")}


def test_a_view_that_cannot_be_built_for_this_request_is_not_linked() -> None:
    world = new_world()
    world.view("/payments")(pay)
    world.app.get("/t/<tenant>/status")(key_status)
    world.store.down = True
    response = world.post("/payments")

    assert (503, None) == (response.status_code, link(response))


@pytest.mark.parametrize("matching", ("host", "subdomain"))
def test_the_link_stays_on_the_host_of_the_request(matching: str) -> None:
    hosts = matching == "host"
    app = Flask("tests.web.app", host_matching=hosts, static_host="static.test" if hosts else None)
    app.subdomain_matching = not hosts
    world = new_world(app, config={"SERVER_NAME": None if hosts else "test"}, status_url="/status")
    where: Any = {"host": "eu.test"} if hosts else {"subdomain": "eu"}
    app.add_url_rule("/pay", "pay", pay, methods=["POST"], **where)
    world.store.down = True

    assert "/status?method=POST&path=/pay" == link(world.post("/pay", base_url="http://eu.test"))


def test_a_lost_claim_and_a_failed_commit_have_the_link_too() -> None:
    world = shop()

    @world.view("/slow")
    def slow() -> str:
        world.clock.advance(31)
        record = world.record()
        assert record is not None
        seen = world.store.recovery.expired_leases(horizon=world.clock.now, limit=1).found[0]
        world.store.recovery.quarantine_expired(seen, horizon=world.clock.now)
        seen = world.store.recovery.scan(type(record.state).QUARANTINED, limit=1).found[0]
        assert world.store.recovery.force_release(seen)
        return "done"

    response = world.post("/slow")

    assert (409, "outcome-unknown") == (response.status_code, response.get_json()["code"])
    assert "/status?method=POST&path=/slow" == link(response)


def test_no_key_in_any_url_or_log_of_a_whole_conversation(caplog: pytest.LogCaptureFixture) -> None:
    """Case 65. Werkzeug's server logs the request line, as other servers do."""
    key = "secret-4242-key"
    world = shop()
    server = make_server("127.0.0.1", 0, world.app)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def send(method: str, url: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=SECONDS)
        connection.request(method, url, headers={KEY: key, **headers})
        response = connection.getresponse()
        response.read()
        connection.close()
        return response

    with caplog.at_level(logging.DEBUG):
        send("GET", "/status?method=POST&path=/payments")
        send("POST", "/payments", **{"X-Fail": "yes", "Content-Length": "0"})
        refused = send("POST", "/payments", **{"X-Fail": "yes", "Content-Length": "0"})
        found = LINK.search(refused.headers["Link"])
        assert found is not None
        answers = [send("GET", found[1]), send("GET", "/status"), send("GET", found[1] + "&path=/x")]
        world.store.down = True
        answers += [send("GET", found[1]), send("POST", "/payments", **{"Content-Length": "0"})]
    server.shutdown()
    server.server_close()

    assert [200, 400, 400, 503, 503] == [answer.status for answer in answers]
    assert "GET /status?method=POST&path=/payments" in caplog.text
    assert key not in caplog.text
    assert key not in "".join(str(answer.headers) for answer in [refused, *answers])


# The preference of a client.


def test_the_preference_is_read_as_the_rfc_has_it() -> None:
    for value, seconds in (
        ("wait=5", 5),
        ("WAIT=5", 5),
        ("wait = 5", 5),
        ('wait="5"', 5),
        ("wait=05", 5),
        ("wait=0", 0),
        ("wait=5; foo=bar", 5),
        ("respond-async, wait=5", 5),
        ("wait=5, wait=9", 5),
        ('foo="a, wait=9", wait=5', 5),
        ("wait=" + "9" * 5000, 999_999_999),
        ("", None),
        ("wait", None),
        ("wait=", None),
        ("wait=-5", None),
        ("wait=+5", None),
        ("wait=5.5", None),
        ("wait=5s", None),
        ("wait=٥", None),
        ("wait=²", None),
        ("wait=x, wait=5", None),
        ("waiting=5", None),
        ('foo="wait=5"', None),
        ("return=minimal;wait=5", None),
    ):
        asked = request_of(headers={"Prefer": value.encode().decode("latin-1")})

        assert seconds == preferred_wait(asked), (value, seconds)


@pytest.mark.parametrize(
    ("prefer", "waits", "applied"),
    (
        ("wait=1", 1.0, "wait=1"),
        ("wait=0", 0.0, "wait=0"),
        ("wait=2", 2.0, None),
        ("wait=3600", 2.0, None),
        ("wait=x", 2.0, None),
        (None, 2.0, None),
    ),
)
def test_a_client_shortens_the_wait_of_a_policy_and_never_lengthens_it(
    prefer: str | None, waits: float, applied: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = shop(in_flight="wait", wait=2.0, max_waiters=0)
    claim, asked = world.app.extensions["idempotency"].engine.claim, []

    def noted(request: Any, policy: Any, **more: Any) -> Any:
        asked.append(policy.wait)
        return claim(request, policy, **more)

    monkeypatch.setattr(world.app.extensions["idempotency"].engine, "claim", noted)
    response = running(world, **({} if prefer is None else {"Prefer": prefer}))

    assert (409, applied) == (response.status_code, response.headers.get("Preference-Applied"))
    assert waits == asked[-1]


def test_a_preference_does_not_make_a_policy_wait() -> None:
    world = shop(in_flight="reject", max_waiters=9)
    response = running(world, Prefer="wait=3600")

    assert (409, None) == (response.status_code, response.headers.get("Preference-Applied"))


def test_the_preference_is_read_only_where_a_policy_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = shop()
    monkeypatch.setattr("flask_idempotency.web.guard.preferred_wait", None)

    assert 201 == world.post("/payments", headers={"Prefer": "wait=1"}).status_code


def test_a_replay_says_nothing_of_preferences() -> None:
    world = shop(in_flight="wait")
    world.post("/payments")
    response = world.post("/payments", headers={"Prefer": "wait=1"})

    assert ("true", None) == (
        response.headers["Idempotency-Replayed"],
        response.headers.get("Preference-Applied"),
    )
