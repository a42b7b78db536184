"""The service's OpenAPI document, and a page that shows it. Both are for everyone.

The plugin adds what clients must know of keys. Redoc (MIT, from its npm package) stands in redoc/, so the page loads nothing
from another host, and its policy forbids that too.
"""

from __future__ import annotations

import json
from typing import Any

from apispec import APISpec
from apispec.ext.marshmallow import MarshmallowPlugin
from flask import Blueprint, Flask, Response, current_app, render_template_string
from marshmallow import Schema

from example_app.schemas import ChargeInput, CheckoutInput, GatewayChargeInput, InvoiceInput, PaymentInput
from flask_idempotency.openapi.apispec import IdempotencyPlugin

openapi = Blueprint("openapi", __name__, static_folder="redoc", static_url_path="/openapi/redoc")

PUBLIC = frozenset({"openapi.page", "openapi.document", "openapi.static"})
SPEC = "example-openapi"

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>The example: a small payments service</title>
<style>body { margin: 0 }</style>
</head>
<body>
<redoc spec-url="{{ url_for('openapi.document') }}" expand-responses="201,409"></redoc>
<script src="{{ url_for('openapi.static', filename='redoc.standalone.js') }}"></script>
</body>
</html>
"""
# Redoc writes its styles into the page and searches in a worker that it makes from text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


ANSWERS = {
    "Payment": _object(id=TEXT, account=TEXT, amount=NUMBER, currency=TEXT, created=NUMBER),
    "Payments": _object(payments={"type": "array", "items": {"$ref": "#/components/schemas/Payment"}}),
    "Charge": _object(id=TEXT, object=TEXT, amount=NUMBER, currency=TEXT, captured={"type": "boolean"}),
    "Invoice": _object(id=TEXT, customer=TEXT, amount=NUMBER, currency=TEXT),
    "GatewayCharge": _object(charge_id=TEXT, account_id=TEXT, amount=NUMBER, currency=TEXT),
    "Order": _object(order=TEXT, charge=TEXT, item=TEXT, amount=NUMBER),
    "Problem": {**_object(status=NUMBER, code=TEXT), "description": "What is wrong with the request (RFC 9457)."},
    "StripeError": _object(error=_object(type=TEXT, message=TEXT)),
}

BODIES: dict[str, Schema] = {
    "NewPayment": PaymentInput(),
    "PaymentChange": PaymentInput(partial=True),
    "NewCharge": ChargeInput(),
    "NewInvoice": InvoiceInput(),
    "NewGatewayCharge": GatewayChargeInput(),
    "NewOrder": CheckoutInput(),
}


def install(app: Flask) -> None:
    app.register_blueprint(openapi)
    app.extensions[SPEC] = specification(app)


@openapi.get("/openapi")
def page() -> Response:
    response = Response(render_template_string(PAGE))
    response.headers["Content-Security-Policy"] = POLICY
    return response


@openapi.get("/openapi.json")
def document() -> Response:
    # In the order of `specification`, which is also that of the page.
    return Response(json.dumps(current_app.extensions[SPEC].to_dict()), mimetype="application/json")


def specification(app: Flask) -> APISpec:
    spec = APISpec(
        "The example: a small payments service",
        "1",
        "3.1.0",
        plugins=[MarshmallowPlugin(), IdempotencyPlugin(app)],
        info={"description": "Amounts are in the currency's smallest unit: 1050 is 10.50 EUR."},
        security=[{"token": []}],
    )
    spec.components.security_scheme(
        "token", {"type": "http", "scheme": "bearer", "description": "Such as `tok_alice`."}
    )
    for name, schema in ANSWERS.items():
        spec.components.schema(name, schema)
    for name, body in BODIES.items():
        spec.components.schema(name, schema=body)
    spec.components.schemas["PaymentChange"]["minProperties"] = 1
    of_payment = {"name": "payment_id", "in": "path", "required": True, "schema": TEXT}
    of_invoice = {"name": "invoice_id", "in": "path", "required": True, "schema": TEXT}
    spec.path(
        "/payments",
        operations={
            "get": _operation("list_payments", "List your payments", "Payments"),
            "post": _operation("create_payment", "Pay", "Payment", status=201, body="NewPayment"),
        },
    )
    spec.path(
        "/payments/{payment_id}",
        parameters=[of_payment],
        operations={
            "get": _operation("show_payment", "Show a payment", "Payment", errors=(401, 404)),
            "patch": _operation(
                "change_payment", "Change a payment", "Payment", body="PaymentChange", errors=(400, 401, 404, 415)
            ),
        },
    )
    spec.path(
        "/v1/charges",
        operations={
            "post": _operation("create_charge", "Charge, as at Stripe", "Charge", body="NewCharge", stripe=True)
        },
    )
    spec.path(
        "/api/invoices",
        operations={"post": _operation("create_invoice", "Write an invoice", "Invoice", status=201, body="NewInvoice")},
    )
    spec.path(
        "/api/invoices/{invoice_id}",
        parameters=[of_invoice],
        operations={
            "put": _operation(
                "replace_invoice", "Replace an invoice", "Invoice", body="NewInvoice", errors=(400, 401, 404, 415)
            )
        },
    )
    spec.path(
        "/gateway/charges",
        operations={
            "post": _operation("create_gateway_charge", "Charge", "GatewayCharge", status=201, body="NewGatewayCharge")
        },
    )
    spec.path(
        "/checkouts",
        operations={
            "post": _operation(
                "check_out", "Check out", "Order", status=201, body="NewOrder", errors=(400, 401, 402, 415)
            )
        },
    )
    return spec


def _operation(
    name: str,
    summary: str,
    answer: str,
    *,
    status: int = 200,
    body: str | None = None,
    stripe: bool = False,
    errors: tuple[int, ...] = (400, 401, 415),
) -> dict[str, Any]:
    problem = (
        {"application/json": _schema("StripeError")} if stripe else {"application/problem+json": _schema("Problem")}
    )
    responses: dict[str, Any] = {
        str(status): {"description": "Done.", "content": {"application/json": _schema(answer)}}
    }
    for error in errors if body is not None else tuple(each for each in errors if each not in (400, 415)):
        responses[str(error)] = {"description": "Nothing was done.", "content": problem}
    operation: dict[str, Any] = {"operationId": name, "summary": summary, "responses": responses}
    if body is not None:
        # As Stripe's clients write it: metadata[name]=value.
        form = {**_schema(body), "encoding": {"metadata": {"style": "deepObject", "explode": True}}}
        content = {"application/x-www-form-urlencoded": form} if stripe else {"application/json": _schema(body)}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _schema(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}
