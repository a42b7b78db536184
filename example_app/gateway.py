"""A gateway whose clients send a new `timestamp` and `trace_id` with each attempt at the same request.

Its view commits by itself, so a worker that vanishes leaves an unknown outcome, and the janitor calls the resolver
below. A missing charge is no proof: a frozen worker may still make it. So the resolver refuses it first. A charge and its
refusal are the same unique row, and the database accepts one of them.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, abort
from sqlalchemy import delete, select, text, update
from sqlalchemy.exc import IntegrityError, OperationalError

from example_app import simulate
from example_app.auth import caller
from example_app.models import GatewayCharge, GatewayMarker, db
from example_app.problems import problem
from example_app.schemas import GatewayChargeInput, json_body
from flask_idempotency import Happened, NeverHappened, Resolution, StillUnknown, UnknownOutcome, current_claim

LOCK_MS = 5000
"""The longest wait for a row, in milliseconds: the janitor calls one resolver at a time."""

gateway = Blueprint("gateway", __name__, url_prefix="/gateway")


@gateway.post("/charges")
def create() -> tuple[dict[str, Any], int]:
    wanted = json_body(GatewayChargeInput())
    simulate.execution_begins()
    charge = GatewayCharge(
        id=GatewayCharge.new_id(),
        tenant=caller().tenant,
        account_id=wanted["account_id"],
        amount=wanted["amount"],
        currency=wanted["currency"],
    )
    reference = current_claim.downstream_key("charge") if current_claim else None
    if reference is not None:
        # A refusal of earlier attempts does not concern this one. One of this attempt stays, and the INSERT fails.
        earlier = GatewayMarker.refused_up_to < current_claim.fence
        db.session.execute(delete(GatewayMarker).where(GatewayMarker.reference == reference, earlier))
        db.session.add(GatewayMarker(reference=reference, charge=charge.id))
    db.session.add(charge)
    try:
        db.session.commit()
    except IntegrityError:
        db.session.rollback()
        made = made_under(reference)
        if made is None:
            abort(ruled_out())
        if (made.account_id, made.amount, made.currency) != (charge.account_id, charge.amount, charge.currency):
            # A record ends after a week, and a marker does not.
            abort(422, "This key has already made another charge. Send a new key.")
        charge = made
    return shown(charge), 201


def what_happened(unknown: UnknownOutcome) -> Resolution:
    """Find the charge, or rule it out. Here your tables know; elsewhere, query the provider by this reference."""
    reference = unknown.downstream_key("charge")
    charge = made_under(reference)
    if charge is not None:
        return Happened((shown(charge), 201))
    return NeverHappened() if refuse(reference, unknown.record.fence) else StillUnknown()


def refuse(reference: str, fence: int) -> bool:
    """Refuse this charge to the attempt with this fence and to all before it. Return False if one of them may make it."""
    marker = update(GatewayMarker).where(GatewayMarker.reference == reference, GatewayMarker.charge.is_(None))
    try:
        if db.engine.dialect.name == "postgresql":
            # A worker that froze inside its transaction holds the row. SQLite waits for as long as its busy_timeout.
            db.session.execute(text(f"SET LOCAL lock_timeout = {LOCK_MS}"))
        if db.session.execute(marker.values(refused_up_to=fence)).rowcount == 0:  # type: ignore[attr-defined]
            db.session.add(GatewayMarker(reference=reference, refused_up_to=fence))
        db.session.commit()
    except (IntegrityError, OperationalError):
        db.session.rollback()
        return False
    return True


def made_under(reference: str | None) -> GatewayCharge | None:
    by_marker = GatewayCharge.id == GatewayMarker.charge
    return db.session.scalar(select(GatewayCharge).join(GatewayMarker, by_marker).filter_by(reference=reference))


def ruled_out() -> Response:
    # A 503 releases the key, if this attempt still holds it. No charge was made.
    return problem(503, "charge-ruled-out", "This attempt was cancelled, and made no charge. Send the request again.")


def shown(charge: GatewayCharge) -> dict[str, Any]:
    return {
        "charge_id": charge.id,
        "account_id": charge.account_id,
        "amount": charge.amount,
        "currency": charge.currency,
    }
