"""What clients may send. Unknown members are refused: a typing error in `amount` must not cost the default amount."""

from __future__ import annotations

from typing import Any

from flask import request
from marshmallow import Schema, fields, post_load, validate

from example_app import simulate

LARGEST_AMOUNT = 99_999_999


def json_body(schema: Schema) -> dict[str, Any]:
    """The validated JSON body. Raises `ValidationError`, or 400 and 415 for what is not JSON."""
    body = request.get_json()
    simulate.take_wish(body)
    loaded: dict[str, Any] = schema.load(body)
    return loaded


def amount(*, strict: bool = True) -> fields.Integer:
    return fields.Integer(required=True, strict=strict, validate=validate.Range(1, LARGEST_AMOUNT))


def name() -> fields.String:
    return fields.String(required=True, validate=validate.Length(1, 64))


class Money(Schema):
    """An amount in the currency's smallest unit, 1050 for 10.50 EUR."""

    amount = amount()
    currency = fields.String(
        required=True, validate=validate.Regexp("[A-Za-z]{3}$", error="Three letters, such as EUR.")
    )

    @post_load
    def in_capitals(self, loaded: dict[str, Any], **_: Any) -> dict[str, Any]:
        if "currency" in loaded:
            loaded["currency"] = loaded["currency"].upper()
        return loaded


class PaymentInput(Money):
    account = name()


class InvoiceInput(Money):
    customer = name()


class GatewayChargeInput(Money):
    account_id = name()
    # Different in every attempt, and no part of what is asked for: see ignore_fields in app.py.
    timestamp = fields.Raw(load_only=True)
    trace_id = fields.String(load_only=True)


class ChargeInput(Schema):
    """Stripe's names, form-encoded: everything arrives as text."""

    amount = amount(strict=False)
    currency = fields.String(required=True, validate=validate.Regexp("[a-z]{3}$"))
    source = fields.String()
    customer = fields.String()
    description = fields.String()
    capture = fields.Boolean(load_default=True)
