"""`cors_headers` with the real Flask-CORS: what a browser lets a script of another origin send and see."""

from __future__ import annotations

import pytest
from flask import Flask
from flask.testing import FlaskClient
from flask_cors import CORS

from flask_idempotency import cors_headers
from flask_idempotency.settings.profiles import PROFILES
from tests.apps import KEY, World, new_world

ORIGIN = "https://shop.example"


@pytest.fixture
def world() -> World:
    world = new_world(Flask("tests.web.app"), status_url="/status")
    CORS(world.app, origins=[ORIGIN], **cors_headers("Content-Type", "Authorization"))
    world.view("/payments")(lambda: "paid")
    return world


def preflight(client: FlaskClient, path: str, method: str, *headers: str, origin: str = ORIGIN) -> set[str]:
    """The request headers that a browser may send after its preflight, in small letters."""
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        # A browser sends the names sorted and in small letters.
        "Access-Control-Request-Headers": ",".join(sorted(name.lower() for name in headers)),
    }
    response = client.options(path, headers=asked)
    if response.headers.get("Access-Control-Allow-Origin") != origin:
        return set()
    assert method in response.headers["Access-Control-Allow-Methods"]
    return {name.strip().lower() for name in response.headers.get("Access-Control-Allow-Headers", "").split(",")}


def exposed(headers: dict[str, str]) -> set[str]:
    return {name.strip() for name in headers.get("Access-Control-Expose-Headers", "").split(",")}


def test_every_dialect_is_there() -> None:
    headers = cors_headers("X-Own")

    for profile in PROFILES.values():
        assert set(profile.values["header"]) <= set(headers["allow_headers"])
        assert {name for name, _ in profile.values["replayed_header"]} <= set(headers["expose_headers"])
    assert {"Prefer", "X-Own"} <= set(headers["allow_headers"])
    assert {
        *("Idempotency-Status", "Retry-After", "Location", "Link", "Preference-Applied", "RateLimit"),
        "RateLimit-Policy",
    } <= set(headers["expose_headers"])
    assert all(len(names) == len(set(names)) for names in headers.values())


def test_a_caller_may_change_what_it_gets() -> None:
    cors_headers()["expose_headers"].append("Payment-Replayed")

    assert "Payment-Replayed" not in cors_headers()["expose_headers"]


@pytest.mark.parametrize(("path", "method"), (("/payments", "POST"), ("/status", "GET")))
def test_a_preflight_lets_the_key_pass_and_claims_nothing(world: World, path: str, method: str) -> None:
    sent = (KEY, "Prefer", "Content-Type", "Authorization")

    assert {name.lower() for name in sent} <= preflight(world.client(), path, method, *sent)
    assert preflight(world.client(), path, method, *sent, origin="https://evil.example") == set()
    assert "x-other" not in preflight(world.client(), path, method, KEY, "X-Other")
    assert [] == world.store.calls


def test_a_script_sees_what_it_must_act_on(world: World) -> None:
    """B38."""
    world.post("/payments", headers={"Origin": ORIGIN})
    replay = world.post("/payments", headers={"Origin": ORIGIN})
    world.store.down = True
    refusal = world.post("/payments", headers={"Origin": ORIGIN})
    status = world.client().get(
        "/status", query_string={"method": "POST", "path": "/payments"}, headers={KEY: "k", "Origin": ORIGIN}
    )

    for response, names in (
        (replay, {"Idempotency-Replayed"}),
        (refusal, {"Retry-After", "Link"}),
        (status, {"Retry-After"}),
    ):
        assert names <= set(response.headers.keys())
        assert names <= exposed(dict(response.headers))
        assert ORIGIN == response.headers["Access-Control-Allow-Origin"]


def test_without_the_helper_a_script_sees_none_of_them() -> None:
    world = new_world(Flask("tests.web.app"))
    CORS(world.app, origins=[ORIGIN])
    world.store.down = True
    world.view("/payments")(lambda: "paid")
    refusal = world.post("/payments", headers={"Origin": ORIGIN})

    assert "Retry-After" in refusal.headers
    assert exposed(dict(refusal.headers)) == {""}


def test_a_list_of_names_is_a_fault() -> None:
    with pytest.raises(TypeError, match="Pass the names of header fields, not a list"):
        cors_headers(["Content-Type"])  # type: ignore[arg-type]
