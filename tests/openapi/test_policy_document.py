"""The policy document says what the service does, and no more than a client may know."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import fakeredis
import flask_httpauth  # type: ignore[import-untyped]
import pytest
from flask import Blueprint, Flask, Response, abort, request
from flask_principal import Principal  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from flask_idempotency import Idempotency, NewKeys, Quota, claim_here, current_claim, exempt, idempotent
from flask_idempotency.engine.fingerprint import MAX_CANONICAL_BYTES
from flask_idempotency.engine.policy import RELEASED_BY_DEFAULT, Policy
from flask_idempotency.openapi.policy_document import (
    _OCCURS_IF,
    ENDPOINT,
    NEVER_DESCRIBED,
    SCHEMA_PATH,
    ecma_pattern,
    promise_of,
    statuses_of,
)
from flask_idempotency.settings import load_override
from flask_idempotency.settings.profiles import PROFILES, policy_of
from flask_idempotency.stores.redis.data_loss import RedisDataLossPolicy
from flask_idempotency.stores.redis.store import RedisStore
from flask_idempotency.web.problem_types import PROBLEMS
from flask_idempotency.web.problems import POLICY_PATH
from tests.decisions import decision_of
from tests.lab.programs import NODE

SCHEMA = json.loads(files("flask_idempotency.openapi").joinpath("policy-1.schema.json").read_bytes())


@pytest.fixture(autouse=True)
def without_httpauth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test run as in a process that has not imported Flask-HTTPAuth, whatever other tests have imported."""
    monkeypatch.delitem(sys.modules, "flask_httpauth")


def new_app(**settings: Any) -> Flask:
    """Return an application with one payment endpoint, which publishes its policies."""
    app = Flask("tests.openapi")
    app.config.update(TESTING=True)
    app.post("/payments/<int:id>", endpoint="pay")(lambda id: ("paid", 201))
    Idempotency(app, **{"secret": "s", "publish": True, **settings})
    return app


def published(app: Flask) -> Any:
    response = app.test_client().get(POLICY_PATH)
    assert 200 == response.status_code
    Draft202012Validator(SCHEMA).validate(response.json)
    return response.json


def operation(app: Flask, path: str) -> Any:
    """Return the whole policy of the one operation of this path."""
    document = published(app)
    (found,) = [each for each in document["operations"] if each["path"] == path]
    return {**document["defaults"], **found}


def test_the_document_is_not_served_unless_the_operator_says_so() -> None:
    assert 404 == new_app(publish=False).test_client().get(POLICY_PATH).status_code


def test_a_service_without_its_guard_promises_nothing() -> None:
    assert 404 == new_app(enabled=False).test_client().get(POLICY_PATH).status_code


def test_the_document_names_the_version_of_the_draft() -> None:
    document = published(new_app(docs_url="https://docs.example/problems/"))

    assert 1 == document["version"]
    assert document["specification"].endswith("draft-ietf-httpapi-idempotency-key-header-07")
    assert "https://docs.example/problems/" == document["documentation"]
    assert document["status_url"] is None


def test_the_defaults_are_those_of_an_application_that_configures_nothing() -> None:
    document = published(new_app())

    assert [{"path": "/payments/{id}", "methods": ["POST"]}] == document["operations"]
    assert {
        "header": "Idempotency-Key",
        "aliases": [],
        "form_field": None,
        "required": False,
        "key": {
            "format": "any",
            "pattern": None,
            "characters": "[!-~]",
            "min_length": 1,
            "max_length": 255,
            "case_sensitive": True,
        },
        "void": False,
        "unique_per": [],
        "same_request": {"by": "meaning", "headers": [], "ignored_fields": []},
        "lifetime": 86400,
        "in_flight": "reject",
        # The store in memory forgets all keys at a restart.
        "promise": "at-least-once",
        "statuses": {
            "kept": ["2xx", "3xx", "4xx"],
            "released": [307, 308, 401, 403, 407, 408, 409, 419, 421, 425, 429, 501, 503],
            "exception": "unknown",
        },
        "replay_header": "Idempotency-Replayed",
    } == {name: value for name, value in document["defaults"].items() if name != "problems"}
    assert {"in-flight": 409, "key-reused": 422, "store-unavailable": 503}.items() <= document["defaults"][
        "problems"
    ].items()


