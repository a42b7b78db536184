"""What clients may send. Unknown members are refused: a typing error in `amount` must not cost the default amount."""

from __future__ import annotations

import math
import re
from typing import Any

from flask import abort, request
from marshmallow import Schema, ValidationError, fields, post_load, validate

from example_app import simulate

LARGEST_AMOUNT = 99_999_999

# Control characters, line separators, and halves of surrogate pairs. JSON can spell all of them. PostgreSQL refuses NUL, no
# driver can encode a half, and the rest does harm where a person reads it.
_NO_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def json_body(schema: Schema) -> dict[str, Any]:
    """The validated JSON body. Raises `ValidationError`, or 400 and 415 for what is not JSON."""
    try:
        body = request.get_json()
    except RecursionError:
        # Python's parser follows the nesting, and the client decides how deep that is.
        abort(400, "The JSON document is nested too deeply.")
    simulate.take_wish(body)
    loaded: dict[str, Any] = schema.load(body)
    return loaded


def is_text(value: str) -> bool:
    """Whether a database can hold this and a person can read it."""
    return _NO_TEXT.search(value) is None


def text(longest: int, *, required: bool = False) -> fields.String:
    """Text with something in it, of at most this many characters."""
    return fields.String(required=required, validate=[validate.Length(1, longest), _check_text])


def _check_text(value: str) -> None:
    if not is_text(value):
        raise ValidationError("Must not contain control characters or lone surrogates.")
    if not value.strip():
        raise ValidationError("Must not be blank.")


class Amount(fields.Integer):
    """A whole number of the currency's smallest units. In a form it is written in ASCII digits and nothing else."""

    def __init__(self, *, written: bool = False) -> None:
        super().__init__(required=True, strict=not written, validate=validate.Range(1, LARGEST_AMOUNT))
        self._written = written

    def _deserialize(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        # int() also reads "1_000", " 1000", and the digits of other scripts. To Python, True is the integer 1.
        if isinstance(value, bool) or (self._written and re.fullmatch("[0-9]{1,8}", value) is None):
            raise self.make_error("invalid", input=value)
        return super()._deserialize(value, *args, **kwargs)


def _check_timestamp(value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number and not (isinstance(value, str) and len(value) <= 64 and is_text(value)):
        raise ValidationError("Must be a number of seconds, or a date and time as text.")


class Money(Schema):
    """An amount in the currency's smallest unit, 1050 for 10.50 EUR."""

    amount = Amount()
    # Not "$", which also matches before a line break at the end.
    currency = fields.String(
        required=True,
        validate=validate.Regexp(r"[A-Za-z]{3}\Z", error="Three letters, such as EUR."),
        metadata={"pattern": "^[A-Za-z]{3}$"},  # for OpenAPI, where "$" matches at the end alone
    )

    @post_load
    def in_capitals(self, loaded: dict[str, Any], **_: Any) -> dict[str, Any]:
        if "currency" in loaded:
            loaded["currency"] = loaded["currency"].upper()
        return loaded


class PaymentInput(Money):
    account = text(64, required=True)


class CheckoutInput(Schema):
    item = fields.String(required=True, validate=validate.OneOf(("tea", "coffee", "cake")))
    card = text(64, required=True)


class InvoiceInput(Money):
    customer = text(64, required=True)


class GatewayChargeInput(Money):
    account_id = text(64, required=True)
    # Each attempt has other values, and they are no part of the request: see ignore_fields in app.py.
    timestamp = fields.Raw(validate=_check_timestamp, metadata={"type": ["number", "string"]})
    trace_id = text(64)


class ChargeInput(Schema):
    """A form with Stripe's field names. Every value arrives as text."""

    amount = Amount(written=True)
    currency = fields.String(required=True, validate=validate.Regexp(r"[a-z]{3}\Z"), metadata={"pattern": "^[a-z]{3}$"})
    source = text(64)
    customer = text(64)
    description = text(1000)
    capture = fields.Boolean(load_default=True)
    metadata = fields.Dict(keys=text(40), values=text(500), load_default=dict)
    """Stripe's limits."""
