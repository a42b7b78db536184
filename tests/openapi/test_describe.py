"""`describe` adds what the service does to an OpenAPI document, and changes nothing that the document says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import reduce
from typing import Any

import pytest
from flask import Blueprint, Flask, jsonify
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from openapi_spec_validator import validate

from flask_idempotency import ConfigurationError, Idempotency, exempt, idempotent
from flask_idempotency.openapi import describe
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.web.problem_types import PROBLEMS
from flask_idempotency.web.problems import Problem, render

OURS = {"$ref": "#/components/schemas/IdempotencyProblem"}
THEIRS = {"type": "object", "properties": {"message": {"type": "string"}}}


def new_app(**settings: Any) -> Flask:
    """Return an application with POST and GET /payments, and whatever `settings` say."""
    app = Flask("tests.openapi")
    app.config.update(TESTING=True)
    app.post("/payments", endpoint="pay")(lambda: ("paid", 201))
    app.get("/payments", endpoint="list")(lambda: "all")
    Idempotency(app, **{"secret": "s", **settings})
    return app


def document(*, path: str = "/payments", version: str = "3.1.0", **operation: Any) -> dict[str, Any]:
    """Return a document of one path, whose POST has these members."""
    post = {"responses": {"201": {"description": "Paid."}}, **operation}
    get = {"responses": {"200": {"description": "All."}}}
    return {
        "openapi": version,
        "info": {"title": "Payments", "version": "1"},
        "paths": {path: {"post": post, "get": get}},
    }


def described(app: Flask, before: dict[str, Any], **options: Any) -> Any:
    """Describe this document. Every test that does so also tests that the copy is valid, and that twice is once."""
    original = deepcopy(before)
    after = describe(before, app, **options)
    assert original == before
    assert after == describe(after, app, **options)
    validate(json.loads(json.dumps(after)))  # JSON turns the statuses of YAML into text
    return after


def post(app: Flask, *, path: str = "/payments", **operation: Any) -> Any:
    return described(app, document(path=path, **operation))["paths"][path]["post"]


def key_of(operation: Mapping[str, Any], name: str = "Idempotency-Key") -> Any:
    (found,) = [each for each in operation["parameters"] if each.get("name", "").lower() == name.lower()]
    return found


# Which documents, and which operations


def test_each_version_of_openapi_3_is_described() -> None:
    for version in ("3.0.0", "3.0.4", "3.1.0", "3.1.2", "3.2.0"):
        after = describe(document(version=version), new_app())

        assert version == after["openapi"]
        assert "x-idempotency" in after["paths"]["/payments"]["post"]
        if not version.startswith("3.2"):
            validate(after)


def test_another_document_is_refused() -> None:
    """Swagger 2.0 has no content by media type: half a description would be wrong."""
    before = {name: value for name, value in document().items() if name != "openapi"}
    others: tuple[dict[str, Any], ...] = ({"swagger": "2.0"}, {"openapi": "3.10.0"}, {"openapi": 3.1}, {})

    for version in (*others, {"openapi": "2.0"}, {"openapi": "3.3.0"}):
        with pytest.raises(ValueError, match=r"3\.0, 3\.1 and 3\.2"):
            describe({**before, **version}, new_app())


def test_an_application_without_the_extension_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Idempotency"):
        describe(document(), Flask("tests.openapi"))


def test_another_mode_for_the_header_is_refused() -> None:
    with pytest.raises(ValueError, match="enforced"):
        describe(document(), new_app(), header="always")  # type: ignore[arg-type]


def test_a_service_without_its_guard_is_described_as_it_is() -> None:
    assert document() == describe(document(), new_app(enabled=False))


def test_operations_without_keys_stay() -> None:
    app = new_app()
    app.post("/login", endpoint="login")(exempt(lambda: "x"))
    before = document()
    before["paths"]["/login"] = {"post": {"responses": {"200": {"description": "In."}}}}
    before["paths"]["/elsewhere"] = deepcopy(before["paths"]["/login"])
    after = described(app, before)

    assert before["paths"]["/payments"]["get"] == after["paths"]["/payments"]["get"]
    assert before["paths"]["/login"] == after["paths"]["/login"]
    assert before["paths"]["/elsewhere"] == after["paths"]["/elsewhere"]


@pytest.mark.parametrize(
    ("servers", "path"),
    (
        ([{"url": "https://pay.example/api"}], "/payments"),
        ([{"url": "/api/"}], "/payments"),
        ([{"url": "https://pay.example/{base}", "variables": {"base": {"default": "api"}}}], "/payments"),
        ([{"url": "https://other.example"}, {"url": "/api"}], "/payments"),
        ([{"url": "/api"}], "/api/payments"),
        ([], "/api/payments"),
    ),
)
def test_a_path_is_found_behind_the_prefix_of_a_server(servers: list[Any], path: str) -> None:
    app = Flask("tests.openapi")
    app.testing = True
    app.post("/api/payments", endpoint="pay")(lambda: "x")
    Idempotency(app, secret="s")
    before = {**document(path=path), "servers": servers}

    assert "x-idempotency" in described(app, before)["paths"][path]["post"]


def test_a_path_is_found_where_the_application_is_mounted() -> None:
    """Its rules have no prefix, and the document has, in its servers or in its paths."""
    for path in ("/payments", "/api/payments"):
        before = {**document(path=path), "servers": [{"url": "/api"}]}
        assert "x-idempotency" in described(new_app(), before)["paths"][path]["post"]


def test_the_whole_path_precedes_one_without_its_prefix() -> None:
    app = new_app()
    app.post("/api/payments", endpoint="other")(exempt(lambda: "x"))
    before = {**document(), "servers": [{"url": "/api"}]}

    assert "x-idempotency" not in described(app, before)["paths"]["/payments"]["post"]


@pytest.mark.parametrize("level", ("path", "operation"))
def test_servers_of_a_path_or_an_operation_precede(level: str) -> None:
    app = new_app()
    app.put("/v2/orders", endpoint="order")(lambda: "x")
    before = {**document(), "servers": [{"url": "/v1"}]}
    item: dict[str, Any] = {"put": {"responses": {"200": {"description": "x"}}}}
    (item if level == "path" else item["put"])["servers"] = [{"url": "/v2"}]
    before["paths"]["/orders"] = item

    assert "x-idempotency" in described(app, before)["paths"]["/orders"]["put"]


def test_parameters_of_a_path_may_have_other_names() -> None:
    app = new_app()
    app.put("/orders/<int:order_id>/items/<path:item>", endpoint="order")(lambda **_: "x")
    path = "/orders/{id}/items/{name}"
    before = document()
    parameters: Any = [{"name": each, "in": "path", "required": True, "schema": {}} for each in ("id", "name")]
    before["paths"][path] = {"put": {"parameters": parameters, "responses": {"200": {"description": "x"}}}}

    assert "x-idempotency" in described(app, before)["paths"][path]["put"]


def test_a_path_item_that_several_paths_refer_to_is_described_for_one() -> None:
    app = new_app()
    app.post("/free", endpoint="free")(exempt(lambda: "x"))
    before = document()
    item = before["paths"]["/payments"]
    before["components"] = {"pathItems": {"Shared": item}}
    before["paths"] = {path: {"$ref": "#/components/pathItems/Shared"} for path in ("/payments", "/free")}
    after = described(app, before)

    assert "x-idempotency" in after["paths"]["/payments"]["post"]
    assert {"$ref": "#/components/pathItems/Shared"} == after["paths"]["/free"]
    assert {"Shared": item} == after["components"]["pathItems"]


def test_operations_that_are_one_object_are_described_apart() -> None:
    """A generator may use one object in several places, and YAML has aliases."""
    app = new_app()
    app.post("/free", endpoint="free")(exempt(lambda: "x"))
    before = document()
    before["paths"]["/free"] = before["paths"]["/payments"]
    responses = before["paths"]["/payments"]["post"]["responses"]
    before["paths"]["/payments"]["get"]["responses"] = responses
    after = described(app, before)

    assert "x-idempotency" not in after["paths"]["/free"]["post"]
    assert {"201"} == after["paths"]["/free"]["post"]["responses"].keys()
    assert {"201": {"description": "Paid."}} == after["paths"]["/payments"]["get"]["responses"]


def test_additional_operations_of_3_2_are_described() -> None:
    app = new_app(methods=["COPY"])
    app.add_url_rule("/files", "copy", lambda: "x", methods=["COPY"])
    before = document(version="3.2.0")
    before["paths"]["/files"] = {"additionalOperations": {"COPY": {"responses": {"200": {"description": "x"}}}}}

    assert "x-idempotency" in describe(before, app)["paths"]["/files"]["additionalOperations"]["COPY"]


def test_describing_fixes_no_policy() -> None:
    app, extension, shop = Flask("tests.openapi"), Idempotency(secret="s"), Blueprint("shop", "x")
    app.testing = True
    shop.post("/payments", endpoint="pay")(lambda: jsonify(1))
    app.register_blueprint(shop)
    extension.init_app(app)
    before = described(app, document())
    extension.configure(shop, keep=60)
    after = described(app, document())

    assert [86400, 60] == [each["paths"]["/payments"]["post"]["x-idempotency"]["lifetime"] for each in (before, after)]
    assert 60.0 == app.extensions["idempotency"].policies.resolve("shop.pay", "POST").policy.keep


# The header


def test_the_header_is_described() -> None:
    key = key_of(post(new_app()))

    assert {"name": "Idempotency-Key", "in": "header", "required": False} == {
        name: key[name] for name in ("name", "in", "required")
    }
    assert (1, 255) == (key["schema"]["minLength"], key["schema"]["maxLength"])
    valid = Draft202012Validator(key["schema"]).is_valid
    assert [True, True, False, False, False] == [valid(each) for each in ("a", "!~{}", "a,b", 'a"b', "a b")]


def test_a_lifetime_is_written_in_seconds() -> None:
    assert "for 7776000 seconds" in key_of(post(new_app(keep=90 * 24 * 3600)))["description"]


@pytest.mark.parametrize(
    ("settings", "header", "required"),
    (
        ({"required": True}, "enforced", True),
        ({"required": True}, "optional", False),
        ({"required": True, "form_field": "key"}, "enforced", False),
        ({}, "enforced", False),
    ),
)
def test_the_header_is_required_as_it_is_enforced(settings: dict[str, Any], header: Any, required: bool) -> None:
    """A form may carry the key instead, and a generated client's transport sends it by itself."""
    after = described(new_app(**settings), document(), header=header)

    assert required is key_of(after["paths"]["/payments"]["post"])["required"]


