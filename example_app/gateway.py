"""A gateway whose clients stamp every attempt anew: another `timestamp` or `trace_id` is not another request.

Its view commits by itself, so a worker that vanishes leaves an outcome that nobody knows: until the janitor asks.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint

from example_app import simulate
from example_app.auth import caller
from example_app.models import GatewayCharge, db
from example_app.schemas import GatewayChargeInput, json_body
from flask_idempotency import Happened, NeverHappened, Resolution, UnknownOutcome, current_claim

gateway = Blueprint("gateway", __name__, url_prefix="/gateway")


@gateway.post("/charges")
def create() -> tuple[dict[str, Any], int]:
    wanted = json_body(GatewayChargeInput())
    simulate.execution_begins()
    charge = GatewayCharge(
        reference=current_claim.downstream_key("charge") if current_claim else None,
        tenant=caller().tenant,
        account_id=wanted["account_id"],
        amount=wanted["amount"],
        currency=wanted["currency"],
    )
    db.session.add(charge)
    db.session.commit()
    return shown(charge), 201


def what_happened(unknown: UnknownOutcome) -> Resolution:
    """Asks who must know. Here that is our own table; elsewhere it is a payment provider, by the same reference."""
    wanted = db.select(GatewayCharge).filter_by(reference=unknown.downstream_key("charge"))
    charge = db.session.scalar(wanted)
    return NeverHappened() if charge is None else Happened((shown(charge), 201))


def shown(charge: GatewayCharge) -> dict[str, Any]:
    return {
        "charge_id": charge.id,
        "account_id": charge.account_id,
        "amount": charge.amount,
        "currency": charge.currency,
    }
