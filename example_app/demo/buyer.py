"""A program that pays twelve invoices, and may be killed at any time: `python -m example_app.demo.buyer URL LEDGER`.

It remembers nothing but its ledger. Started again, it goes on where it stopped.
"""

from __future__ import annotations

import sys

import httpx

from flask_idempotency.client import Intents, Ledger
from flask_idempotency.client.httpx import IdempotentTransport

INVOICES = 12


def main(url: str, ledger: str) -> None:
    """Pay each invoice once. Raise the client's error if one cannot be settled."""
    intents = Intents(Ledger(ledger))
    headers = {"Authorization": "Bearer tok_alice"}
    with httpx.Client(base_url=url, headers=headers, transport=IdempotentTransport(), timeout=60) as client:
        for number in range(1, INVOICES + 1):
            with intents(f"pay invoice {number}"):
                response = client.post(
                    "/payments", json={"account": "acc_1", "amount": number * 100, "currency": "EUR"}
                )
            response.raise_for_status()
            # The tour counts the lines.
            print(f"invoice {number}: {response.status_code}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
