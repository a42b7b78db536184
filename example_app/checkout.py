"""A checkout with four effects: it reserves stock, charges a card, writes an order and sends a mail.

Each effect is a durable step. After a crash, the client's retry goes on after the steps that are done. What stands outside
steps runs again in every attempt.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint

from example_app import simulate
from example_app.auth import caller
from example_app.models import Order, db
from example_app.problems import problem
from example_app.providers import CardDeclined, providers
from example_app.schemas import CheckoutInput, json_body
from example_app.shop import PRICES
from flask_idempotency import Resolution, StillUnknown, UnknownOutcome, current_step, durable_step, idempotent

checkouts = Blueprint("checkouts", __name__, url_prefix="/checkouts")


@durable_step("reserve", effects="deduplicated")
def reserve(item: str) -> str:
    return providers().reserve(item, key=current_step.downstream_key)


@durable_step("charge", harmless=(CardDeclined,))
def charge(card: str, amount: int) -> str:
    made = providers().charge(card, amount, key=current_step.downstream_key)
    simulate.moment("in_charge")
    return made


@durable_step("save", effects="transactional")
def save(item: str, amount: int, charged: str) -> str:
    simulate.moment("save")
    order = Order(tenant=caller().tenant, principal=caller().principal, item=item, amount=amount, charge=charged)
    db.session.add(order)
    db.session.flush()  # gives it its id
    return order.id


@durable_step("mail", effects="deduplicated", intent=False)
def send_mail(order: str) -> None:
    providers().send_mail(caller().principal, f"Thank you for order {order}.", key=current_step.downstream_key)


@checkouts.post("")
@idempotent(steps=(reserve, charge, save, send_mail))
def create() -> Any:
    wanted = json_body(CheckoutInput())
    simulate.execution_begins()
    item, amount = wanted["item"], PRICES[wanted["item"]]
    reserve(item)
    try:
        charged = charge(wanted["card"], amount)
    except CardDeclined:
        return problem(402, "card-declined", "The card was declined. Nothing was charged.")
    simulate.moment("behind_charge")
    order = save(item, amount, charged)
    send_mail(order)
    return {"order": order, "charge": charged, "item": item, "amount": amount}, 201


def what_became_of_it(unknown: UnknownOutcome) -> Resolution:
    """Find the charge of a checkout whose worker vanished while it charged. The client's next retry then goes on."""
    for step in unknown.steps:
        if step.name == "charge" and step.in_doubt:
            charged = providers().find_charge(key=step.downstream_key)
            return StillUnknown() if charged is None else step.completed(charged)
    return StillUnknown()