@pytest.mark.parametrize(
    ("settings", "schema"),
    (
        ({"key_format": "uuid"}, {"format": "uuid", "minLength": 36, "maxLength": 36}),
        ({"key_format": "[a-z]{4}"}, {"pattern": "^(?:[a-z]{4})$"}),
        ({"key_format": "(?P<x>a)"}, {}),
        ({"profile": "x-idempotency", "key_format": "uuid"}, {"format": "uuid", "minLength": 36, "maxLength": 36}),
    ),
)
def test_the_format_of_keys_is_described(settings: dict[str, Any], schema: dict[str, Any]) -> None:
    name = "X-Idempotency-Key" if settings.get("profile") else "Idempotency-Key"

    assert {"type": "string", "minLength": 1, "maxLength": 255, **schema} == key_of(post(new_app(**settings)), name)[
        "schema"
    ]


def test_a_header_that_is_described_already_stays() -> None:
    own = {
        "name": "idempotency-key",
        "in": "header",
        "description": "Ours.",
        "schema": {"type": "string", "maxLength": 64},
    }
    key = key_of(post(new_app(required=True), parameters=[own]))

    schema = {"type": "string", "maxLength": 64, "minLength": 1}
    assert {**own, "required": True, "schema": {**key["schema"], **schema}} == key


