"""Which applications let the janitor finish requests, what is kept of one, and what operators see of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from flask import Blueprint, Flask, Request, abort, g, request
from flask_jwt_extended import JWTManager
from flask_login import LoginManager  # type: ignore[import-untyped]
from werkzeug.test import TestResponse

from flask_idempotency import ConfigurationError, Idempotency, claim_here, current_claim, idempotent, webhook
from flask_idempotency.codec.envelope import EnvelopeCodec
from flask_idempotency.engine import events
from flask_idempotency.engine.capabilities import SeenRecord
from flask_idempotency.engine.errors import KeyProviderUnavailable
from flask_idempotency.engine.journal import KEPT_REQUEST, Journal
from flask_idempotency.engine.model import State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.operations.browse import timeline
from flask_idempotency.web import operator
from flask_idempotency.web.finishing import Finisher
from flask_idempotency.web.janitor import janitor_of
from flask_idempotency.web.request_state import FINISHING
from tests.web.finishing import SECRET, STEPS, Shop, counts, paused

# What is stored.


def payloads(shop: Shop) -> bytes:
    entries = [entry for kept in shop.store._shared.journals.values() for entry in kept.entries.values()]
    return b"".join(entry.payload.data for entry in entries if entry.payload is not None)


def test_neither_the_key_nor_a_credential_is_stored() -> None:
    shop = Shop(compression="off", policy={"finish_headers": ("X-Region",)})
    shop.post("the-clients-key", **{"X-Region": "north", "Authorization": "Bearer secret-1", "Cookie": "a=secret-2"})
    shop.failing = False

    stored = payloads(shop)
    assert b"north" in stored
    assert all(each not in stored for each in (b"the-clients-key", b"secret-1", b"secret-2", b"X_TOKEN"))
    seen: list[Any] = []

    def act_for(principal: Any, tenant: Any) -> None:
        seen.append({name: value for name, value in request.headers.items() if name.startswith(("X-", "Auth", "Cook"))})
        shop.act_for(principal, tenant)

    shop.extension.act_for(act_for)
    assert {"completed": 1} == counts(shop.finish())
    assert [{"X-Region": "north"}] == seen


@pytest.mark.parametrize(("old", "new"), ((b'"alice"', b'"mallo"'), (b'{"cart": 1}', b'{"cart": 2}')))
def test_a_request_that_was_changed_in_the_store_is_never_run(old: bytes, new: bytes) -> None:
    """Who can write to the store cannot act as another caller."""
    shop = paused(compression="off")
    shop.users.add("mallo")
    codec = EnvelopeCodec(compression=None).steps
    ((key, kept),) = shop.store._shared.journals.items()
    (entry,) = (entry for entry in kept.entries.values() if entry.name == KEPT_REQUEST)
    assert entry.payload is not None
    context = entry.context(key, b"")
    item, data = codec.open(entry.payload, context)
    assert data is not None
    assert old in data
    assert shop.store.journals.replace(key, entry.id, entry.payload, codec.seal(item, data.replace(old, new), context))

    assert {"unreadable": 1} == counts(shop.finish())
    assert 1 == len(shop.seen)


def test_it_counts_in_the_bytes_of_its_tenant() -> None:
    shop = Shop(quota_bytes=100_000)
    shop.app.test_client().post(
        "/checkout/1", json={"cart": 1, "note": "x" * 5000}, headers={"Idempotency-Key": "k", "X-Token": "alice"}
    )
    (key,) = shop.store._shared.records

    assert shop.store.ledger.usage(key.tid).bytes > 5000


# What is refused.


def closed(shop: Shop) -> str:
    answer = shop.post()
    assert (500, 0) == (answer.status_code, len(shop.seen))
    return str(answer.get_json()["detail"])


def test_without_act_for_the_endpoint_is_closed_with_the_lines_to_paste() -> None:
    shop = Shop()
    shop.app.testing = True
    shop.app.extensions["idempotency"].loaders.act_for = None

    detail = closed(shop)
    # A log and `doctor` show the end of a line as an escape.
    assert ("`@idempotency.act_for`" in detail, "\n" in detail) == (True, False)


@pytest.mark.parametrize(
    ("extension", "line"),
    (
        (LoginManager, "login_user(load_user(principal))"),
        (JWTManager, 'create_access_token(principal.removeprefix("jwt:")'),
    ),
)
def test_the_lines_to_paste_are_those_of_the_extension_that_is_there(extension: Any, line: str) -> None:
    shop = Shop()
    shop.app.testing = True
    extension(shop.app)
    shop.app.extensions["idempotency"].loaders.act_for = None

    assert line in closed(shop)


def test_messages_are_not_finished() -> None:
    """Their broker delivers them again."""
    with pytest.raises(ConfigurationError, match="finish: this keyword is for HTTP endpoints"):
        Idempotency().inbox("orders", steps=("charge",), finish="janitor")


def test_a_webhook_is_not_finished() -> None:
    """Its provider sends it again."""
    view = webhook("bank", key="/id", finish="janitor", steps=STEPS)(lambda: "")
    shop = Shop()
    shop.app.testing = True
    shop.app.add_url_rule("/hook", "hook", view, methods=["POST"])

    assert any("not for webhooks" in fault for fault in shop.app.extensions["idempotency"].policies.faults())


def test_an_application_that_is_switched_off_finishes_nothing(tmp_path: Path) -> None:
    """Its views run without a guard, and would charge again."""
    app = Flask("shop")
    extension = Idempotency(app, store=f"sqlite:///{tmp_path / 'shop.sqlite'}", secret=SECRET, enabled=False)
    extension.act_for(lambda principal, tenant: None)
    view = idempotent(required=True, steps=STEPS, finish="janitor")(lambda: "")
    app.add_url_rule("/checkout", "checkout", view, methods=["POST"])

    assert "finish" not in janitor_of(app).tasks


def test_a_janitor_that_is_made_early_fixes_no_policy() -> None:
    shop = Shop()
    janitor_of(shop.app)

    assert {} == shop.app.extensions["idempotency"].policies.resolved


@pytest.mark.parametrize(
    ("policy", "named"),
    (
        ({"finish_headers": ("Authorization",)}, "Authorization"),
        ({"finish_headers": ("X-Key-Of-Mine",)}, "X-Key-Of-Mine"),
        ({"finish_headers": ("cookie",)}, "cookie"),
        ({"finish_headers": ("Idempotency-Key",)}, "Idempotency-Key"),
        ({"finish_headers": ("Idempotency_Key",)}, "Idempotency_Key"),
        ({"finish_headers": ("Idempotency-Key",), "header": "X-Key"}, "Idempotency-Key"),
        ({"finish_headers": ("x_key",), "header": "X-Key"}, "x_key"),
        ({"finish_headers": ("X_API_Key",)}, "X_API_Key"),
        ({"fingerprint_headers": ("X-API-Key",)}, "X-API-Key"),
        ({"max_request_body": 1024 * 1024 + 1}, "max_request_body"),
        ({"form_field": "key"}, "form_field"),
    ),
)
def test_what_cannot_be_kept_is_refused(policy: dict[str, Any], named: str) -> None:
    shop = Shop(policy=policy, credential_headers=("X-Key-Of-Mine",))
    shop.app.testing = True

    assert named in closed(shop)


@pytest.mark.parametrize("named", ("X-Jwt", "x_jwt", "X-CSRF-TOKEN", "X-CSRFToken", "X-Mine"))
def test_the_headers_that_extensions_read_tokens_from_are_refused(named: str) -> None:
    shop = Shop(policy={"finish_headers": (named,)})
    shop.app.testing = True
    shop.app.config |= {"JWT_SECRET_KEY": SECRET, "JWT_HEADER_NAME": "X-Jwt"}
    JWTManager(shop.app)
    shop.app.config["WTF_CSRF_HEADERS"] = ["X-CSRFToken", "X-Mine"]

    assert f"keeps the header {named}," in closed(shop)


def test_names_that_may_not_be_stored_are_refused() -> None:
    shop = Shop(hash_identities=True)
    shop.app.testing = True

    assert "IDEMPOTENCY_HASH_IDENTITIES" in closed(shop)


def test_only_steps_can_be_finished() -> None:
    shop = Shop(policy={"effects": "deduplicated", "steps": ()})
    shop.app.testing = True

    assert 'effects="steps"' in closed(shop)


@pytest.mark.parametrize("places", ("query_string", ["headers", "json"]))
def test_tokens_in_the_query_or_the_body_are_refused(places: Any) -> None:
    shop = Shop()
    shop.app.testing = True
    shop.app.config["JWT_TOKEN_LOCATION"] = places
    JWTManager(shop.app)

    assert "JWT_TOKEN_LOCATION" in closed(shop)


@pytest.mark.parametrize("named", ("gone", print))
def test_a_name_that_is_no_hook_is_refused(named: Any) -> None:
    shop = Shop()
    shop.app.testing = True
    shop.extension.act_for(instead_of=[named])(shop.act_for)

    assert "no before_request hook" in closed(shop)


def test_the_inside_of_a_decorated_hook_is_no_hook() -> None:
    """It would pass the check, and would never be left out."""
    shop = Shop()
    shop.app.testing = True

    def inner() -> None:
        return None

    @wraps(inner)
    def outer() -> None:
        return inner()

    shop.app.before_request(outer)
    shop.extension.act_for(instead_of=[inner])(shop.act_for)
    assert "is no before_request hook" in closed(shop)


def test_a_larger_body_than_can_be_kept_is_refused_before_anything_is_claimed() -> None:
    shop = Shop()
    answer = shop.app.test_client().post(
        "/checkout/1", json={"cart": "x" * 1024 * 1024}, headers={"Idempotency-Key": "k", "X-Token": "alice"}
    )

    assert (413, {}) == (answer.status_code, shop.store._shared.records)


def test_the_limit_of_bodies_is_explained() -> None:
    shop = Shop()
    told = shop.app.test_cli_runner().invoke(args=["idempotency", "policy", "checkout"]).output
    (line,) = (line for line in told.splitlines() if line.startswith("max_request_body"))

    assert "max_request_body 1048576 finish, which keeps the body" == " ".join(line.split())


def test_the_largest_body_is_kept_and_comes_back() -> None:
    shop = Shop(compression="off")
    note = "x" * (1024 * 1024 - 30)
    shop.app.test_client().post(
        "/checkout/1", json={"cart": note}, headers={"Idempotency-Key": "k", "X-Token": "alice"}
    )
    shop.failing = False

    assert {"completed": 1} == counts(shop.finish())
    assert note == shop.seen[-1][1]


# Other releases.


def test_an_endpoint_that_has_another_path_now_is_not_entered() -> None:
    shop = paused()
    later = Shop(shop.store, shop.clock)
    later.app.view_functions["other"] = lambda cart: later.run("other") or ""
    for rule in later.app.url_map.iter_rules("checkout"):
        rule.endpoint = "other"
    later.app.add_url_rule("/baskets/<cart>", "checkout", methods=["POST"])
    later.failing = False

    assert {"failed": 1} == counts(later.finish())
    assert ["other-endpoint"] == [each.reason for each in later.told(events.FinishTried)]
    assert {} == later.ran


@pytest.mark.parametrize("policy", ({"finish": "client"}, {"mode": "observe"}))
def test_an_endpoint_that_the_janitor_does_not_finish_any_more_is_left_alone(policy: dict[str, Any]) -> None:
    shop = paused()
    later = Shop(shop.store, shop.clock, policy=policy)
    later.app.add_url_rule("/x", "x", idempotent(steps=STEPS, finish="janitor")(lambda: ""), methods=["POST"])

    assert {} == counts(later.finish())


def test_a_release_that_leaves_it_to_clients_goes_on_after_the_steps() -> None:
    shop = paused()
    later = Shop(shop.store, shop.clock, policy={"finish": "client"})
    later.failing = False

    assert 201 == later.post().status_code
    assert {"mail": 1} == later.ran


def test_a_release_that_knows_no_kept_request_holds_it_until_an_operator_resumes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the guide says: set finish="janitor" when each host has this release."""
    shop = paused()
    with monkeypatch.context() as former:
        former.setattr("flask_idempotency.engine.journal.BESIDE", "none")
        assert 409 == Shop(shop.store, shop.clock, policy={"finish": "client"}).post().status_code
    (record,) = shop.store._shared.records.values()
    assert (State.QUARANTINED, "steps-changed") == (record.state, record.reason)
    words = (
        "--key",
        "k",
        "--principal",
        "alice",
        "--tenant",
        "acme",
        "--reason",
        "deployed",
        "--actor",
        "ann",
        "--yes",
    )
    told = shop.app.test_cli_runner().invoke(args=["idempotency", "resolve", "--resume", *words])

    assert 0 == told.exit_code, told.output
    assert {"completed": 1} == counts(shop.finish())