def test_an_operation_lists_what_differs() -> None:
    app = new_app(keep=60)
    view = idempotent(
        required=True,
        keep=90,
        header=["Key", "Old-Key"],
        form_field="key",
        key_format="uuid",
        scope="operation",
        fingerprint_headers=["X-Mode"],
        ignore_fields=["/sent_at"],
        in_flight="wait",
        effects="deduplicated",
        replayed_header={"Again": "yes"},
    )(lambda: "x")
    app.put("/orders", endpoint="order")(view)

    (order, payment) = published(app)["operations"]

    assert {"path": "/payments/{id}", "methods": ["POST"]} == payment
    assert {
        "path": "/orders",
        "methods": ["PUT"],
        "required": True,
        "lifetime": 90,
        "header": "Key",
        "aliases": ["Old-Key"],
        "form_field": "key",
        "key": {
            "format": "uuid",
            "pattern": None,
            "characters": "[!-~]",
            "min_length": 36,
            "max_length": 36,
            "case_sensitive": True,
        },
        "unique_per": ["operation"],
        "same_request": {"by": "meaning", "headers": ["X-Mode"], "ignored_fields": ["/sent_at"]},
        "in_flight": "wait",
        "promise": "effect-once",
        "replay_header": "Again",
    } == {name: value for name, value in order.items() if name not in ("problems", "statuses")}
    assert 400 == order["problems"]["missing-key"]


def test_methods_of_one_policy_share_an_entry() -> None:
    app = new_app()
    app.add_url_rule("/a", "a", lambda: "x", methods=["PUT", "PATCH", "GET"])
    app.delete("/a", endpoint="delete")(idempotent(keep=5)(lambda: "x"))

    operations = [each for each in published(app)["operations"] if each["path"] == "/a"]

    assert [(["DELETE"], 5), (["PATCH", "PUT"], None)] == [
        (each["methods"], each.get("lifetime")) for each in operations
    ]


@pytest.mark.parametrize("leave_out", (idempotent(published=False), exempt), ids=("unpublished", "exempt"))
def test_an_operation_can_be_left_out(leave_out: Callable[[Any], Any]) -> None:
    app = new_app()
    app.post("/internal", endpoint="internal")(leave_out(lambda: "x"))
    # It would serve the path if the first were not there.
    app.post("/internal", endpoint="second")(lambda: "x")

    assert ["/payments/{id}"] == [each["path"] for each in published(app)["operations"]]


@pytest.mark.parametrize("mode", ("observe", "warn"))
def test_an_endpoint_that_only_observes_is_not_promised(mode: str) -> None:
    """A path of another operation that fits it names it as an exception."""
    app = new_app()
    app.post("/payments/first", endpoint="first")(idempotent(mode=mode)(lambda: "x"))
    app.post("/payments/<name>", endpoint="named")(lambda name: "x")

    listed = {each["path"]: each.get("except", []) for each in published(app)["operations"]}
    assert "/payments/first" not in listed
    assert "/payments/first" in listed["/payments/{name}"]


def test_an_application_that_only_observes_promises_nothing() -> None:
    assert [] == published(new_app(mode="observe"))["operations"]


def test_a_blueprint_can_be_left_out() -> None:
    app, extension, internal = Flask("tests.openapi"), Idempotency(publish=True, secret="s"), Blueprint("internal", "x")
    app.testing = True
    internal.post("/internal")(lambda: "x")
    app.register_blueprint(internal)
    extension.init_app(app)
    extension.configure(internal, published=False)

    assert [] == published(app)["operations"]


def test_a_path_has_braces_for_each_converter() -> None:
    app = new_app()
    app.post("/<any('a>b', c):kind>/<path:rest>/<string(length=2):x>-<y>", endpoint="odd")(lambda **_: "x")

    assert "/{kind}/{rest}/{x}-{y}" in [each["path"] for each in published(app)["operations"]]