def test_a_header_of_the_path_stays_and_the_operation_gets_its_own() -> None:
    before = document()
    before["components"] = {
        "parameters": {
            "Key": {"name": "Idempotency-Key", "in": "header", "description": "x", "schema": {"type": "string"}}
        }
    }
    before["paths"]["/payments"]["parameters"] = [{"$ref": "#/components/parameters/Key"}]
    after = described(new_app(required=True), before)

    assert before["components"]["parameters"] == after["components"]["parameters"]
    assert before["paths"]["/payments"]["parameters"] == after["paths"]["/payments"]["parameters"]
    assert ("x", True) == tuple(
        key_of(after["paths"]["/payments"]["post"])[name] for name in ("description", "required")
    )


def test_a_parameter_of_another_kind_is_another_parameter() -> None:
    own = {"name": "Idempotency-Key", "in": "query", "schema": {}}

    assert 2 == len(post(new_app(), parameters=[own])["parameters"])


# The problems


def test_each_problem_is_described_at_its_status() -> None:
    responses = post(new_app())["responses"]

    assert ["201", "400", "409", "422", "503"] == sorted(responses)
    for status in ("400", "409", "422", "503"):
        media = responses[status]["content"]["application/problem+json"]
        assert OURS == media["schema"]
        assert {int(status)} == {example["value"]["status"] for example in media["examples"].values()}
    assert {"in-flight", "outcome-unknown"} == responses["409"]["content"]["application/problem+json"][
        "examples"
    ].keys()


