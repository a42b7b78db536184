"""The shop of `shop.py`, as gunicorn --preload and Celery's prefork pool meet it: its database was used before the fork."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from celery import Celery
from flask import Flask
from sqlalchemy import select

from tests.e2e.service import CASE
from tests.e2e.shop import Account, db, from_environment

APPLICATION = "tests.e2e.forked_shop:preloaded()"
WARM = 4
"""Pooled connections at the fork: as many as a child's threads, so that every one of them would find one to share."""


def preloaded() -> Flask:
    """What gunicorn loads in its arbiter: the application has asked its database before there is any worker."""
    app = from_environment()
    app.add_url_rule("/balance", view_func=balance)
    app.add_url_rule("/unkeyed", view_func=balance, methods=["POST"])
    with app.app_context(), ExitStack() as held:
        for _ in range(WARM):
            held.enter_context(db.engine.connect()).execute(select(Account.id))
    if "held" in os.environ.get("E2E_FORK", ""):
        # As scripts and Celery modules do it: a context for the whole process, and a transaction that is still open.
        app.app_context().push()
        db.session.execute(select(Account.id)).all()
    return app


def balance() -> dict[str, Any]:
    return {"accounts": len(db.session.execute(select(Account.id)).all()), "pid": os.getpid()}


def tasks() -> Celery:
    """What `celery -A tests.e2e.forked_shop:celery` loads in the process that forks its pool."""
    app = preloaded()
    worker = Celery("forked", broker=os.environ["E2E_BROKER"], set_as_current=False)
    worker.conf.update(
        worker_hijack_root_logger=False,
        task_ignore_result=True,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
    )

    @worker.task(name="pay", ignore_result=True)
    def pay(key: str, case: str) -> None:
        answer = app.test_client().post(
            "/pay", headers={"Idempotency-Key": key, CASE: case}, json={"amount": 100}, buffered=True
        )
        app.config["LEDGER"].note("answered", case, answer.status_code)

    return worker


if "E2E_BROKER" in os.environ:
    celery = tasks()