def test_the_policy_of_a_late_configure_is_published() -> None:
    app, extension, shop = Flask("tests.openapi"), Idempotency(publish=True, secret="s"), Blueprint("shop", "x")
    app.testing = True
    shop.post("/orders")(lambda: "x")
    extension.init_app(app)
    app.register_blueprint(shop)
    extension.configure(shop, keep=7)

    assert 7 == operation(app, "/orders")["lifetime"]


def test_publishing_fixes_no_policy() -> None:
    app = new_app()
    published(app)

    assert ("pay", "POST") not in app.extensions["idempotency"].policies.resolved


def test_a_client_that_has_the_document_does_not_get_it_again() -> None:
    client = new_app().test_client()
    first = client.get(POLICY_PATH)
    tag = first.headers["ETag"]
    again = client.get(POLICY_PATH, headers={"If-None-Match": tag})
    other = new_app(keep=5).test_client().get(POLICY_PATH, headers={"If-None-Match": tag})

    assert re.fullmatch(r'"[0-9a-f]{32}"', tag)
    assert (304, b"", tag) == (again.status_code, again.data, again.headers["ETag"])
    assert 200 == other.status_code
    for response in (first, again):
        assert "*" == response.headers["Access-Control-Allow-Origin"]
        assert {"public", "max-age=3600"} == set(response.headers["Cache-Control"].split(", "))
    assert "application/json" == first.headers["Content-Type"]


def test_the_document_leads_to_its_schema() -> None:
    client = new_app().test_client()
    link = client.get(POLICY_PATH).headers["Link"]
    schema = client.get(SCHEMA_PATH)

    assert f'<{SCHEMA_PATH}>; rel="describedby"' == link
    assert (SCHEMA, "application/schema+json") == (schema.get_json(force=True), schema.headers["Content-Type"])
    assert 304 == client.get(SCHEMA_PATH, headers={"If-None-Match": schema.headers["ETag"]}).status_code
    Draft202012Validator.check_schema(SCHEMA)


def test_every_member_is_in_the_schema() -> None:
    """The schema allows members that it does not know, because later services may have more."""
    document = published(new_app())
    policy = SCHEMA["$defs"]["policy"]["properties"]

    assert document.keys() == SCHEMA["properties"].keys()
    # Only a policy that remembers keys for longer than responses has it.
    always = [name for name in policy if name != "remembered"]
    assert list(document["defaults"]) == always == SCHEMA["properties"]["defaults"]["required"]
    remembering = published(new_app(remember=30 * 86400))["defaults"]
    assert (30 * 86400, list(policy)) == (remembering["remembered"], list(remembering))
    assert ("key-expired" in document["defaults"]["problems"], remembering["problems"]["key-expired"]) == (False, 410)
    for name in ("key", "same_request", "statuses"):
        assert document["defaults"][name].keys() == policy[name]["properties"].keys()
        # Documents of earlier releases lack it.
        assert policy[name]["properties"].keys() - set(policy[name]["required"]) <= {"characters"}


HARMS: tuple[Callable[[Any], Any], ...] = (
    lambda document: document.pop("defaults"),
    lambda document: document["defaults"].pop("lifetime"),
    lambda document: document["defaults"].update(promise="exactly-once"),
    lambda document: document["defaults"]["statuses"].update(kept=["200"]),
    lambda document: document["operations"][0].update(path="payments"),
    lambda document: document["operations"][0].update(lifetime=0),
    lambda document: document.update(version=2),
)


def test_the_schema_refuses_what_is_no_policy() -> None:
    document = published(new_app())
    for number, harm in enumerate(HARMS):
        harmed = copy.deepcopy(document)
        harm(harmed)
        assert not Draft202012Validator(SCHEMA).is_valid(harmed), number


def test_hooks_of_the_application_run_before_the_document() -> None:
    """A service that is not for everyone keeps its policies to itself."""
    app = new_app()

    @app.before_request
    def authenticate() -> None:
        if "Authorization" not in request.headers and request.endpoint == ENDPOINT:
            abort(401)

    client = app.test_client()
    shown = client.get(POLICY_PATH, headers={"Authorization": "Bearer t"})

    assert [401, 200] == [client.get(POLICY_PATH).status_code, shown.status_code]
    # Or a shared cache would give it to clients without credentials.
    assert (True, False) == (shown.cache_control.private, shown.cache_control.public)


