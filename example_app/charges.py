"""Charges in Stripe's dialect, for the real `stripe` clients: forms in, Stripe's objects and errors out."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from flask import Blueprint, Response, jsonify, request
from marshmallow import ValidationError
from werkzeug.exceptions import HTTPException

from example_app import simulate
from example_app.auth import caller
from example_app.models import Charge, db
from example_app.problems import messages_of
from example_app.schemas import ChargeInput

charges = Blueprint("charges", __name__, url_prefix="/v1")


@charges.post("/charges")
def create() -> dict[str, Any]:
    body = form_body()
    simulate.take_wish(body)
    wanted = ChargeInput().load(body)
    simulate.execution_begins()
    charge = Charge(
        tenant=caller().tenant,
        amount=wanted["amount"],
        currency=wanted["currency"],
        description=wanted.get("description"),
        customer=wanted.get("customer"),
        captured=wanted["capture"],
    )
    db.session.add(charge)
    db.session.commit()
    return shown(charge, wanted["metadata"])


def form_body() -> dict[str, Any]:
    """The fields of the form. Those written `metadata[name]` are under `metadata`, and the same for `simulate`."""
    fields: dict[str, Any] = request.form.to_dict()
    for group in ("metadata", "simulate"):
        names = [name for name in fields if name.startswith(f"{group}[") and name.endswith("]")]
        # A field that is called `metadata` itself stays, and is refused: it is no mapping.
        if names:
            fields = {group: {name[len(group) + 1 : -1]: fields.pop(name) for name in names}} | fields
    return fields


def shown(charge: Charge, metadata: dict[str, str]) -> dict[str, Any]:
    return {
        "id": charge.id,
        "object": "charge",
        "amount": charge.amount,
        "amount_captured": charge.amount if charge.captured else 0,
        "amount_refunded": 0,
        "captured": charge.captured,
        "created": charge.created,
        "currency": charge.currency,
        "customer": charge.customer,
        "description": charge.description,
        "failure_code": None,
        "failure_message": None,
        "livemode": False,
        "metadata": metadata,
        "paid": True,
        "refunded": False,
        "status": "succeeded",
    }


@charges.after_request
def name_the_request(response: Response) -> Response:
    # A replay gets another request id: hooks like this run for it too, and their headers are not stored.
    response.headers["Request-Id"] = f"req_{uuid4().hex[:14]}"
    return response


@charges.errorhandler(ValidationError)
def of_validation(error: ValidationError) -> tuple[Response, int]:
    name, messages = next(iter(messages_of(error).items()))
    return jsonify(error={"type": "invalid_request_error", "param": name, "message": " ".join(messages)}), 400


@charges.errorhandler(HTTPException)
def of_http(error: HTTPException) -> tuple[Response, int]:
    status = error.code or 500
    kind = "invalid_request_error" if status < 500 else "api_error"
    return jsonify(error={"type": kind, "message": error.description}), status
