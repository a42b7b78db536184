"""The part of the tour where the customer is the real `stripe` client, pointed at us instead of at Stripe."""

from __future__ import annotations

import stripe

from example_app.lossy_wire import LossyWire
from example_app.report import Scenarios, Seen
from example_app.shop import Shop

stripe_tour = Scenarios()


@stripe_tour.scenario("one charge, after a retry", rows=1)
def stripe_lost_reply(shop: Shop) -> Seen:
    """The charge is made and the reply is lost on the wire. Stripe's client retries by itself, under one key."""
    with LossyWire(shop.port) as wire:
        wire.lose_next_reply()
        headers = charge(wire.url, amount=500, key="stripe-1")
        lost = wire.lost
    replayed, executions = headers.get("Idempotent-Replayed") == "true", headers["X-Executions"]
    answers = f"{lost} dropped, 200{' replayed' if replayed else ''}"
    return Seen(answers, executions, ok=lost == 1 and replayed and executions == "1")


@stripe_tour.scenario("IdempotencyError", rows=0)
def stripe_key_reused(shop: Shop) -> Seen:
    """The same key for another amount: Stripe's client raises what it raises against Stripe."""
    try:
        charge(shop.url, amount=999, key="stripe-1")
    except stripe.IdempotencyError as error:
        return Seen(f"{error.http_status} {type(error).__name__}", (error.headers or {})["X-Executions"], ok=True)
    return Seen("200", "?", ok=False)


def charge(url: str, *, amount: int, key: str) -> dict[str, str]:
    """The headers of the answer that stripe's client settled on."""
    client = stripe.StripeClient("tok_alice", base_addresses={"api": url}, max_network_retries=2)
    made = client.v1.charges.create(
        {"amount": amount, "currency": "eur", "source": "tok_visa"}, {"idempotency_key": key}
    )
    if made.last_response is None:
        raise AssertionError("the stripe client keeps no response")
    return dict(made.last_response.headers)
