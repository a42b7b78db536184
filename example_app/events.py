"""What follows a payment: a consumer books it into the ledger, and another tells the company's own server.

    view ──payment.created──► book ──merchant.notify──► notify ──POST──► the company

Each arrow is an outbox: the message is a row of the transaction that made it necessary. So there is no payment without its
message, and none for a payment that was rolled back. The broker may deliver a message twice, and a worker may vanish at any
line: the ledger has one entry for each payment, and the company recognises a repeated call by its key.
"""

from __future__ import annotations

from typing import Any

import httpx
from celery import Celery, Task
from flask import Flask, current_app

from example_app import simulate
from example_app.extension import idempotency
from example_app.models import LedgerEntry, Payment, db
from flask_idempotency import current_claim
from flask_idempotency.consumers.celery import idempotent_task
from flask_idempotency.outbox import Tasks

BOOK, NOTIFY = "payment.created", "merchant.notify"
"""The topics, and the names of the tasks that they are for."""
CALL_SECONDS = 10.0

# The janitor is another Celery application in this process: these tasks are not for it, so they are not shared.
celery = Celery("example_app", set_as_current=False)
celery.conf.update(
    # The worker acknowledges a message after its task, and gives the message of a killed process back.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)

# Sent messages stay for a day, to look at.
outbox = idempotency.outbox(keep=86_400)
outbox.route(BOOK, Tasks(celery))
outbox.route(NOTIFY, Tasks(celery))


def install(app: Flask) -> None:
    """Reach the broker that EVENTS_BROKER_URL names. Without one, or without the library, payments publish no message."""
    app.config.setdefault("EVENTS_BROKER_URL", None)
    app.config.setdefault("IDEMPOTENCY_ENABLED", True)
    app.config.setdefault("MERCHANT_URL", None)
    if broker := app.config["EVENTS_BROKER_URL"]:
        celery.conf.update(broker_url=broker)


def payment_created(payment: Payment) -> None:
    """Publish that this payment was made. Call it after the flush that gives the payment its id."""
    if current_app.config["EVENTS_BROKER_URL"] and current_app.config["IDEMPOTENCY_ENABLED"]:
        fault = simulate.booking_fault()
        message = {
            "payment": payment.id,
            "amount": payment.amount,
            "currency": payment.currency,
            "tenant": payment.tenant,
        }
        outbox.publish(BOOK, message | ({"fault": fault} if fault else {}), tenant=payment.tenant)


@celery.task(name=BOOK, shared=False)
# A worker that is silent for five seconds here is gone: a booking takes less than one, and each worker renews its lease.
@idempotent_task(name=BOOK, effects="transactional", tenant="tenant", lease=5)
def book(payment: str, tenant: str, amount: int, currency: str, fault: str | None = None) -> None:
    """Write the ledger entry, and the message for the company: both are committed with the record of this message."""
    simulate.booking_begins(payment, fault)
    db.session.add(LedgerEntry(payment=payment, tenant=tenant, amount=amount, currency=currency))
    if current_app.config["MERCHANT_URL"]:
        outbox.publish(NOTIFY, {"payment": payment, "tenant": tenant}, tenant=tenant)


@celery.task(
    name=NOTIFY, shared=False, bind=True, autoretry_for=(httpx.HTTPError,), retry_backoff=True, max_retries=None
)
@idempotent_task(name=NOTIFY, effects="deduplicated", tenant="tenant")
def notify(self: Task[Any, Any], payment: str, tenant: str) -> None:
    """Call the company's server. A second call after a crash carries the same key."""
    headers = {"Idempotency-Key": current_claim.downstream_key("notify")}
    url = current_app.config["MERCHANT_URL"]
    httpx.post(url, json={"payment": payment}, headers=headers, timeout=CALL_SECONDS).raise_for_status()
