"""A document speaks for the paths that its operations serve, on the host that serves it, and for no others."""

from __future__ import annotations

import random
import re
from typing import Any
from unittest.mock import Mock

import pytest
from flask import Blueprint, Flask
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from werkzeug.exceptions import HTTPException
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from flask_idempotency import Idempotency, exempt, idempotent, key_status
from flask_idempotency.openapi import describe, policy_document
from flask_idempotency.web.problems import POLICY_PATH
from tests.openapi.test_policy_document import SCHEMA

KEYED = idempotent(required=True)


def add(app: Flask, rule: str, guard: Any = KEYED, **options: Any) -> None:
    """Add a POST view, which this decorator guards or exempts."""
    app.post(rule, endpoint=f"view{len(app.view_functions)}", **options)(guard(lambda **_: ("paid", 201)))


def new_app(*rules: Any, **options: Any) -> Flask:
    """Return an application with these rules: a path alone is guarded, or comes with its decorator and options."""
    app = Flask("tests.openapi", **options)
    app.testing = True
    for each in rules:
        add(app, *(each if isinstance(each, tuple) else (each,)))
    return app


def published(app: Flask, **request: Any) -> Any:
    if "idempotency" not in app.extensions:
        Idempotency(app, secret="s", publish=True)
    response = app.test_client().get(POLICY_PATH, **request)
    assert 200 == response.status_code
    Draft202012Validator(SCHEMA).validate(response.json)
    return response.json


def listed(app: Flask, **request: Any) -> list[tuple[str, list[str]]]:
    """Return the path of each operation in the document, with its exceptions."""
    return [(each["path"], each.get("except", [])) for each in published(app, **request)["operations"]]


def hosts() -> Flask:
    """Return an application that guards /payments on one host only, and has an internal one."""
    app = new_app(host_matching=True, static_host="static.test")
    add(app, "/payments", host="api.test")
    add(app, "/payments", exempt, host="www.test")
    add(app, "/settlements", host="internal.test")
    add(app, "/orders", host="<shop>.shops.test")
    return app


# Hosts


def test_a_document_is_of_the_host_that_serves_it() -> None:
    app = hosts()
    served = {"api": ["/payments"], "www": [], "internal": ["/settlements"], "a.shops": ["/orders"], "other": []}

    found = {host: [path for path, _ in listed(app, base_url=f"http://{host}.test")] for host in served}
    assert served == found


def test_a_document_is_of_the_subdomain_that_serves_it() -> None:
    app = new_app(subdomain_matching=True)
    app.config["SERVER_NAME"] = "example.com"
    add(app, "/payments", subdomain="api")
    add(app, "/payments", exempt)

    assert [("/payments", [])] == listed(app, base_url="http://api.example.com")
    assert [] == listed(app, base_url="http://example.com")


def test_rules_of_a_subdomain_that_no_request_reaches_are_left_out() -> None:
    app = new_app("/orders")
    add(app, "/payments", subdomain="api")

    assert [("/orders", [])] == listed(app)


def test_of_a_written_host_and_of_any_host_the_written_one_serves_a_path() -> None:
    app = new_app(host_matching=True, static_host="static.test")
    add(app, "/payments", exempt, host="<any>")
    add(app, "/payments", host="api.test")
    add(app, "/orders", host="<any>")
    add(app, "/orders", exempt, host="api.test")

    assert [("/payments", [])] == listed(app, base_url="http://api.test")
    assert [("/orders", [])] == listed(app, base_url="http://other.test")


def test_clients_do_not_fill_the_memory_with_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Mock(wraps=policy_document.policy_document)
    monkeypatch.setattr(policy_document, "policy_document", make)
    app = hosts()
    for number in range(10):
        listed(app, base_url=f"http://s{number}.shops.test")
        listed(app, base_url=f"http://unknown{number}.test")

    assert 2 == make.call_count


SERVERS: tuple[tuple[str, list[str], bool], ...] = (
    ("/payments", [], False),
    ("/payments", ["/"], False),
    ("/payments", ["http://api.test"], True),
    ("/payments", ["http://api.test:80/", "//api.test"], True),
    ("/payments", ["http://www.test"], False),
    ("/payments", ["http://api.test", "http://www.test"], False),
    ("/payments", ["http://{name}.test"], True),
    # A proxy may serve the application under another name. Then what all its hosts do alike is known.
    ("/payments", ["https://behind-a-proxy.example"], False),
    ("/settlements", ["https://behind-a-proxy.example"], True),
    ("/settlements", ["http://www.test"], False),
)


