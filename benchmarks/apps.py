"""The applications that a run compares, and their requests and responses.

One payments service, alone and with this library. `by_hand` and `peer` guard the same service in their way.
"""

from __future__ import annotations

import json
import math
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from flask import Flask, Response, request, request_finished

from flask_idempotency import Idempotency, activity
from flask_idempotency.codec import canonical
from flask_idempotency.engine.fingerprint import json_digest

APP, PRINCIPAL, SECRET = "benchmark", "alice", "benchmark-9f2c47d1e8b35a60"
LEASE_SECONDS = 30
# By hand and the peer renew no lease. So theirs outlast the run that holds a key in flight.
UNRENEWED_SECONDS = 3600
KEEP_SECONDS = 24 * 3600
LOCATION = "/payments/ch_3MmlLrLkdIwHu7ix0snN0B15"

# 300 bytes of JSON go in.
PAYMENT = json.dumps(
    {
        "account": "acct_1PgafTB7WZ01zgkW",
        "amount": 125000,
        "currency": "eur",
        "description": "Invoice 2024-00731, consulting in June",
        "reference": "RF18539007547034",
        "beneficiary": {"name": "Hanna Lindqvist", "iban": "SE3550000000054910000003", "country": "SE"},
        "metadata": {"order": "6735", "by": "web"},
    }
).encode()

# One digit differs: a mismatch.
OTHER_PAYMENT = PAYMENT.replace(b"125000", b"125001")

# 2 KB of JSON come out, in the shape of a public card API's charge, with its many nulls and opaque ids. Random bytes would
# not compress at all, and a repeated line would compress too well. That decides how much memory a record takes, so
# LIST_ANSWER, whose entries repeat names, stands beside it.
ANSWER = json.dumps(
    {
        "id": "ch_3MmlLrLkdIwHu7ix0snN0B15",
        "object": "charge",
        "amount": 125000,
        "amount_captured": 125000,
        "amount_refunded": 0,
        "application": None,
        "application_fee": None,
        "application_fee_amount": None,
        "balance_transaction": "txn_3MmlLrLkdIwHu7ix0uke3Ezy",
        "billing_details": {
            "address": {
                "city": "Stockholm",
                "country": "SE",
                "line1": "Drottninggatan 71 C",
                "line2": None,
                "postal_code": "111 36",
                "state": None,
            },
            "email": "hanna@lindqvist.example",
            "name": "Hanna Lindqvist",
            "phone": None,
        },
        "calculated_statement_descriptor": "LINDQVIST CONSULTING",
        "captured": True,
        "created": 1719913272,
        "currency": "eur",
        "customer": None,
        "description": "Invoice 2024-00731, consulting in June",
        "disputed": False,
        "failure_balance_transaction": None,
        "failure_code": None,
        "failure_message": None,
        "fraud_details": {},
        "invoice": None,
        "livemode": True,
        "metadata": {"order": "6735"},
        "on_behalf_of": None,
        "outcome": {
            "network_status": "approved_by_network",
            "reason": None,
            "risk_level": "normal",
            "risk_score": 32,
            "seller_message": "Payment complete.",
            "type": "authorized",
        },
        "paid": True,
        "payment_intent": None,
        "payment_method": "card_1MmlLrLkdIwHu7ixIJwEWSNR",
        "payment_method_details": {
            "card": {
                "brand": "visa",
                "checks": {"address_line1_check": None, "address_postal_code_check": None, "cvc_check": None},
                "country": "SE",
                "exp_month": 3,
                "exp_year": 2027,
                "fingerprint": "mToisGZ01V71BCos",
                "funding": "credit",
                "installments": None,
                "last4": "4242",
                "mandate": None,
                "network": "visa",
                "three_d_secure": None,
                "wallet": None,
            },
            "type": "card",
        },
        "receipt_email": None,
        "receipt_number": None,
        "receipt_url": "https://pay.example/receipts/payment/CAcaFwoVYWNjdF8xTTJKVGtMa2RJd0h1N2l4KOvG06AGMgZfBXyr1aw6",
        "refunded": False,
        "refunds": {
            "object": "list",
            "data": [],
            "has_more": False,
            "total_count": 0,
            "url": "/v1/charges/ch_3MmlLrLkdIwHu7ix0snN0B15/refunds",
        },
        "review": None,
        "shipping": None,
        "source_transfer": None,
        "statement_descriptor": None,
        "status": "succeeded",
        "transfer_data": None,
        "transfer_group": None,
    }
).encode()