CREDENTIALS: tuple[dict[str, str], ...] = (
    {"HTTP_COOKIE": "session=s"},
    {"HTTP_X_API_KEY": "k"},
    {"HTTP_X_AMZN_OIDC_IDENTITY": "alice"},
    {"HTTP_X_SHOP_TOKEN": "t"},
    {"REMOTE_USER": "alice"},
    {"SSL_CLIENT_S_DN": "CN=alice"},
)


def test_what_credentials_may_have_opened_is_not_for_a_shared_cache() -> None:
    """All that a principal may come from counts, IDEMPOTENCY_CREDENTIAL_HEADERS too."""
    app = new_app(browser_module="/idempotency.js", credential_headers=["X-Shop-Token"])
    client = app.test_client(use_cookies=False)

    for path in (POLICY_PATH, SCHEMA_PATH, "/idempotency.js"):
        for sent in (*CREDENTIALS, {"HTTP_X_SHOP_TOKEN": " "}, {}):
            cached = client.get(path, environ_overrides=sent).cache_control
            private = sent in CREDENTIALS
            assert (private, not private) == (bool(cached.private), cached.public), (path, sent)


def test_a_mounted_application_tells_the_paths_that_its_clients_see() -> None:
    app = new_app()
    client = Client(DispatcherMiddleware(Flask("front"), {"/shop": app}))
    response = client.get(f"/shop{POLICY_PATH}")
    document: Any = response.json

    assert ["/shop/payments/{id}"] == [each["path"] for each in document["operations"]]
    assert f'</shop{SCHEMA_PATH}>; rel="describedby"' == response.headers["Link"]
    assert ["/payments/{id}"] == [each["path"] for each in published(app)["operations"]]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_refusal_leads_to_the_document(profile: str) -> None:
    """Few programs know the path, which is not registered. Most clients show one line of `Link`."""
    app = new_app(required=True, profile=profile)
    client = Client(DispatcherMiddleware(Flask("front"), {"/shop": app}))
    (link,) = client.post("/shop/payments/1").headers.getlist("Link")

    assert f'</shop{POLICY_PATH}>; rel="service-meta"' in link
    assert 'rel="describedby"' in link
    assert "service-meta" not in new_app(required=True, publish=False).test_client().post("/payments/1").headers["Link"]


def test_a_refusal_in_a_form_of_the_application_leads_to_the_document() -> None:
    app = Flask("tests.openapi")
    app.testing = True
    app.post("/payments", endpoint="pay")(lambda: "x")
    extension = Idempotency(app, secret="s", publish=True, required=True)
    extension.problem_renderer(lambda problem, **_: ({"error": problem.code}, 400))
    response = app.test_client().post("/payments")

    assert ({"error": "missing-key"}, f'<{POLICY_PATH}>; rel="service-meta"') == (
        response.json,
        response.headers["Link"],
    )


def test_the_document_leads_to_the_status_of_keys() -> None:
    app = new_app(status_url="/status")
    client = Client(DispatcherMiddleware(Flask("front"), {"/shop": app}))

    assert "/status" == published(app)["status_url"]
    mounted: Any = client.get(f"/shop{POLICY_PATH}").json
    assert "/shop/status" == mounted["status_url"]


def test_every_host_and_subdomain_serves_the_document() -> None:
    hosts = Flask("tests.openapi", host_matching=True, static_host="x.example")
    subdomains = Flask("tests.openapi", subdomain_matching=True)
    subdomains.config["SERVER_NAME"] = "example.com"
    for app, names in ((hosts, ["a.example", "b.example"]), (subdomains, ["example.com", "a.example.com"])):
        app.testing = True
        Idempotency(app, secret="s", publish=True)
        client = app.test_client()
        for path in (POLICY_PATH, SCHEMA_PATH):
            assert [200, 200] == [client.get(path, base_url=f"http://{name}").status_code for name in names]


