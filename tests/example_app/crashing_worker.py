"""A worker that gets one request and is killed before its response, or freezes before it writes, until a SIGCONT.

python -m tests.example_app.crashing_worker CONFIG BLUEPRINT MOMENT
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from werkzeug.test import TestResponse

from example_app import simulate
from example_app.app import create_app
from tests.example_app.conftest import Customer

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "payments": ("/payments", {"account": "acc_1", "amount": 1050, "currency": "EUR"}),
    "gateway": ("/gateway/charges", {"account_id": "acc_1", "amount": 1050, "currency": "EUR"}),
    "accounting": ("/api/invoices", {"customer": "cus_1", "amount": 4200, "currency": "EUR"}),
}
HEADERS = {"accounting": "X-Idempotency-Key"}


FROZEN = "frozen"


def freeze() -> None:
    """Stop as a paused virtual machine does: all threads, and no lease is renewed."""
    os.kill(os.getpid(), signal.SIGSTOP)


def ask(customer: Customer, blueprint: str, moment: str | None, *, key: str | None = "key-1") -> TestResponse:
    path, body = REQUESTS[blueprint]
    header = HEADERS.get(blueprint, "Idempotency-Key")
    wish = {} if moment is None else {"simulate": {"crash": moment}}
    return customer.send("POST", path, key, {**body, **wish}, header=header)


if __name__ == "__main__":
    config, blueprint, moment = sys.argv[1:]
    wish: str | None = moment
    if moment == FROZEN:
        # What every view of the example calls between its input and its first write.
        simulate.execution_begins, wish = freeze, None
    answer = ask(Customer(create_app(json.loads(config))), blueprint, wish)
    sys.stdout.write(json.dumps([answer.status_code, answer.get_json()]))
