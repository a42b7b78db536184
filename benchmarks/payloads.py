"""What goes in and what comes out: 300 bytes of JSON and 2 KB of it, as a payments service writes them.

The answer has the shape of a public card API's charge, with its many nulls and its opaque ids: random bytes would not
compress at all, and a repeated line would compress too well. What a record takes in memory depends on that, so a list,
whose entries repeat each other's names, stands beside it.
"""

from __future__ import annotations

import json
import zlib

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

# The same payment with one digit changed: what a mismatch is about.
OTHER_PAYMENT = PAYMENT.replace(b"125000", b"125001")

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


def _payments(count: int) -> bytes:
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


LIST_ANSWER = _payments(10)

# As large as an answer may be that is kept whole, by default.
LARGE_ANSWER = _payments(1270)


def compressed(answer: bytes) -> float:
    """To which part of its size zlib's fastest level brings it."""
    return len(zlib.compress(answer, 1)) / len(answer)