def payments(count: int) -> bytes:
    data = [
        {
            "id": f"pay_{zlib.crc32(number.to_bytes(2, 'big')):08x}",
            "object": "payment",
            "amount": 1250 + 731 * number,
            "currency": "eur",
            "created": 1719913272 + 3607 * number,
            "description": f"Invoice 2024-{731 + number:05}",
            "account": "acct_1PgafTB7WZ01zgkW",
            "status": "succeeded",
        }
        for number in range(count)
    ]
    return json.dumps({"object": "list", "url": "/v1/payments", "has_more": False, "data": data}).encode()


LIST_ANSWER = payments(10)
# As large as the largest response that the library keeps by default.
LARGE_ANSWER = payments(1270)

NOTHING: Mapping[str, Any] = MappingProxyType({})
View = Callable[[], Response]


class Gate:
    """Hold a request at `POST /held`, so that its key stays in flight while other requests are timed."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.left = threading.Event()

    def wait(self) -> None:
        self.entered.set()
        self.left.wait()


def bare(pay: View | None = None, *, gate: Gate | None = None) -> Flask:
    """Return the payments service without idempotency. `pay` replaces the view of `POST /payments`."""
    app = Flask(APP)

    def held() -> Response:
        if gate is not None:
            gate.wait()
        return answered()

    app.add_url_rule("/payments", view_func=pay or paid, methods=["POST"], endpoint="pay")
    app.add_url_rule("/held", view_func=held, methods=["POST"], endpoint="held")
    app.add_url_rule("/lists", view_func=listed, methods=["POST"], endpoint="listed")
    app.add_url_rule("/large", view_func=large, methods=["POST"], endpoint="large")
    app.add_url_rule("/payments/<payment>", view_func=shown, methods=["GET"], endpoint="shown")
    return app


def plain_installation() -> Any:
    """Return a patch that leaves out the extra `speed`: figures are those of an application that did not choose it."""
    return patch.object(canonical, "fastest_json_digest", cache(lambda: json_digest))


def no_flushes() -> Any:
    """Return a patch that keeps counts of activity in their process: a call that adds them would be counted for a request."""
    return patch.object(activity, "FLUSH_SECONDS", math.inf)


def empty_hooks(*, gate: Gate | None = None) -> Flask:
    """Return the service with as many hooks as this library has, and one receiver. They do nothing: its floor."""
    app = bare(gate=gate)
    for _ in range(2):
        app.before_request(lambda: None)
    app.after_request(lambda response: response)
    app.teardown_request(lambda error: None)

    def finished(sender: Flask, response: Response, **_: Any) -> None:
        """Do nothing."""

    request_finished.connect(finished, app)
    # Signals hold their receivers weakly.
    app.extensions["finished"] = finished
    return app


def ours(store: Any, *, gate: Gate | None = None, config: Mapping[str, Any] = NOTHING) -> Flask:
    """Return the service with this library, on a Redis URL, a Redis client or a store."""
    app = bare(gate=gate)
    app.config.update(config)
    Idempotency(app, principal=lambda: PRINCIPAL, store=store, secret=SECRET, lease=LEASE_SECONDS)
    return app


def paid() -> Response:
    payment = request.get_json()
    return answered() if payment["amount"] > 0 else Response(status=422)


def listed() -> Response:
    return answered(LIST_ANSWER)


def large() -> Response:
    return answered(LARGE_ANSWER)


def shown(payment: str) -> Response:
    return Response(ANSWER, 200, content_type="application/json")


def answered(answer: bytes = ANSWER) -> Response:
    return Response(answer, 201, content_type="application/json", headers={"Location": LOCATION})


def compressed(answer: bytes) -> float:
    """Return the compressed size as a part of the size, by the fastest level of zlib."""
    return len(zlib.compress(answer, 1)) / len(answer)
