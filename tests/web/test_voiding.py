"""`DELETE` on the status view voids a key, and nothing that ran or may still run is ever called voided."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any

import pytest
from flask import Blueprint, Flask, g, request
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, Step, current_claim, idempotent, key_status
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.events import Completed, KeyVoided, VoidedRefused
from flask_idempotency.engine.model import VOIDED, State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.stores.memory import MemoryStore
from tests.apps import KEY, World, new_world
from tests.web.test_key_status import PAY, ask, hold, maria_database, on_store, shop, sql_databases, sql_stores, state

__all__ = ["maria_database", "on_store", "sql_databases", "sql_stores"]


def voiding(**settings: Any) -> World:
    return shop(**{"void": True, **settings})


def void(world: World, key: str = "k", *, url: str = "/idempotency/status", **headers: str) -> TestResponse:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return world.client(use_cookies=False).delete(url, query_string=PAY, headers={KEY: key, **names})


def test_a_voided_key_never_runs(on_store: Callable[..., World]) -> None:
    """The client hears so, as often as it asks; and the late request is refused."""
    world = on_store(void=True)
    answers = [void(world), void(world), ask(world)]
    late = world.post("/payments")

    assert [(200, "voided")] * 3 == [(each.status_code, state(each)) for each in answers]
    assert 1 == len({each.get_json()["since"] for each in answers})
    assert (409, "key-voided", []) == (late.status_code, state(late), world.runs)
    assert "no-store" == late.headers["Cache-Control"]
    assert [1, 1] == [len(world.told(kind)) for kind in (KeyVoided, VoidedRefused)]
    world.clock.advance(86_400 + 1)
    assert (201, "absent") == (world.post("/payments", json={}).status_code, state(ask(world, "other")))


def test_another_payload_under_a_voided_key_is_told_the_same() -> None:
    """Nothing is known of the request that was voided, so no payload is another one."""
    world = voiding()
    void(world)

    assert ["key-voided"] * 2 == [state(world.post("/payments", json={"amount": each})) for each in (1, 2)]


@pytest.mark.parametrize(("anonymous", "code"), ((None, "principal-required"), (True, "voided")))
def test_a_caller_who_was_signed_out_is_promised_nothing(anonymous: bool | None, code: str) -> None:
    """Its request ran while it was signed in, under a name that this caller does not have."""
    world = voiding(**({} if anonymous is None else {"allow_anonymous": anonymous}))
    world.post("/payments")
    response = void(world, X_User="")

    assert (code, "done") == (state(response), state(void(world)))
    if anonymous is None:
        assert "signed out" in response.get_json()["detail"]


def test_where_no_caller_has_a_name_each_may_void() -> None:
    """There is no other one whose key it could be."""
    app = Flask("tests.voiding")
    app.testing = True
    Idempotency(app, secret="s", status_url="/idempotency/status", void=True)
    app.post("/payments", endpoint="pay")(lambda: ("paid", 201))

    assert "voided" == state(app.test_client().delete("/idempotency/status", query_string=PAY, headers={KEY: "k"}))


@pytest.mark.parametrize(
    ("effects", "happens", "status", "code"),
    (
        ("plain", lambda world: world.post("/payments"), 200, "done"),
        ("plain", lambda world: world.post("/payments", headers={"X-Fail": "yes"}), 409, "outcome-unknown"),
        ("plain", hold, 409, "in-flight"),
        ("plain", lambda world: (hold(world), world.clock.advance(31)), 409, "outcome-unknown"),
        ("marked", hold, 409, "in-flight"),
        ("marked", lambda world: (hold(world), world.clock.advance(31)), 200, "voided"),
        ("marked", lambda world: world.post("/payments", headers={"X-Status": "503"}), 200, "voided"),
    ),
)
def test_what_ran_or_may_run_is_not_voided(
    effects: str, happens: Callable[[World], object], status: int, code: str
) -> None:
    """A worker that vanished did nothing only where its policy proves that."""
    world = voiding(effects=effects)
    happens(world)
    before = world.record() if code != "voided" else None
    response = void(world)

    assert (status, code) == (response.status_code, state(response))
    assert before is None or before.token == getattr(world.record(), "token", None)
    assert ("5" if code == "in-flight" else None) == response.headers.get("Retry-After")
    assert ("voided" if code == "voided" else before and before.state) == (
        "voided" if code == "voided" else getattr(world.record(), "state", None)
    )


def test_the_worker_of_a_voided_request_learns_that_it_lost() -> None:
    """It was slow, and not gone. Its response is not sent, and nothing of it is kept."""
    world = new_world(status_url="/idempotency/status", void=True, effects="marked")

    @world.view("/payments")
    def pay() -> Any:
        world.clock.advance(31)
        assert "voided" == state(void(world))
        current_claim.point_of_no_return()
        world.runs.append("charged")
        return {"paid": True}, 201

    response = world.post("/payments")
    assert (409, "key-voided", []) == (response.status_code, state(response), world.runs)
    assert [] == world.told(Completed)


@pytest.mark.parametrize(("effects", "code"), (("deduplicated", "request-paused"), ("pure", "voided")))
def test_a_paused_request_is_voided_only_without_an_effect(effects: Any, code: str) -> None:
    """A step that began may have done something. One without effects has not."""
    world = new_world(status_url="/idempotency/status", void=True, steps=(Step("reserve", effects=effects),))

    @world.view("/payments")
    def pay() -> Any:
        current_claim.step("reserve", lambda: 1)
        world.clock.advance(31)
        raise SystemExit

    with pytest.raises(SystemExit):
        world.post("/payments")
    world.clock.advance(60)
    response = void(world)

    assert (code, code == "voided") == (state(response), response.status_code == 200)


def test_it_waits_for_the_running_request_as_get_does() -> None:
    world = voiding(in_flight="wait")
    hold(world)
    response = void(world, Prefer="wait=0.05")

    assert (409, "in-flight") == (response.status_code, state(response))


def test_only_where_the_policy_allows_it() -> None:
    world = shop()
    response = void(world)

    assert (405, "void-not-offered", "GET") == (response.status_code, state(response), response.headers["Allow"])
    assert "absent" == state(ask(world))


def test_the_key_of_another_caller_is_another_key() -> None:
    world = voiding()
    void(world, X_User="bob")

    assert 201 == world.post("/payments").status_code
    assert "done" == state(void(world))
    assert "voided" == state(ask(world, X_User="bob"))


def test_a_key_is_not_voided_where_its_operation_may_name_another_caller() -> None:
    """GET does not say `absent` there either: the request would run under the other name."""
    app = Flask(__name__)
    api = Blueprint("api", __name__)

    @api.before_request
    def sign_in() -> None:
        g.user = request.headers.get("X-User")

    api.post("/payments", endpoint="pay")(lambda: {"paid": True})
    Idempotency(
        app,
        store=MemoryStore(),
        status_url="/status",
        void=True,
        principal=lambda: g.get("user"),
        secret=secrets.token_urlsafe(32),
    )
    app.register_blueprint(api)
    client = app.test_client()
    response = client.delete("/status", query_string=PAY, headers={KEY: "k", "X-User": "alice"})

    assert (403, "principal-required") == (response.status_code, state(response))
    assert 200 == client.post("/payments", headers={KEY: "k", "X-User": "alice"}).status_code


def test_a_voided_key_counts_in_the_quota() -> None:
    world = voiding(quota_records=1)

    assert [200, 429, 429] == [void(world, key).status_code for key in ("k", "l", "m")]
    assert "absent" == state(ask(world, "l"))


def test_a_status_view_that_takes_no_delete_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """At the first request, by name, with the remedy."""
    world = new_world(void=True)
    world.app.get("/status")(key_status)
    world.view("/payments")(lambda: "ok")
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        world.post("/payments")

    assert [True] == [
        "no status view takes DELETE" in each.message for each in caplog.records if "void" in each.message
    ]


@pytest.mark.parametrize("lost", ("request", "reply"))
def test_a_lost_call_is_no_confirmation(lost: str) -> None:
    """The client repeats it. Whatever arrived, the key is voided then, once."""
    world = voiding()
    (world.store.lose_request if lost == "request" else world.store.lose_reply)("void")

    assert [(503, "store-unavailable"), (200, "voided")] == [
        (each.status_code, state(each)) for each in (void(world), void(world))
    ]
    assert "key-voided" == state(world.post("/payments"))


def test_while_secrets_rotate_the_key_is_voided_under_each() -> None:
    """A host that knows only one of them refuses the request too."""
    old, new = "o" * 32, "n" * 32
    world = voiding(secret=(new, old))
    void(world)

    for secret in (old, new, (new, old), (old, new)):
        other = shop(store=world.store, secret=secret, void=True)
        assert "key-voided" == state(other.post("/payments")), secret
    records = [world.store.read(call.key) for call in world.store.calls if call.verb == "void"]
    assert [(State.COMPLETED, VOIDED)] * 2 == [(each.state, each.fingerprint) for each in records if each is not None]


def test_a_request_under_one_secret_alone_is_not_voided_under_the_other() -> None:
    """A host that knows only the newer secret has used the key."""
    old, new = "o" * 32, "n" * 32
    world = voiding(secret=(new, old))
    other = shop(store=world.store, secret=new, void=True)
    other.post("/payments")
    response = void(world)

    assert (200, "done") == (response.status_code, state(response))
    assert 201 == world.post("/payments").status_code
    assert [b""] == other.runs or 1 == len(other.runs)


# Where a void could say more than is true.


def test_a_worker_that_passes_its_point_while_its_key_is_voided_keeps_it(on_store: Callable[..., World]) -> None:
    """Between the look at the record and its release. Its effect comes next."""
    world = on_store(void=True, effects="marked")
    token = hold(world)
    world.clock.advance(31)
    key = world.store.calls[-1].key
    world.store.points.at("after read", lambda: world.store._store.mark_point_of_no_return(key, token), nth=2)
    response = void(world)

    assert (409, "request-paused") == (response.status_code, state(response))
    assert token == getattr(world.store.read(key), "token", None)
    assert "outcome-unknown" == state(void(world))


def test_a_paused_request_is_voided_on_each_store(on_store: Callable[..., World]) -> None:
    world = on_store(void=True, effects="marked")
    hold(world)
    world.clock.advance(31)

    assert ["voided", "key-voided"] == [state(each) for each in (void(world), world.post("/payments"))]


def test_the_operation_of_the_record_says_what_its_effects_are() -> None:
    """Naming another operation, whose policy proves more, voids nothing."""
    world = voiding(effects="marked")
    world.view("/bookings", endpoint="book")(idempotent(effects="deduplicated", void=False)(lambda: "booked"))
    hold(world, endpoint="book")
    world.clock.advance(31)
    response = void(world)

    assert (422, "key-reused") == (response.status_code, state(response))
    assert State.PROCESSING is world.state()


def test_a_late_worker_that_may_have_acted_does_not_say_that_it_did_nothing() -> None:
    """An operator freed its key, and the client voided it."""
    for effects, code in (("plain", "outcome-unknown"), ("marked", "key-voided")):
        world = new_world(status_url="/idempotency/status", void=True, effects=effects)

        @world.view("/payments")
        def pay() -> Any:
            key = world.store.calls[-1].key  # noqa: B023 - called in this turn
            record = world.store.read(key)  # noqa: B023
            assert record is not None
            world.store.recovery.force_release(SeenRecord(key, record))  # noqa: B023
            assert "voided" == state(void(world))  # noqa: B023
            return {"paid": True}, 201

        assert code == state(world.post("/payments")), effects


@pytest.mark.parametrize(
    "settings",
    (
        {"effects": "deduplicated"},
        {"on_error": "release"},
        {"release_statuses": (500,)},
        {"on_store_down": "allow"},
        {"on_abandoned": "takeover"},
        {"effects": "steps", "steps": (Step("charge", effects="deduplicated", intent=False),)},
    ),
    ids=lambda settings: ", ".join(settings),
)
def test_where_a_void_could_not_be_believed_it_is_refused(settings: dict[str, Any]) -> None:
    """A request that had an effect may leave no record there, or runs without the store."""
    with pytest.raises(ConfigurationError, match="void=True and"):
        voiding(**settings)


def test_a_step_without_an_entry_is_not_given_up() -> None:
    """Its effect may have happened, and the journal has no trace of it."""
    steps = (Step("charge", effects="deduplicated", intent=False),)
    assert not Policy(effects="steps", steps=steps).shows_effects
    assert Policy(effects="steps", steps=(Step("charge", effects="deduplicated"),)).shows_effects


def test_a_host_with_one_secret_undoes_a_void_that_meets_it() -> None:
    """It used the key between the two writes. What ran is never called voided, and its retry gets the response."""
    old, new = "o" * 32, "n" * 32
    world = voiding(secret=(new, old))
    other = shop(store=world.store, secret=new, void=True)
    world.store.points.at("after void", lambda: other.post("/payments"))
    response = void(world)

    assert (200, "done") == (response.status_code, state(response))
    assert ["done", 201] == [state(ask(world)), world.post("/payments").status_code]
    assert 1 == len(other.runs) + len(world.runs)


def test_half_of_a_void_is_no_void() -> None:
    """The second write was lost. The status does not promise it, and a repeated DELETE completes it."""
    world = voiding(secret=("n" * 32, "o" * 32))
    world.store.lose_request("void", nth=2)

    assert 503 == void(world).status_code
    assert "absent" == state(ask(world))
    assert "voided" == state(void(world))


def test_what_is_in_flight_does_not_keep_a_key_from_being_voided() -> None:
    """The request that does not end may be why the client gives up."""
    world = voiding(quota_in_flight=1)
    hold(world, "other")

    assert "voided" == state(void(world))


def test_it_says_for_how_long() -> None:
    """Also when it is repeated: the time is that of the first."""
    world = voiding(keep=100)
    seconds = [void(world).get_json()["seconds_left"]]
    world.clock.advance(99)
    seconds += [void(world).get_json()["seconds_left"], ask(world).get_json()["seconds_left"]]

    assert [100, 1, 1] == seconds


def test_a_voided_key_is_voided_whatever_operation_is_named() -> None:
    """A request with it is refused as that everywhere."""
    world = voiding()
    world.view("/refunds")(lambda: "ok")
    void(world)
    response = ask(world, asked={"method": "POST", "path": "/refunds"})

    assert ["voided", "key-voided"] == [state(response), state(world.post("/refunds"))]