def test_callers_that_separate_keys_are_named() -> None:
    app = Flask("tests.openapi")
    app.testing = True
    extension = Idempotency(app, principal=lambda: "alice", secret="s", publish=True)
    extension.tenant_loader(lambda: "acme")

    assert ["tenant", "principal"] == published(app)["defaults"]["unique_per"]


def test_an_extension_that_names_callers_separates_keys() -> None:
    app = new_app()
    Principal(app)

    assert ["principal"] == published(app)["defaults"]["unique_per"]


def test_one_key_of_two_callers_of_flask_httpauth_is_two_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no trace on the application, but some module has imported it."""
    monkeypatch.setitem(sys.modules, "flask_httpauth", flask_httpauth)
    app, auth, runs = new_app(), flask_httpauth.HTTPTokenAuth(), []
    auth.verify_token({"t1": "u1", "t2": "u2"}.get)

    def view() -> str:
        runs.append(1)
        return "x"

    app.post("/orders", endpoint="order")(auth.login_required(claim_here(view)))
    for token in ("t1", "t2"):
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "k"}
        assert 200 == app.test_client().post("/orders", headers=headers).status_code

    order = operation(app, "/orders")
    assert ([1, 1], ["principal"]) == (runs, order["unique_per"])
    assert 403 == order["problems"]["principal-required"]
    assert 500 == operation(app, "/payments/{id}")["problems"]["principal-required"]


@pytest.mark.parametrize("names", (False, True))
def test_a_caller_whom_nobody_can_name_is_a_fault_of_the_service(names: bool) -> None:
    app = new_app()
    if names:
        Principal(app)
    headers = {"Idempotency-Key": "k", "Authorization": "Bearer t"}
    refusal = app.test_client().post("/payments/1", headers=headers)

    assert (403 if names else 500) == refusal.status_code
    assert refusal.status_code == operation(app, "/payments/{id}")["problems"]["principal-required"]


def test_an_operation_that_its_policy_closes_promises_nothing() -> None:
    app = new_app()
    app.post("/orders", endpoint="order")(idempotent(effects="transactional")(lambda: "x"))

    assert 500 == app.test_client().post("/orders", headers={"Idempotency-Key": "k"}).status_code
    assert ["/payments/{id}"] == [each["path"] for each in published(app)["operations"]]


# Problems


def test_what_is_said_of_a_problem_is_said_once_and_of_one_that_there_is() -> None:
    assert not _OCCURS_IF.keys() & NEVER_DESCRIBED
    assert _OCCURS_IF.keys() | NEVER_DESCRIBED <= PROBLEMS.keys()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_problem_has_the_status_of_the_dialect(profile: str) -> None:
    problems = operation(new_app(profile=profile), "/payments/{id}")["problems"]

    assert problems["key-reused"] == {"stripe": 400, "playbook": 409}.get(profile, 422)
    assert 409 == problems["in-flight"]


@pytest.mark.parametrize(
    ("code", "settings"),
    (
        ("missing-key", {"required": True}),
        ("request-too-large", {"max_request_body": 10}),
        ("quota-exceeded", {"quota_records": 5}),
    ),
)
def test_a_problem_is_listed_where_it_can_occur(code: str, settings: dict[str, Any]) -> None:
    assert code not in published(new_app())["defaults"]["problems"]
    assert code in published(new_app(**settings))["defaults"]["problems"]


def test_a_problem_of_a_registered_function_is_listed() -> None:
    app = Flask("tests.openapi")
    app.testing = True
    extension = Idempotency(app, secret="s", publish=True, allow_anonymous=True)
    extension.quota_loader(lambda tenant: Quota(new_keys=NewKeys(5, 60)))
    extension.replay_guard(lambda record: True)
    problems = published(app)["defaults"]["problems"]

    assert {"quota-exceeded": 429, "replay-forbidden": 403}.items() <= problems.items()
    assert "principal-required" not in problems


# What a policy means


PROMISES: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "at-most-once"),
    ({"effects": "marked"}, "at-most-once"),
    ({"effects": "deduplicated"}, "effect-once"),
    ({"effects": "transactional"}, "effect-once"),
    # A failed view is released, and so it is repeated.
    ({"effects": "deduplicated", "on_abandoned": "quarantine"}, "effect-once"),
    ({"effects": "deduplicated", "on_abandoned": "quarantine", "on_error": "quarantine"}, "at-most-once"),
    ({"effects": "marked", "release_statuses": [200]}, "at-most-once"),
    ({"decide": lambda response, error: None}, "at-least-once"),
    ({"decide": lambda response, error: None, "effects": "deduplicated"}, "effect-once"),
    ({"decide": lambda response, error: None, "effects": "marked"}, "at-most-once"),
    ({"release_statuses": [202]}, "at-least-once"),
    ({"release_statuses": [302]}, "at-least-once"),
    ({"on_abandoned": "takeover"}, "at-least-once"),
    ({"effects": "marked", "on_abandoned": "takeover", "on_error": "release"}, "at-most-once"),
    ({"on_error": "release"}, "at-least-once"),
    ({"release_statuses": [500]}, "at-least-once"),
    ({"release_statuses": [422, 503]}, "at-most-once"),
    ({"on_store_down": "allow", "effects": "marked"}, "at-least-once"),
    ({"profile": "playbook"}, "at-least-once"),
    ({"profile": "stripe"}, "at-most-once"),
)


def test_the_promise_is_the_one_that_holds() -> None:
    for values, promise in PROMISES:
        assert promise == promise_of(policy_of(load_override(values, where="test"))), values


POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    **{profile: {"profile": profile} for profile in PROFILES if profile != "ietf"},
    **{f"on-error-{word}": {"on_error": word} for word in ("release", "keep", "quarantine")},
    "keep-500": {"keep_statuses": [500, 503]},
    "release-402": {"release_statuses": [402]},
    "release-500": {"release_statuses": [402, 500]},
    "release-202": {"release_statuses": [202]},
    "release-302": {"release_statuses": ["3xx"]},
    "decide-release": {"decide": lambda response, error: "release"},
    "decide-errors": {"decide": lambda response, error: "release" if error else None},
    "decide-500": {"decide": lambda response, error: "release" if error or response.status_code == 500 else None},
    "takeover": {"on_abandoned": "takeover"},
}
HARMLESS = {*range(400, 500), *RELEASED_BY_DEFAULT}
"""The statuses by which a view reports that it did nothing."""


@pytest.mark.parametrize("effects", ("plain", "marked", "deduplicated"))
def test_where_the_document_says_at_most_once_the_effect_happens_once(effects: str, tmp_path: Path) -> None:
    app = Flask("tests.openapi")
    runs: list[str] = []

    def view() -> Response:
        runs.append(current_claim.key or "")
        if effects == "marked":
            current_claim.point_of_no_return()
        status = int(request.headers["X-Status"])
        if status == 0:
            raise RuntimeError
        return Response("x", status)

    for name, policy in POLICIES.items():
        app.post(f"/{name}", endpoint=name)(idempotent(**policy)(lambda: view()))
    store = f"sqlite:///{tmp_path / 'records.db'}"
    Idempotency(app, secret="s-9f2c47d1e8b35a60e7", store=store, publish=True, effects=effects)
    app.extensions["idempotency"].schema.upgrade()
    document, client = published(app), app.test_client()
    assert len(POLICIES) == len(document["operations"])
    for name, policy in POLICIES.items():
        (found,) = [each for each in document["operations"] if each["path"] == f"/{name}"]
        facts = {**document["defaults"], **found}
        for status in (0, 200, 202, 302, 402, 500, 503):
            for _ in range(2):
                client.post(f"/{name}", headers={facts["header"]: f"{name}-{status}", "X-Status": str(status)})
        mine = [key for key in runs if key.rpartition("-")[0] == name]
        twice = {int(key.rpartition("-")[2]) for key in mine if mine.count(key) > 1} - HARMLESS

        assert mine, name
        assert not (twice and facts["promise"] == "at-most-once"), name
        # Where nothing of this can repeat the view, the document says no less than it could.
        if not twice and effects != "deduplicated" and "decide" not in policy and "on_abandoned" not in policy:
            assert "at-most-once" == facts["promise"], name


@pytest.mark.parametrize(
    ("after_loss", "effects", "promise"),
    (
        ("refuse", "plain", "at-most-once"),
        ("hold", "plain", "at-least-once"),
        ("run", "plain", "at-least-once"),
        ("run", "marked", "at-least-once"),
        ("run", "deduplicated", "effect-once"),
    ),
)
def test_a_store_that_runs_lost_keys_promises_less(after_loss: Any, effects: str, promise: str) -> None:
    redis = fakeredis.FakeRedis()
    rules = RedisDataLossPolicy(after_loss=after_loss)
    app = new_app(store=RedisStore(redis, rules=rules), effects=effects)

    assert promise == operation(app, "/payments/{id}")["promise"]


def test_a_lost_key_runs_again_where_the_document_says_so() -> None:
    redis = fakeredis.FakeRedis()
    runs: list[int] = []

    def view() -> str:
        runs.append(1)
        return "x"

    app = new_app(store=RedisStore(redis, rules=RedisDataLossPolicy(after_loss="run")))
    app.post("/orders", endpoint="order")(view)
    for _ in range(2):
        app.test_client().post("/orders", headers={"Idempotency-Key": "k"})
        redis.flushall()

    assert ([1, 1], "at-least-once") == (runs, operation(app, "/orders")["promise"])


@pytest.mark.parametrize(
    ("values", "kept", "released"),
    (
        ({"effects": "deduplicated"}, ["2xx", "3xx", "4xx"], [*Policy().release_statuses, "5xx"]),
        ({"profile": "stripe"}, ["2xx", "3xx", "4xx", "5xx"], []),
        ({"profile": "playbook"}, ["2xx", "3xx", "4xx"], ["5xx"]),
        ({"keep_statuses": [503]}, ["2xx", "3xx", "4xx", 503], [501]),
        ({"release_statuses": ["4xx"]}, ["2xx", "3xx"], ["4xx", 501, 503]),
        ({"on_error": "keep"}, ["2xx", "3xx", "4xx", "5xx"], []),
    ),
)
def test_statuses_say_what_the_engine_decides(values: dict[str, Any], kept: list[Any], released: list[Any]) -> None:
    lists = statuses_of(policy_of(load_override(values, where="test")))
    usual = {307, 308, 401, 403, 407, 408, 409, 419, 421, 425, 429}

    assert kept == lists["kept"]
    assert lists["exception"] in ("kept", "released", "unknown")
    assert released == [each for each in lists["released"] if each not in usual or each in released]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    ("effects", "more"),
    (("plain", {}), ("deduplicated", {"keep_statuses": [402, 500]}), ("plain", {"release_statuses": [200, "5xx"]})),
)
def test_a_reader_of_the_statuses_comes_to_the_same_decision(profile: str, effects: str, more: dict[str, Any]) -> None:
    policy = policy_of(load_override({"profile": profile, "effects": effects, **more}, where="test"))
    lists = statuses_of(policy)

    def read(status: int) -> str:
        for name in (status, f"{status // 100}xx"):
            for word, listed in (("keep", "kept"), ("release", "released")):
                if name in lists[listed]:
                    return word
        return "quarantine"

    decided = {
        status: decision_of(policy, status=status, error=None, past_point=False).value for status in range(200, 600)
    }
    assert decided == {status: read(status) for status in range(200, 600)}


@pytest.mark.parametrize(
    ("effects", "values"),
    (
        ("plain", {}),
        ("deduplicated", {}),
        ("plain", {"keep_statuses": [500]}),
        ("plain", {"on_error": "keep"}),
        ("plain", {"on_error": "release"}),
        ("plain", {"release_statuses": [500]}),
    ),
)
def test_what_an_unhandled_exception_does_is_told_apart(values: dict[str, Any], effects: str) -> None:
    """`keep_statuses` keeps a 500 that the view returns, and not that of an exception."""
    app, runs = Flask("tests.openapi"), []
    app.config["PROPAGATE_EXCEPTIONS"] = False

    def view() -> str:
        runs.append(1)
        raise RuntimeError

    app.post("/payments", endpoint="pay")(view)
    Idempotency(app, secret="s-9f2c47d1e8b35a60e7", publish=True, effects=effects, **values)
    said, client = published(app)["defaults"]["statuses"]["exception"], app.test_client()
    retries = [client.post("/payments", headers={"Idempotency-Key": "k"}) for _ in range(2)]
    kept = "Idempotency-Replayed" in retries[1].headers

    assert said == ("released" if len(runs) == 2 else "kept" if kept else "unknown")


def test_a_service_that_decides_each_time_lists_no_statuses() -> None:
    assert published(new_app(decide=lambda response, error: None))["defaults"]["statuses"] is None


@pytest.mark.parametrize(("longer", "status"), ((0, 200), (1, 422)))
def test_bodies_are_compared_by_meaning_up_to_the_length_that_the_schema_names(longer: int, status: int) -> None:
    by = SCHEMA["$defs"]["policy"]["properties"]["same_request"]["properties"]["by"]["description"]
    assert f"JSON and plain forms above {MAX_CANONICAL_BYTES // 1024} KiB" in by

    app = new_app()
    app.post("/orders", endpoint="order")(lambda: "x")
    text = "x" * (MAX_CANONICAL_BYTES - len('{"a": "", "b": 1}') + longer)
    bodies = (json.dumps({"a": text, "b": 1}), json.dumps({"b": 1, "a": text}))
    answers = [
        app.test_client().post("/orders", data=body, content_type="application/json", headers={"Idempotency-Key": "k"})
        for body in bodies
    ]

    assert [200, status] == [each.status_code for each in answers]


PATTERNS = {
    r"pay_[0-9a-f]{8}": True,
    r"[A-Z]+-\d{1,4}|x": True,
    r"(?:ab|c)*?": True,
    r"(a(?=b)b)+": True,
    r"[^\s\-\]]{3,}": True,
    r"a\.b\x41[\d.]": True,
    r"(?P<name>a)": False,
    r"(?i)a": False,
    r"(?i:a)": False,
    r"a\Z": False,
    r"\Aa": False,
    r"a*+": False,
    r"(?>a)": False,
    r"a{,3}": False,
    r"a{2": False,
    r"[]a]": False,
    r"[a[]": False,
    r"(a)\1": False,
    r"(?=a)*b": False,
    r"(?#note)a": False,
    r"(a)(?(1)b|c)": False,
    r"a\-b": False,
    r"é": False,
    r"a]": False,
}


def test_a_pattern_is_given_only_if_ecma_262_reads_it() -> None:
    assert all(map(re.compile, PATTERNS))

    given = {pattern: f"^(?:{pattern})$" if readable else None for pattern, readable in PATTERNS.items()}
    assert given == {pattern: ecma_pattern(pattern) for pattern in PATTERNS}


def test_ecma_262_reads_each_pattern_that_is_given() -> None:
    given = [pattern for pattern in PATTERNS if ecma_pattern(pattern)]
    keys = [
        "pay_0123abcd",
        "pay_0123abcd\n",
        "AB-12",
        "x",
        "xx",
        "ababc",
        "",
        "ab",
        "abab",
        "abc",
        "a-c",
        "a.bA7",
        "axbA7",
    ]
    script = "const [patterns, keys] = JSON.parse(process.argv[1]);"
    script += "console.log(JSON.stringify(patterns.map(p => keys.map(k => new RegExp(p, 'u').test(k)))))"
    done = subprocess.run(
        [NODE, "-e", script, json.dumps([[ecma_pattern(each) for each in given], keys])],
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(done.stdout) == [[re.fullmatch(each, key) is not None for key in keys] for each in given]


def test_a_pattern_that_only_python_reads_is_left_out() -> None:
    key = published(new_app(key_format=r"(?P<kind>pay|order)-\d+"))["defaults"]["key"]

    assert ("pattern", None) == (key["format"], key["pattern"])