def test_limits_are_described_where_they_exist() -> None:
    responses = post(new_app(max_request_body=100, quota_records=5))["responses"]

    assert {"413", "429"} <= responses.keys()
    assert "Retry-After" in responses["429"]["headers"]


@pytest.mark.parametrize(
    ("profile", "statuses", "media_type", "name"),
    (
        ("ietf", ["400", "409", "422", "503"], "application/problem+json", "IdempotencyProblem"),
        ("x-idempotency", ["400", "409", "422", "503"], "application/problem+json", "IdempotencyProblem"),
        ("stripe", ["400", "409", "503"], "application/json", "IdempotencyStripeError"),
        ("playbook", ["400", "409", "503"], "application/json", "IdempotencyPlaybookError"),
    ),
)
def test_a_dialect_is_described(profile: str, statuses: list[str], media_type: str, name: str) -> None:
    responses = post(new_app(profile=profile))["responses"]

    assert statuses == sorted(responses.keys() - {"201"})
    for status in statuses:
        assert {"$ref": f"#/components/schemas/{name}"} == responses[status]["content"][media_type]["schema"]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_schema_of_a_dialect_fits_each_problem_and_no_loose_error(profile: str) -> None:
    after = described(new_app(profile=profile), document())
    (schema,) = after["components"]["schemas"].values()
    valid = Draft202012Validator(schema).is_valid
    problems = [
        render(
            Problem(code, status=row.status or 201),
            profile=PROFILES[profile],
            docs_url="x",
            response_class=Flask.response_class,
        )
        for code, row in PROBLEMS.items()
    ]

    assert all(valid(json.loads(each.get_data())) for each in problems)
    assert not valid({"message": "no such account"})
    assert not valid({"code": 422, "status": "Unprocessable Entity", "errors": {}})


def test_what_may_be_retried_has_retry_after() -> None:
    responses = post(new_app())["responses"]

    assert ["409", "503"] == [status for status, each in responses.items() if "Retry-After" in each.get("headers", {})]


def test_a_problem_beside_another_media_type() -> None:
    """flask-smorest and APIFlask document their own 422 in application/json."""
    own: Any = {"description": "Not valid.", "content": {"application/json": {"schema": THEIRS}}}
    response = post(new_app(), responses={"422": own})["responses"]["422"]

    assert "Not valid." == response["description"]
    assert own["content"]["application/json"] == response["content"]["application/json"]
    assert OURS == response["content"]["application/problem+json"]["schema"]


@pytest.mark.parametrize(
    ("theirs", "merged"),
    (
        ({"schema": THEIRS}, [OURS, THEIRS]),
        ({"schema": {"anyOf": [THEIRS, {"type": "null"}]}}, [OURS, THEIRS, {"type": "null"}]),
        ({"schema": {"oneOf": [THEIRS]}}, [OURS, {"oneOf": [THEIRS]}]),
        ({}, [OURS, {}]),
    ),
)
def test_ours_is_the_first_choice_in_one_media_type(theirs: Any, merged: list[Any]) -> None:
    """With a loose schema first, generated clients never read our problem."""
    media_type = "Application/Problem+JSON; charset=utf-8" if theirs else "application/problem+json"
    own = {"description": "x", "content": {media_type: theirs}}
    response = post(new_app(), responses={"422": own})["responses"]["422"]

    assert {media_type} == response["content"].keys()
    assert {"anyOf": merged} == response["content"][media_type]["schema"]


def test_an_example_of_the_application_stays() -> None:
    own = {"description": "x", "content": {"application/problem+json": {"schema": THEIRS, "example": {"message": "x"}}}}
    media = post(new_app(), responses={"422": own})["responses"]["422"]["content"]["application/problem+json"]

    assert {"message": "x"} == media["example"]
    assert "examples" not in media


