"""The other victim: it takes payments into a database of its own, and the library commits them together with its records.

Each payment has an id that no other execution would give it, and is added to an account's balance: what was committed twice
shows in both. An attempt's `X-Steps` header says what befalls its worker, and at which of these points:

    began        before anything else
    claiming     MariaDB: the COMMIT of the claim is about to be sent
    claimed      the key is this request's, and its view is still to be entered
    flushed      the view has written its rows
    committing   COMMIT is about to be sent
    committed    COMMIT has been answered

    die:<point>    kill -9
    pause:<point>  say so, and wait for the go-ahead
    tell:<point>   say so
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any
from uuid import uuid4

from flask import Flask, current_app, has_request_context, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine, String, event, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from flask_idempotency import Idempotency
from flask_idempotency.signals import claim_granted
from tests.e2e.ledger import Ledger
from tests.e2e.service import CASE, SECRET, STEPS

APPLICATION = "tests.e2e.shop:from_environment()"
ACCOUNTS = 4
"""More than one, or payments would queue for its row and no two would ever be committed at once."""


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int]


class Payment(Base):
    __tablename__ = "payments"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    case: Mapped[str] = mapped_column(String(200))
    amount: Mapped[int]


db = SQLAlchemy(model_class=Base)


def from_environment() -> Flask:
    """What servers are told to serve."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    app = Flask("shop")
    app.config.update(
        IDEMPOTENCY_STORE="flask-sqlalchemy://",
        IDEMPOTENCY_SECRET=SECRET,
        IDEMPOTENCY_EFFECTS="transactional",
        SQLALCHEMY_DATABASE_URI=os.environ["E2E_STORE"],
        LEDGER=Ledger(os.environ["E2E_LEDGER"]),
        # Tests count, hold and lose the calls of requests, and would take one that adds counts for one of these.
        IDEMPOTENCY_ACTIVITY=False,
        **json.loads(os.environ.get("E2E_CONFIG", "{}")),
    )
    # Before the extension on purpose: nobody has looked at the key yet.
    app.before_request(lambda: reach("began"))
    db.init_app(app)
    Idempotency(app)
    app.add_url_rule("/pay", view_func=pay, methods=["POST"])
    app.add_url_rule("/free", "free", lambda: {"pid": os.getpid()})
    _watch(app)
    return app


def pay() -> tuple[dict[str, Any], int]:
    """As a view should be: it writes, and leaves the commit to others."""
    case, amount = request.headers[CASE], request.get_json()["amount"]
    ledger: Ledger = current_app.config["LEDGER"]
    ledger.note("run", case, os.getpid())
    payment = Payment(id=uuid4().hex, case=case, amount=amount)
    db.session.add(payment)
    account = int(payment.id, 16) % ACCOUNTS
    db.session.execute(update(Account).where(Account.id == account).values(balance=Account.balance + amount))
    reach("flushed")
    return {"id": payment.id, "case": case, "pid": os.getpid()}, 201


def reach(point: str) -> None:
    """Let happen what is to happen here."""
    case, ledger = request.headers.get(CASE, ""), current_app.config["LEDGER"]
    for step in request.headers.get(STEPS, "").split():
        match step.partition(":")[::2]:
            case ("die", where) if where == point:
                os.kill(os.getpid(), signal.SIGKILL)
            case ("pause", where) if where == point:
                ledger.pause(case, os.getpid())
            case ("tell", where) if where == point:
                ledger.note("told", "", os.getpid())


def _watch(app: Flask) -> None:
    """Know when the points are reached that are not in the view's own code."""

    def granted(sender: Flask, **_: Any) -> None:
        reach("claimed")

    claim_granted.connect(granted, app, weak=False)
    with app.app_context():
        event.listen(db.engine, "commit", lambda connection: reach("committing"))
        if db.engine.dialect.name == "mysql":
            # The store has no driver of its own there, whose cursor this would not hear.
            event.listen(Engine, "before_cursor_execute", _claims)
    event.listen(db.session.session_factory, "after_commit", lambda session: reach("committed"))


def _claims(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
    # A session commits by the driver's method.
    if statement == "COMMIT" and has_request_context():
        reach("claiming")
