"""A worker that gets one request, and does not live to answer it.

python -m tests.example_app.crashing_worker CONFIG BLUEPRINT MOMENT
"""

from __future__ import annotations

import json
import sys
from typing import Any

from werkzeug.test import TestResponse

from example_app.app import create_app
from tests.example_app.conftest import Customer

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "payments": ("/payments", {"account": "acc_1", "amount": 1050, "currency": "EUR"}),
    "gateway": ("/gateway/charges", {"account_id": "acc_1", "amount": 1050, "currency": "EUR"}),
    "accounting": ("/api/invoices", {"customer": "cus_1", "amount": 4200, "currency": "EUR"}),
}
HEADERS = {"accounting": "X-Idempotency-Key"}


def ask(customer: Customer, blueprint: str, moment: str | None, *, key: str = "key-1") -> TestResponse:
    path, body = REQUESTS[blueprint]
    header = HEADERS.get(blueprint, "Idempotency-Key")
    wish = {} if moment is None else {"simulate": {"crash": moment}}
    return customer.send("POST", path, key, {**body, **wish}, header=header)


if __name__ == "__main__":
    config, blueprint, moment = sys.argv[1:]
    sys.exit(ask(Customer(create_app(json.loads(config))), blueprint, moment).status)