def test_a_response_that_is_a_reference_is_copied() -> None:
    before = document(
        responses={"201": {"$ref": "#/components/responses/Paid"}, "422": {"$ref": "#/components/responses/Alias"}}
    )
    before["components"] = {
        "responses": {
            "Paid": {"description": "Paid."},
            "Alias": {"$ref": "#/components/responses/NotValid"},
            "NotValid": {"description": "Not valid.", "content": {"application/json": {"schema": THEIRS}}},
        }
    }
    after = described(new_app(), before)
    responses = after["paths"]["/payments"]["post"]["responses"]

    assert before["components"]["responses"] == after["components"]["responses"]
    assert "Idempotency-Replayed" in responses["201"]["headers"]
    assert {"application/json", "application/problem+json"} == responses["422"]["content"].keys()


def test_a_reference_to_another_document_stays() -> None:
    reference = {"$ref": "https://example.com/errors.json#/Conflict"}
    after = describe(document(responses={"201": {"description": "x"}, "409": reference}), new_app())

    assert reference == after["paths"]["/payments"]["post"]["responses"]["409"]


@pytest.mark.parametrize("general", ("default", "4XX"))
def test_what_stood_for_a_status_stands_beside_ours(general: str) -> None:
    """A response of its own would hide that of the range, which can still occur."""
    own = {"description": "Any error.", "content": {"application/json": {"schema": THEIRS}}}
    responses = post(new_app(), responses={"201": {"description": "x"}, general: own})["responses"]

    assert own == responses[general]
    assert {"application/json", "application/problem+json"} == responses["409"]["content"].keys()
    assert "in-flight" in responses["409"]["description"]


def test_statuses_of_yaml_are_numbers() -> None:
    before = document(responses={201: {"description": "Paid."}, 409: {"description": "Taken."}})
    responses = described(new_app(), before)["paths"]["/payments"]["post"]["responses"]

    assert "Idempotency-Replayed" in responses[201]["headers"]
    assert ("Taken.", False) == (responses[409]["description"], "409" in responses)


def test_an_application_that_renders_its_own_problems_knows_how_they_look() -> None:
    app = Flask("tests.openapi")
    app.testing = True
    app.post("/payments", endpoint="pay")(lambda: "x")
    extension = Idempotency(app, secret="s")
    extension.problem_renderer(lambda problem, **_: {"error": problem.code})
    after = described(app, document())

    assert "content" not in after["paths"]["/payments"]["post"]["responses"]["409"]
    assert "Retry-After" in after["paths"]["/payments"]["post"]["responses"]["409"]["headers"]
    assert "components" not in after


def test_a_schema_of_the_same_name_stays() -> None:
    before = document()
    before["components"] = {"schemas": {"IdempotencyProblem": THEIRS}}
    after = described(new_app(), before)

    assert THEIRS == after["components"]["schemas"]["IdempotencyProblem"]
    media = after["paths"]["/payments"]["post"]["responses"]["409"]["content"]["application/problem+json"]
    assert {"$ref": "#/components/schemas/IdempotencyProblem2"} == media["schema"]


# Replays, and the policy


def test_replays_are_marked_on_each_success() -> None:
    statuses = ("200", "201", "2XX", "303", "404", "default")
    responses = post(new_app(), responses={status: {"description": "x"} for status in statuses})["responses"]
    marked = [status for status in statuses if "Idempotency-Replayed" in responses[status].get("headers", {})]

    assert ["200", "201", "2XX", "303"] == marked
    assert ["true"] == responses["201"]["headers"]["Idempotency-Replayed"]["schema"]["enum"]


def test_each_header_that_marks_a_replay_is_described() -> None:
    headers = post(new_app(profile="playbook"))["responses"]["201"]["headers"]

    assert {"X-Idempotency-Replayed": ["true"], "X-Cache-Lookup": ["HIT"]} == {
        name: each["schema"]["enum"] for name, each in headers.items()
    }


def test_a_header_of_a_response_stays() -> None:
    own = {"description": "x", "headers": {"idempotency-replayed": {"schema": {"type": "boolean"}}}}

    assert own == post(new_app(), responses={"201": own})["responses"]["201"]


