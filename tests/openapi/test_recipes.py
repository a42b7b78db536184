"""The recipes of docs/guides/openapi.md, with the frameworks themselves: what they serve is valid, and says what happens."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import pytest
from apispec import APISpec
from flask import Flask
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from openapi_spec_validator import validate

from docs.generate import HERE
from flask_idempotency import Idempotency
from flask_idempotency.openapi.apispec import IdempotencyPlugin
from tests.docs.test_pages import BLOCK, surroundings

SECTIONS = {
    part.partition("\n")[0]: BLOCK.findall(part)[0]
    for part in re.split(r"^##? ", (HERE / "guides" / "openapi.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    if BLOCK.search(part) and "import schemathesis" not in part
}
BY_HAND = "Document your API with OpenAPI"
SERVED = {
    BY_HAND: "/openapi.json",
    "flask-smorest": "/openapi.json",
    "APIFlask": "/openapi.json",
    "flasgger": "/apispec_1.json",
    "flask-openapi3": "/openapi/openapi.json",
}


def served(section: str, *, version: str | None = None) -> tuple[Flask, Any]:
    """Run the recipe of this section. Return its application, and the document that it serves."""
    names = {**surroundings(), "__name__": "documented"}
    recipe = SECTIONS[section].replace('"3.1.0"', f'"{version}"') if version else SECTIONS[section]
    exec(compile(recipe, section, "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    app = names["app"]
    app.config["SECRET_KEY"] = "s"
    return app, app.test_client().get(SERVED[section]).get_json()


def test_every_recipe_is_run() -> None:
    assert SECTIONS.keys() == {*SERVED, "apispec"}


@pytest.mark.parametrize(
    ("section", "version"),
    (*((section, None) for section in SERVED), ("flask-smorest", "3.0.3"), (BY_HAND, "3.0.4")),
)
def test_a_recipe_serves_a_valid_document(section: str, version: str | None) -> None:
    app, document = served(section, version=version)
    (path,) = document["paths"]
    post = document["paths"][path]["post"]
    problem = document["components"]["schemas"]["IdempotencyProblem"]

    validate(document)
    assert version is None or version == document["openapi"]
    assert document == app.test_client().get(SERVED[section]).get_json()
    assert [True] == [each["required"] for each in post["parameters"] if each["name"] == "Idempotency-Key"]
    assert "Idempotency-Replayed" in post["responses"]["201"]["headers"]
    assert post["x-idempotency"]["required"] is True
    for status in ("400", "409", "422", "503"):
        ours = post["responses"][status]["content"]["application/problem+json"]["schema"]
        assert {"$ref": "#/components/schemas/IdempotencyProblem"} == ours
    # And the service does what its document says.
    client, headers = app.test_client(), {"Idempotency-Key": "k"}
    refused = client.post(path)
    assert 400 == refused.status_code
    Draft202012Validator(problem).validate(refused.json)
    assert [None, "true"] == [client.post(path, headers=headers).headers.get("Idempotency-Replayed") for _ in range(2)]


@pytest.mark.parametrize("version", ("3.0.3", "3.1.0"))
def test_the_422_of_flask_smorest_stands_beside_ours(version: str) -> None:
    block = "@payments.arguments(Payment)\n@idempotent"
    fields = "from marshmallow import Schema, fields\nclass Payment(Schema):\n    amount = fields.Integer()\n\n"
    recipe = fields + SECTIONS["flask-smorest"].replace("@idempotent", block).replace("def pay():", "def pay(payment):")
    names = surroundings()
    exec(recipe.replace('"3.1.0"', f'"{version}"'), names)  # noqa: S102 - our own page, with a body
    document = names["app"].test_client().get("/openapi.json").get_json()

    validate(document)
    response = document["paths"]["/payments/"]["post"]["responses"]["422"]
    assert {"application/json", "application/problem+json"} == response["content"].keys()
    assert {"application/json"} == document["components"]["responses"][HTTPStatus(422).name]["content"].keys()


def test_the_422_of_apiflask_stands_beside_ours() -> None:
    fields = "from apiflask import Schema, fields\nclass Payment(Schema):\n    amount = fields.Integer()\n\n"
    recipe = fields + SECTIONS["APIFlask"].replace("@idempotent", "@app.input(Payment)\n@idempotent")
    names = surroundings()
    exec(recipe.replace("def pay():", "def pay(json_data):"), names)  # noqa: S102 - our own page, with a body
    document = names["app"].test_client().get("/openapi.json").get_json()

    validate(document)
    content = document["paths"]["/payments"]["post"]["responses"]["422"]["content"]
    assert {"application/json", "application/problem+json"} == content.keys()


def test_flasgger_without_its_setting_is_refused() -> None:
    recipe = SECTIONS["flasgger"].replace('config={"openapi": "3.0.3"}', "config={}")
    names = surroundings()
    exec(recipe, names)  # noqa: S102 - our own page, with a mistake
    app = names["app"]
    app.testing = True

    with pytest.raises(ValueError, match=r"swagger: '2\.0'"):
        app.test_client().get("/apispec_1.json")


def payments(*plugins: Any, **options: Any) -> APISpec:
    """Return a specification of one path."""
    spec = APISpec("Payments", "1", plugins=plugins, openapi_version="3.1.0", **options)
    spec.components.response("Paid", {"description": "Paid."})
    spec.path("/payments", operations={"post": {"responses": {"201": "Paid"}}})
    return spec


def new_app() -> Flask:
    app = Flask("tests.openapi")
    app.testing = True
    app.post("/payments", endpoint="pay")(lambda: "x")
    return app


def test_the_plugin_describes_what_was_configured_last() -> None:
    app = new_app()
    spec = payments(IdempotencyPlugin(app))
    Idempotency(app, secret="s", keep=60)

    assert 60 == spec.to_dict()["paths"]["/payments"]["post"]["x-idempotency"]["lifetime"]
    assert "x-idempotency" in spec.to_yaml()


def test_the_plugin_leaves_the_specification_as_it_is() -> None:
    """`to_dict` returns dicts that the specification goes on using."""
    app = new_app()
    Idempotency(app, secret="s")
    plain, spec = payments(), payments(IdempotencyPlugin(app))

    first = spec.to_dict()

    assert plain.to_dict()["paths"] == {path: dict(item) for path, item in spec._paths.items()}
    assert first == spec.to_dict()
    assert {"responses": {"Paid": {"description": "Paid."}}}.items() <= first["components"].items()


def test_the_plugin_takes_the_current_application() -> None:
    app = new_app()
    Idempotency(app, secret="s", required=True)
    spec = payments(IdempotencyPlugin(header="optional"))

    with app.app_context():
        (key,) = spec.to_dict()["paths"]["/payments"]["post"]["parameters"]

    assert key["required"] is False
