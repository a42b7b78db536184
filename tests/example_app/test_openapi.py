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


def test_redoc_is_the_one_of_its_npm_package() -> None:
    """redoc 2.5.2, bundles/redoc.standalone.js; its licence and those of its parts stand beside it."""
    digest = sha256((REDOC / "redoc.standalone.js").read_bytes()).hexdigest()

    assert "6beb5aea23b71d09122ee35de8f326e38aec050e774f3bfba1f34e5c36608986" == digest
    assert "MIT License" in (REDOC / "LICENSE").read_text(encoding="utf-8")
    assert (REDOC / "redoc.standalone.js.LICENSE.txt").exists()