def described(app: Flask, path: str, *servers: str) -> bool:
    """Return whether the operation of this path is described in a document with these servers."""
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Payments", "version": "1"},
        "servers": [{"url": each, "variables": {"name": {"default": "api"}}} for each in servers],
        "paths": {path: {"post": {"responses": {}}}},
    }
    return "x-idempotency" in describe(document, app)["paths"][path]["post"]


def test_an_operation_is_described_as_its_servers_serve_it() -> None:
    app = hosts()
    Idempotency(app, secret="s")

    assert [] == [row for row in SERVERS if described(app, row[0], *row[1]) != row[2]]


def test_an_operation_is_described_as_its_subdomain_serves_it() -> None:
    app = new_app(subdomain_matching=True)
    app.config["SERVER_NAME"] = "example.com"
    add(app, "/payments", subdomain="api")
    add(app, "/payments", exempt, subdomain="www")
    Idempotency(app, secret="s")

    urls = ("https://api.example.com", "https://www.example.com", "https://other.example.com", "/")
    assert [True, False, False, False] == [described(app, "/payments", url) for url in urls]


# Paths


LISTED: tuple[tuple[list[Any], list[Any]], ...] = (
    # Which values reach which rule, no client can see.
    (["/p/<string:id>", ("/p/<int:id>", exempt)], []),
    (["/p/<string:id>", ("/p/<int:number>", idempotent(keep=5))], []),
    (["/p/<string:id>", "/p/<int:id>"], [("/p/{id}", [])]),
    (["/p/<name>", ("/p/<path:rest>", exempt)], [("/p/{name}", [])]),
    (["/p/<int:id>", ("/p/<path:rest>", exempt)], []),
    (["/p/<int:id>"], [("/p/{id}", [])]),
    # What is written in the path is visible.
    (["/p/<name>", ("/p/login", exempt)], [("/p/{name}", ["/p/login"])]),
    (["/p/<name>", ("/p/login/", exempt)], [("/p/{name}", ["/p/login/"])]),
    (["/p/<name>", "/p/login"], [("/p/login", []), ("/p/{name}", [])]),
    (["/p/<name>", ("/p/fast", idempotent(keep=5))], [("/p/fast", []), ("/p/{name}", ["/p/fast"])]),
    (["/p/<name>", ("/p/<int:id>-x", exempt)], [("/p/{name}", ["/p/{id}-x"])]),
    (["/p/<name>", ("/p/<name>/x", exempt)], [("/p/{name}", [])]),
    (["/p/<name>", ("/q/login", exempt)], [("/p/{name}", [])]),
    (["/<a>/x", ("/b/<c>", exempt)], [("/{a}/x", ["/b/{c}"])]),
    (["/b/<c>", ("/<a>/x", exempt)], [("/b/{c}", [])]),
    (["/b/<int:c>", ("/<a>/<b>", exempt)], []),
    # A service keeps the path to itself.
    (["/p/<name>", ("/p/secret", idempotent(published=False, keep=5))], [("/p/{name}", [])]),
    (["/p/<name>", ("/p/broken", idempotent(effects="transactional"))], [("/p/{name}", ["/p/broken"])]),
)


def test_a_path_is_listed_for_what_it_serves() -> None:
    for rules, expected in LISTED:
        assert expected == listed(new_app(*rules)), rules
        assert expected == listed(new_app(*reversed(rules))), rules


def test_a_path_of_which_some_values_are_not_guarded_is_not_described() -> None:
    for guard, expected in ((exempt, False), (idempotent(keep=5), False), (idempotent, True)):
        app = new_app(("/p/<string:id>", idempotent), ("/p/<int:id>", guard))
        Idempotency(app, secret="s")
        assert expected is described(app, "/p/{id}", "/")


PARTS = ("a", "b", "<x>", "<int:x>", "<path:x>", "<x>-b", "a-<int:x>", "<any(a, b):x>")
VALUES = ("a", "b", "c", "1", "a-b", "a-1", "1-b")
GUARDS = (KEYED, exempt, idempotent(keep=5))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_fits_an_entry_gets_what_the_entry_says(seed: int) -> None:
    """A client takes the entry whose path fits and whose exceptions do not. Compare that with Werkzeug's choice."""
    draw, entries = random.Random(seed), 0
    for _ in range(10):
        rules: list[Any] = []
        for _ in range(draw.randint(2, 6)):
            # A rule can have each name once.
            parts = [draw.choice(PARTS).replace("x>", f"x{number}>") for number in range(draw.randint(1, 3))]
            rules.append(("/" + "/".join(parts), draw.choice(GUARDS)))
        app = new_app(*rules)
        document = published(app)
        entries += len(document["operations"])
        policies, adapter = app.extensions["idempotency"].policies, app.url_map.bind("localhost")
        for _ in range(100):
            path = "/" + "/".join(draw.choice(VALUES) for _ in range(draw.randint(1, 3)))
            try:
                endpoint, _ = adapter.match(path, method="POST")
            except HTTPException:
                continue
            policy = policies.resolve(endpoint, "POST")
            for each in document["operations"]:
                if fits(each["path"], path) and not any(fits(other, path) for other in each.get("except", ())):
                    said = {**document["defaults"], **each}
                    assert (False, policy.policy.keep) == (policy.exempt, said["lifetime"]), (
                        path,
                        [rule for rule, _ in rules],
                    )
    assert entries > 5


