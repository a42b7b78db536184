"""A checkout page for people: a plain form, and the same form sent by the browser module.

Both pay once, whether you click twice, reload, go back or lose the reply. The page lists what you have paid.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, abort, make_response, redirect, render_template, request, url_for

from example_app.auth import caller
from example_app.events import payment_created
from example_app.models import Payment, db
from example_app.payments import find

shop = Blueprint("shop", __name__, url_prefix="/shop")

PRICES = {"tea": 450, "coffee": 690, "cake": 820}
"""In cents."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)


@shop.get("")
def page() -> Response:
    mine = db.select(Payment).filter_by(tenant=caller().tenant, principal=caller().principal)
    return _page("shop.html", prices=PRICES, paid=list(db.session.scalars(mine.order_by(Payment.created, Payment.id))))


@shop.post("/orders")
def order() -> Any:
    item = request.form.get("item", "")
    if item not in PRICES:
        abort(400, "Choose tea, coffee or cake.")
    payment = Payment(
        tenant=caller().tenant, principal=caller().principal, account=item, amount=PRICES[item], currency="EUR"
    )
    db.session.add(payment)
    db.session.flush()  # gives it its id
    payment_created(payment)
    return redirect(url_for(".paid", payment_id=payment.id), 303)


@shop.get("/orders/<payment_id>")
def paid(payment_id: str) -> Response:
    return _page("paid.html", payment=find(payment_id))


def _page(template: str, **values: Any) -> Response:
    response = make_response(render_template(template, **values))
    response.headers["Content-Security-Policy"] = POLICY
    # It is about one visitor. Without JavaScript, a page from the cache would also send an old key.
    response.headers["Cache-Control"] = "no-store"
    return response