def test_the_policy_is_described() -> None:
    app = new_app()
    app.put("/payments", endpoint="change")(idempotent(keep=60)(lambda: "x"))
    before = document()
    before["paths"]["/payments"]["put"] = deepcopy(before["paths"]["/payments"]["post"])
    item = described(app, before)["paths"]["/payments"]

    assert [86400, 60] == [item[method]["x-idempotency"]["lifetime"] for method in ("post", "put")]
    assert 422 == item["post"]["x-idempotency"]["problems"]["key-reused"]


def test_what_the_application_says_of_the_policy_stays() -> None:
    before = document()
    before["paths"]["/payments"]["post"]["x-idempotency"] = {"lifetime": 5, "team": "billing"}
    own = described(new_app(), before)["paths"]["/payments"]["post"]["x-idempotency"]

    assert (5, "billing", "reject") == (own["lifetime"], own["team"], own["in_flight"])


HARMS: tuple[Callable[[Any], Any], ...] = (
    lambda document: document.pop("paths"),
    lambda document: document["paths"].update({"/payments": None}),
    lambda document: document["paths"].update({"x-note": {"post": {}}}),
    lambda document: document["paths"]["/payments"].update(post=None),
    lambda document: document["paths"]["/payments"].update(post={"responses": None, "parameters": None}),
    lambda document: document["paths"]["/payments"]["post"].update(parameters=[None], responses={200: None, 409: None}),
    lambda document: document.update(components=None),
    lambda document: document.update(servers=None),
    lambda document: document.update(servers=["/x", None, {"url": None, "variables": {"a": None}}, {"url": "//["}]),
    lambda document: document["paths"]["/payments"]["post"]["responses"].update(
        {"409": {"content": {"application/problem+json": None}}}
    ),
    lambda document: document["paths"].update({"/payments": {"$ref": "#/components/pathItems/Nowhere"}}),
    lambda document: document["paths"].update({"/payments": {"$ref": "#/paths/~1payments"}}),
)


def test_an_unfinished_document_does_no_harm() -> None:
    for harm in HARMS:
        before = document()
        harm(before)

        after = describe(before, new_app())
        assert before["openapi"] == after["openapi"]
        assert after == describe(after, new_app())


def test_a_media_type_that_is_still_to_be_written_is_ours() -> None:
    before: dict[str, Any] = {"description": "Busy.", "content": {"application/problem+json": None}}
    after = post(new_app(), responses={"409": before})["responses"]["409"]

    assert OURS == after["content"]["application/problem+json"]["schema"]


def test_any_part_of_a_document_may_be_still_to_be_written() -> None:
    whole = document(
        servers=[{"url": "/{base}", "variables": {"base": {"default": "api"}}}],
        parameters=[{"$ref": "#/components/parameters/Trace"}],
        responses={
            "201": {"description": "Paid.", "headers": {"Location": {"schema": {"type": "string"}}}},
            "409": {"description": "", "content": {"application/problem+json": {"schema": THEIRS, "examples": {}}}},
            "4XX": {"description": "", "content": {}},
        },
    )
    whole["components"] = {"schemas": {"Payment": THEIRS}, "parameters": {"Trace": {"name": "Trace", "in": "header"}}}

    def parts(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
        for name in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield (*path, name)
            yield from parts(value[name], *path, name)

    for path in parts(whole):
        before = deepcopy(whole)
        *above, last = path
        reduce(lambda value, name: value[name], above, before)[last] = None
        if path != ("openapi",):
            after = describe(before, new_app())
            assert after == describe(after, new_app())


def test_a_reference_may_lead_through_a_list() -> None:
    before = document(parameters=[{"$ref": "#/x-parameters/1"}, {"$ref": "#/x-parameters/7"}])
    before["x-parameters"] = [{}, {"name": "idempotency-key", "in": "header", "description": "Mine."}]
    after = describe(before, new_app())["paths"]["/payments"]["post"]["parameters"]

    assert ["Mine."] == [each["description"] for each in after if "description" in each]


def test_an_operation_that_its_policy_closes_is_not_described() -> None:
    app = new_app()
    app.post("/orders", endpoint="order")(idempotent(effects="transactional")(lambda: "x"))

    assert "x-idempotency" not in post(app, path="/orders")


def test_a_caller_whom_nobody_can_name_is_no_problem_of_the_client() -> None:
    for app, status in ((new_app(), 500), (new_app(principal=lambda: "alice"), 403)):
        assert status == post(app)["x-idempotency"]["problems"]["principal-required"]