def fits(template: str, path: str) -> bool:
    literals = [re.escape(each) for each in re.split(r"\{\w+\}", template)]
    return re.fullmatch("[^/]+".join(literals), path) is not None


def test_a_thousand_operations_are_compared_soon_enough() -> None:
    app = new_app(*(f"/things{number}/<int:id>/parts" for number in range(300)), ("/<name>", exempt))
    Idempotency(app, secret="s", publish=True)

    assert 300 == len(listed(app))


# The status of keys


def with_status(prefix: str, **settings: Any) -> Flask:
    """Return an application with a status view on a blueprint, and operations on it, in a nested one and beside it."""
    app = new_app("/orders")
    shop, inner = Blueprint("shop", __name__), Blueprint("inner", __name__)
    shop.get("/status")(key_status)
    shop.post("/payments/<int:id>", endpoint="pay")(KEYED(lambda **_: "x"))
    inner.post("/refunds", endpoint="refund")(KEYED(lambda **_: "x"))
    shop.register_blueprint(inner)
    app.register_blueprint(shop, url_prefix=prefix)
    Idempotency(app, secret="s", publish=True, **settings)
    return app


@pytest.mark.parametrize("general", (None, "/status"))
@pytest.mark.parametrize("prefix", ("/shop", "/<tenant>"))
def test_an_operation_leads_to_the_status_view_of_its_blueprint(prefix: str, general: str | None) -> None:
    document = published(with_status(prefix, status_url=general))
    root = prefix.replace("<", "{").replace(">", "}")
    found = {each["path"]: each.get("status_url", document["status_url"]) for each in document["operations"]}

    assert general == document["status_url"]
    assert {
        "/orders": general,
        f"{root}/payments/{{id}}": f"{root}/status",
        f"{root}/refunds": f"{root}/status",
    } == found


def test_an_address_of_the_document_answers_for_its_operation() -> None:
    app = with_status("/shop")
    client = Client(DispatcherMiddleware(Flask("front"), {"/mounted": app}))
    document: Any = client.get(f"/mounted{POLICY_PATH}").json
    (payment,) = [each for each in document["operations"] if each["path"] == "/mounted/shop/payments/{id}"]
    path, key = "/mounted/shop/payments/1", {"Idempotency-Key": "k"}
    assert 200 == client.post(path, headers=key).status_code
    answer = client.get(payment["status_url"], query_string={"method": "POST", "path": path}, headers=key)

    assert (200, "done") == (answer.status_code, (answer.json or {})["state"])


def test_a_status_view_of_the_application_is_for_all() -> None:
    app = new_app("/orders")
    app.get("/keys", endpoint="keys")(key_status)

    assert "/keys" == published(app)["status_url"]


@pytest.mark.parametrize("rule", ("/<other>/status", "/status"))
def test_a_status_view_that_the_operation_cannot_name_is_none(rule: str) -> None:
    """It has a parameter that the operation does not have, or it is on another host."""
    app = new_app("/orders", host_matching=True, static_host="static.test") if rule == "/status" else new_app("/orders")
    options: Any = {"host": "keys.test"} if rule == "/status" else {}
    shop_options: Any = {"host": "api.test"} if rule == "/status" else {}
    shop = Blueprint("shop", __name__)
    shop.get(rule, **options)(key_status)
    shop.post("/payments", endpoint="pay", **shop_options)(KEYED(lambda **_: "x"))
    app.register_blueprint(shop)
    document = published(app, base_url="http://api.test")
    (payment,) = [each for each in document["operations"] if each["path"] == "/payments"]

    assert None is document["status_url"] is payment.get("status_url")


def test_exceptions_are_paths_that_clients_of_a_mounted_application_see() -> None:
    app = new_app("/p/<name>", ("/p/login", exempt))
    Idempotency(app, secret="s", publish=True)
    client = Client(DispatcherMiddleware(Flask("front"), {"/shop": app}))
    document: Any = client.get(f"/shop{POLICY_PATH}").json

    assert [("/shop/p/{name}", ["/shop/p/login"])] == [
        (each["path"], each["except"]) for each in document["operations"]
    ]