def test_steps_that_have_changed_hold_the_request_as_for_a_client() -> None:
    shop = paused()
    later = Shop(shop.store, shop.clock, policy={"steps": ("mail",)})
    later.failing = False

    assert {"quarantined": 1} == counts(later.finish())
    assert [] == later.seen
    assert {State.QUARANTINED} == {record.state for record in shop.store._shared.records.values()}


def test_a_request_that_counts_as_another_now_is_not_entered_and_looked_at_rarely() -> None:
    """A deploy compares other parts of a request. Its client gets `key-reused` too."""
    shop = paused()
    later = Shop(shop.store, shop.clock, policy={"fingerprint": "raw"})
    later.failing = False
    janitor = janitor_of(later.app, host_clock=shop.clock)
    reports: list[Any] = [janitor.run("finish", Batcher()) for _ in range(3)]

    assert [{"overtaken": 1}, {"waiting": 1}, {"waiting": 1}] == [counts(report) for report in reports]
    assert 1 == len(later.told(events.MismatchRefused))
    assert [] == later.seen
    assert 422 == later.post().status_code


def test_nothing_is_finished_while_a_loss_of_data_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal may lack a step then, and a worker may run without a record."""
    shop = paused()
    monkeypatch.setattr("flask_idempotency.web.janitor._has_lost_data", lambda *_: True)

    assert {} == counts(shop.finish())
    assert 1 == len(shop.seen)


# How the application is made.


@pytest.mark.parametrize(
    "policy",
    (
        {"fingerprint": "raw"},
        {"fingerprint_headers": ("X-Region",)},
        {"ignore_fields": ("/cart",)},
        {"in_flight": "wait"},
        {"scope": "operation"},
    ),
)
def test_requests_are_recognised_by_any_policy(policy: dict[str, Any]) -> None:
    shop = Shop(policy=policy)
    shop.post(**{"X-Region": "north"})
    shop.failing = False

    assert {"completed": 1} == counts(shop.finish())
    assert "true" == shop.post(**{"X-Region": "north"}).headers["Idempotency-Replayed"]


def test_a_loader_that_fails_for_one_tenant_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()

    def quota(tenant: Any) -> None:
        if tenant == "broken" and broken:
            raise LookupError("of acme")

    broken: list[bool] = []
    shop.extension.quota_loader(quota)
    shop.app.before_request(lambda: setattr(g, "tenant", request.headers.get("X-Tenant") or g.tenant))
    for tenant in ("one", "broken", "two"):
        shop.post(tenant, **{"X-Tenant": tenant})
    shop.failing = False
    broken.append(True)

    assert {"completed": 2, "failed": 1} == counts(shop.finish())
    assert ("LookupError" in caplog.text, "of acme" in caplog.text) == (True, False)


def test_a_loader_that_fails_before_the_try_is_not_called_in_each_run() -> None:
    shop, calls = paused(), []

    def quota(tenant: Any) -> None:
        calls.append(tenant)
        raise LookupError

    shop.extension.quota_loader(quota)
    janitor = janitor_of(shop.app, host_clock=shop.clock)
    for _ in range(9):
        janitor.run("finish", Batcher())
        shop.clock.advance(15)
    assert ["acme", "acme"] == calls


def test_a_key_service_that_is_away_is_asked_again_in_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = paused()
    janitor = janitor_of(shop.app, host_clock=shop.clock)

    def away(*arguments: Any) -> None:
        raise KeyProviderUnavailable("the key service is away")

    with monkeypatch.context() as patched:
        patched.setattr(Finisher, "_opened", away)
        report: Any = janitor.run("finish", Batcher())
    assert {"waiting": 1} == counts(report)
    report = janitor.run("finish", Batcher())
    assert {"completed": 1} == counts(report)


@pytest.mark.skipif(version("flask") < "3.1", reason="Flask has TRUSTED_HOSTS from 3.1 on")
def test_a_host_that_is_not_trusted_any_more_is_a_failed_try() -> None:
    shop = paused()
    shop.app.config["TRUSTED_HOSTS"] = ["other.example"]
    assert {"failed": 1} == counts(shop.finish())
    assert ["other-endpoint"] == [each.reason for each in shop.told(events.FinishTried)]


def test_an_error_before_the_hooks_is_a_failed_try() -> None:
    shop = paused()

    class Broken(Request):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if FINISHING in self.environ:
                raise LookupError

    shop.app.request_class = Broken
    assert {"failed": 1} == counts(shop.finish())
    assert ["other-endpoint"] == [each.reason for each in shop.told(events.FinishTried)]


def test_act_for_may_be_a_coroutine_function() -> None:
    shop = paused()

    async def act_for(principal: Any, tenant: Any) -> None:
        shop.act_for(principal, tenant)

    shop.extension.act_for(act_for)
    assert {"completed": 1} == counts(shop.finish())


def test_act_for_takes_the_principal_and_the_tenant() -> None:
    with pytest.raises(ConfigurationError, match="two arguments"):
        Shop().extension.act_for(lambda principal: None)  # type: ignore[type-var]


def test_a_view_that_claims_below_its_decorators_is_finished() -> None:
    """And not entered if a decorator refuses its caller."""
    shop = Shop()
    allowed = [True]

    def permitted(view: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(view)
        def checked(*args: Any, **kwargs: Any) -> Any:
            return view(*args, **kwargs) if allowed else ("no", 403)

        return checked

    here = permitted(claim_here(lambda: shop.checkout()))
    view = idempotent(required=True, steps=STEPS, finish="janitor")(here)
    shop.app.add_url_rule("/here", "here", view, methods=["POST"])
    sent = {"json": {"cart": 1}, "headers": {"Idempotency-Key": "k", "X-Token": "alice"}}
    assert "paused" == shop.app.test_client().post("/here", **sent).headers["Idempotency-Status"]
    shop.failing = False
    allowed.clear()

    assert {"failed": 1} == counts(shop.finish())
    assert ["status-403"] == [each.reason for each in shop.told(events.FinishTried)]
    allowed.append(True)
    shop.clock.advance(30)
    assert {"completed": 1} == counts(shop.finish())
    assert {"reserve": 1, "charge": 1, "mail": 1} == shop.ran


def test_a_hook_of_a_blueprint_is_left_out_too() -> None:
    shop = Shop()
    orders = Blueprint("orders", __name__)
    ran: list[bool] = []

    @orders.before_request
    def device() -> None:
        ran.append(current_claim.finishing)
        if "X-Device" not in request.headers:
            abort(400)

    view = idempotent(required=True, steps=STEPS, finish="janitor")(lambda: shop.checkout())
    orders.add_url_rule("/orders", "order", view, methods=["POST"])
    shop.app.register_blueprint(orders)
    shop.extension.act_for(instead_of=[device])(shop.act_for)
    headers = {"Idempotency-Key": "k", "X-Token": "alice", "X-Device": "phone"}
    shop.app.test_client().post("/orders", json={"cart": 1}, headers=headers)
    shop.failing = False

    assert {"completed": 1} == counts(shop.finish())
    assert [False] == ran


def test_a_form_whose_bytes_are_gone_is_left_to_its_client(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    shop.app.before_request(lambda: request.form and None)

    def checkout() -> Any:
        shop.seen.append(request.form["cart"])
        current_claim.step("charge", shop.run, "charge")
        return {}, 503 if shop.failing else 201

    shop.checkout = checkout  # type: ignore[method-assign]
    sent = {"data": {"cart": "1"}, "headers": {"Idempotency-Key": "k", "X-Token": "alice"}}
    for _ in range(2):
        assert "paused" == shop.app.test_client().post("/checkout/1", **sent).headers["Idempotency-Status"]
    shop.failing = False

    assert {"waiting": 1} == counts(shop.finish())
    assert 1 == caplog.text.count("cannot be finished by the janitor")
    assert 201 == shop.app.test_client().post("/checkout/1", **sent).status_code


def test_a_client_that_waits_gets_the_response_of_the_janitor() -> None:
    shop = Shop(policy={"in_flight": "wait", "wait": 60})
    shop.post()
    shop.failing = False
    inside, go = Event(), Event()

    def act_for(principal: Any, tenant: Any) -> None:
        inside.set()
        assert go.wait(60)
        shop.act_for(principal, tenant)

    shop.extension.act_for(act_for)
    answers: list[TestResponse] = []
    finishing = Thread(target=shop.finish)
    client = Thread(target=lambda: answers.append(shop.post()))
    finishing.start()
    assert inside.wait(60)
    client.start()
    go.set()
    finishing.join(60)
    client.join(60)

    assert [(201, "true")] == [(each.status_code, each.headers.get("Idempotency-Replayed")) for each in answers]
    assert {"reserve": 1, "charge": 1, "mail": 1} == shop.ran


# What operators see.


def test_the_command_says_what_it_has_finished() -> None:
    shop = paused()
    run = shop.app.test_cli_runner().invoke
    clock = shop.clock
    with shop.app.app_context():
        shop.users.clear()
        failed = run(args=["idempotency", "finish"])
        shop.users.add("alice")
        clock.advance(30)
        done = run(args=["idempotency", "finish", "--json"])

    assert (1, True) == (failed.exit_code, "Tried in vain, and tried again later: 1." in failed.output)
    assert 0 == done.exit_code, done.output
    assert 1 == json.loads(done.stdout)["completed"]
    named = ("--key", "k", "--principal", "alice", "--tenant", "acme")
    shown = run(args=["idempotency", "show", *named]).output
    assert "finished by janitor, while processing: try 2: status-201" in shown
    assert "try-failed by janitor, while processing: try 1: status-401" in shown
    assert "@request" not in shown


def test_the_command_says_how_many_requests_still_have_a_lease() -> None:
    shop = Shop()
    shown: list[str] = []

    def checkout() -> Any:
        answer = Shop.checkout(shop)
        other = Thread(
            target=lambda: shown.append(shop.app.test_cli_runner().invoke(args=["idempotency", "finish"]).output)
        )
        other.start()
        other.join(60)
        return answer

    shop.checkout = checkout  # type: ignore[method-assign]
    shop.post()
    (said,) = shown
    assert "the leases of their workers still run: 1, of all endpoints." in said
    assert "leases" not in shop.app.test_cli_runner().invoke(args=["idempotency", "finish"]).output


def test_the_command_names_an_endpoint_that_is_closed() -> None:
    """Its requests wait, and the counts alone would say that there are none."""
    shop = paused()
    closed = Shop(shop.store, shop.clock, policy={"on_abandoned": "takeover"})
    told = closed.app.test_cli_runner().invoke(args=["idempotency", "finish"])

    assert "Not finished, because a fault of its policy closes the endpoint: checkout." in told.output
    assert "closes the endpoint" not in shop.app.test_cli_runner().invoke(args=["idempotency", "finish"]).output


def test_an_application_without_such_endpoints_has_nothing_to_finish() -> None:
    shop = Shop(policy={"finish": "client"})
    told = shop.app.test_cli_runner().invoke(args=["idempotency", "finish"])

    assert (1, True) == (told.exit_code, "nothing to finish" in told.output)


def test_the_life_of_a_record_has_each_try_and_no_step_of_the_janitor() -> None:
    shop = paused()
    shop.users.clear()
    shop.finish()
    (key,) = shop.store._shared.records
    with shop.app.app_context():
        found = SeenRecord(key, shop.store.read(key))  # type: ignore[arg-type]
        journal, steps = operator.recorded_of(found)
        view = operator.show_of(found, steps=True)
        episodes = timeline(
            found.record, Policy(), journal=journal, steps=steps, audit=list(shop.store.audit.entries(key))
        )

    assert (["reserve", "charge"], 1) == ([step.name for step in steps], view.tries)
    assert "The janitor tried to finish it, 1 of 5 times" in [episode.what for episode in episodes]
    shop.users.add("alice")
    shop.clock.advance(30)
    shop.finish()
    done = timeline(
        shop.store.read(key), Policy(), journal=Journal(), steps=(), audit=list(shop.store.audit.entries(key))
    )
    assert {"The janitor finished it", "Completed"} <= {episode.what for episode in done}
