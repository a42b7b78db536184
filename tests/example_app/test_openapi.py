"""The example's OpenAPI document agrees with its routes, and its page needs no other host."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from openapi_spec_validator import validate

from example_app.openapi import ANSWERS
from flask_idempotency.openapi.operations import Application
from tests.example_app.conftest import Customer

REDOC = Path(__file__).parents[2] / "example_app" / "redoc"


@pytest.fixture
def document(app: Flask) -> Any:
    return app.test_client().get("/openapi.json").get_json()


def test_the_document_is_valid(document: Any) -> None:
    validate(document)


def test_every_operation_with_a_key_is_described(app: Flask, document: Any) -> None:
    guarded = {
        (each.path, each.method)
        for each in Application(app, app.extensions["idempotency"]).operations()
        if each.guarded
    }
    described = {
        (path, method.upper())
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if "x-idempotency" in operation
    }

    assert guarded - {("/simulate/brief", "POST")} == described


def test_a_payment_has_the_form_that_the_document_says(customer: Customer, document: Any) -> None:
    paid = customer.pay("key-1")

    assert 201 == paid.status_code
    Draft202012Validator(ANSWERS["Payment"]).validate(paid.get_json())
    required = [each for each in document["paths"]["/payments"]["post"]["parameters"] if each["required"]]
    assert ["Idempotency-Key"] == [each["name"] for each in required]


def test_what_clients_must_know_is_for_everyone(app: Flask) -> None:
    for path in ("/openapi", "/openapi.json", "/openapi/redoc/redoc.standalone.js", "/.well-known/idempotency"):
        with app.test_client().get(path) as response:
            assert 200 == response.status_code, path


def test_the_page_loads_nothing_from_another_host(app: Flask) -> None:
    """Redoc asks a CDN for its maker's logo, and the policy forbids that."""
    response = app.test_client().get("/openapi")
    policy = dict(each.strip().partition(" ")[::2] for each in response.headers["Content-Security-Policy"].split(";"))

    assert "'none'" == policy["default-src"]
    assert {"'self'", "'none'", "'unsafe-inline'", "data:", "blob:"} >= set(" ".join(policy.values()).split())
    assert "'unsafe-inline'" not in policy["script-src"]
    assert [] == re.findall(r"(?:https?:)?//[^\s\"'<>]+", response.text)
    for source in re.findall(r'(?:src|spec-url)="([^"]+)"', response.text):
        with app.test_client().get(source) as found:
            assert 200 == found.status_code


def test_redoc_is_the_one_that_its_note_names() -> None:
    """Unchanged from its npm package, and with a DOMPurify that has no known advisory. The licences stand beside it."""
    note = (REDOC / "README.md").read_text(encoding="utf-8")
    script = (REDOC / "redoc.standalone.js").read_bytes()
    licences = (REDOC / "redoc.standalone.js.LICENSE.txt").read_text(encoding="utf-8")
    purify = re.search(r"@license DOMPurify (\d+)\.(\d+)\.(\d+)", licences)
    redoc = re.search(r'Version: "([^"]+)"', licences)

    assert sha256(script).hexdigest() in note
    assert purify is not None
    assert (3, 4, 13) <= tuple(map(int, purify.groups()))
    # Its code bears the version too, so the two files are of one build.
    version = ".".join(purify.groups())
    assert f'.version="{version}"'.encode() in script
    assert f"DOMPurify | {version}:" in note
    assert redoc is not None
    assert f"redoc@{redoc[1]}`" in note
    assert "MIT License" in (REDOC / "LICENSE").read_text(encoding="utf-8")
