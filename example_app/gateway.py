"""A gateway whose clients stamp every attempt anew: another `timestamp` or `trace_id` is not another request."""

from __future__ import annotations

from typing import Any

from flask import Blueprint

from example_app import simulate
from example_app.auth import caller
from example_app.models import GatewayCharge, db
from example_app.schemas import GatewayChargeInput, json_body

gateway = Blueprint("gateway", __name__, url_prefix="/gateway")


@gateway.post("/charges")
def create() -> tuple[dict[str, Any], int]:
    wanted = json_body(GatewayChargeInput())
    simulate.execution_begins()
    charge = GatewayCharge(
        tenant=caller().tenant,
        account_id=wanted["account_id"],
        amount=wanted["amount"],
        currency=wanted["currency"],
    )
    db.session.add(charge)
    db.session.commit()
    return {
        "charge_id": charge.id,
        "account_id": charge.account_id,
        "amount": charge.amount,
        "currency": charge.currency,
    }, 201
