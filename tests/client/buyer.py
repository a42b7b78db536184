"""A program that pays invoices, which a test kills. It has no memory but its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.synchronize import Event

import httpx
import requests

from flask_idempotency.client import Intents, Ledger, Retries, Unsettled
from flask_idempotency.client.httpx import IdempotentTransport
from flask_idempotency.client.requests import IdempotentAdapter

QUICK = Retries(attempts=3, backoff=(0.001,), budget=10**6)


def pay(url: str, ledger: str, names: Sequence[str], library: str, begun: Event) -> None:
    """Pay each invoice whose intent is not done, and forget nothing."""
    intents = Intents(Ledger(ledger))
    with httpx.Client(transport=IdempotentTransport(retries=QUICK)) as client, requests.Session() as session:
        session.mount("http://", IdempotentAdapter(retries=QUICK))
        post = client.post if library == "httpx" else session.post
        begun.set()
        for name in names:
            entry = intents.ledger.find(name)
            while entry is None or entry.state != "done":
                try:
                    with intents(name):
                        post(url, json={"invoice": name})
                except Unsettled:
                    pass
                entry = intents.ledger.find(name)
