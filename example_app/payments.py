"""Payments in the default dialect: `Idempotency-Key` is required, errors are problem documents.

No view commits: the library does, rows and record together, once the answer is final.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, abort, url_for
from marshmallow import ValidationError

from example_app import simulate
from example_app.auth import caller
from example_app.events import payment_created
from example_app.models import Payment, db
from example_app.schemas import PaymentInput, is_text, json_body
from flask_idempotency import idempotent

payments = Blueprint("payments", __name__, url_prefix="/payments")


@payments.post("")
def create() -> tuple[dict[str, Any], int, dict[str, str]]:
    wanted = json_body(PaymentInput())
    simulate.execution_begins()
    payment = Payment(tenant=caller().tenant, principal=caller().principal, **wanted)
    db.session.add(payment)
    db.session.flush()  # gives it its id
    payment_created(payment)
    return shown(payment), 201, {"Location": url_for(".show", payment_id=payment.id)}


@payments.get("")
def show_all() -> dict[str, Any]:
    mine = db.select(Payment).filter_by(tenant=caller().tenant, principal=caller().principal)
    return {"payments": [shown(payment) for payment in db.session.scalars(mine.order_by(Payment.created, Payment.id))]}


@payments.get("/<payment_id>")
def show(payment_id: str) -> dict[str, Any]:
    return shown(find(payment_id))


@payments.patch("/<payment_id>")
@idempotent(in_flight="wait", wait=5)  # people press "save" twice: the second press waits for the first one's answer
def change(payment_id: str) -> dict[str, Any]:
    changes = json_body(PaymentInput(partial=True))
    if not changes:
        raise ValidationError("Say what to change.")
    payment = find(payment_id)
    simulate.execution_begins()
    for name, value in changes.items():
        setattr(payment, name, value)
    return shown(payment)


def find(payment_id: str) -> Payment:
    payment = db.session.get(Payment, payment_id) if is_text(payment_id) else None
    if payment is None or (payment.tenant, payment.principal) != (caller().tenant, caller().principal):
        abort(404, "You have no such payment.")
    return payment


def shown(payment: Payment) -> dict[str, Any]:
    return {
        "id": payment.id,
        "account": payment.account,
        "amount": payment.amount,
        "currency": payment.currency,
        "created": payment.created,
    }
