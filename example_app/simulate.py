"""Faults on request, and an independent witness of how often the business code ran. Only with DEMO_SIMULATE=1.

    {"simulate": {"delay": 1.5, "status": 503, "crash": "before_commit" | "after_commit", "booking": "before_commit" | …,
                  "step": "in_charge" | "behind_charge" | "before_commit" | "after_commit"}}

A fault strikes the first execution of an operation only, so that the same request, sent again, can show the recovery.
`booking` is the crash of the worker that books the payment. `step` kills the worker of a checkout: when the card provider
has taken the money, when that is recorded, and at the commit of the order.
Every response then carries `X-Executions`. Keep all of this out of a real service.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from flask import Flask, Response, abort, current_app, g, request
from marshmallow import Schema, fields, post_load, validate
from sqlalchemy import event

from example_app import problems
from example_app.models import db, use_write_ahead_log
from flask_idempotency import idempotent

WITNESS = "example-witness"
# A worker has eight threads: a few long pauses must not hold all of them.
LONGEST_DELAY_SECONDS = 5.0
BRIEF_SECONDS = 2.0
CRASHES = ("before_commit", "after_commit")
MOMENTS = ("in_charge", "behind_charge", *CRASHES)


@dataclass(frozen=True, slots=True)
class Fault:
    delay: float = 0.0
    status: int | None = None
    crash: str | None = None
    """The SQLAlchemy event: right before the session sends the commit, or right after it returns."""
    booking: str | None = None
    """The same in the worker that books the payment."""
    step: str | None = None
    """The moment of a checkout."""


class FaultInput(Schema):
    delay = fields.Float(validate=validate.Range(0, LONGEST_DELAY_SECONDS))
    status = fields.Integer(strict=True, validate=validate.Range(400, 599))
    crash = fields.String(validate=validate.OneOf(CRASHES))
    booking = fields.String(validate=validate.OneOf(CRASHES))
    step = fields.String(validate=validate.OneOf(MOMENTS))

    @post_load
    def as_fault(self, loaded: dict[str, Any], **_: Any) -> Fault:
        return Fault(**loaded)


class Wish(Schema):
    simulate = fields.Nested(FaultInput, required=True)


class Witness:
    """Count executions in a separate file, independent of the store under test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as connection:
            use_write_ahead_log(connection)
            connection.execute("CREATE TABLE IF NOT EXISTS executions (operation TEXT PRIMARY KEY, number INTEGER)")

    def count(self, operation: str) -> int:
        """Add one, commit, and return the new number: a SIGKILL right after this call cannot lose it."""
        with self._open() as connection, connection:
            [(number,)] = connection.execute(
                "INSERT INTO executions VALUES (?, 1)"
                " ON CONFLICT (operation) DO UPDATE SET number = number + 1 RETURNING number",
                (operation,),
            ).fetchall()
        return int(number)

    def read(self, operation: str) -> int:
        with self._open() as connection:
            row = connection.execute("SELECT number FROM executions WHERE operation = ?", (operation,)).fetchone()
        return int(row[0]) if row is not None else 0

    def _open(self) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(self._path))


def wanted() -> bool:
    return os.environ.get("DEMO_SIMULATE") == "1"


def install(app: Flask) -> None:
    app.extensions[WITNESS] = Witness(Path(app.config["DEMO_WITNESS"]))
    app.after_request(add_executions)
    app.add_url_rule("/simulate/brief", "simulate.brief", idempotent(keep=BRIEF_SECONDS)(brief), methods=["POST"])


def brief() -> dict[str, Any]:
    """Return a response that expires after two seconds, so that the demo can show an expired key."""
    execution_begins()
    return {"brief": True}


def take_wish(body: Any) -> None:
    """Remove `simulate` from a body and store it for this request. If simulation is off, validation refuses it."""
    if witness() is not None and isinstance(body, dict) and "simulate" in body:
        g.fault = Wish().load({"simulate": body.pop("simulate")})["simulate"]


def execution_begins() -> None:
    """Count this execution and simulate the fault that the request names. Call it before the business code."""
    counting = witness()
    if counting is None or counting.count(operation()) > 1:
        return
    fault = g.get("fault", Fault())
    time.sleep(fault.delay)
    if fault.status is not None:
        abort(problems.problem(fault.status, "simulated", "The request simulates this status."))
    if fault.crash is not None:
        crash_at(fault.crash)
    g.step_fault = fault.step


def moment(name: str) -> None:
    """Kill this worker if the request wishes that for this moment of a checkout. `save` is the moment before its commit."""
    wished = g.get("step_fault")
    if name == "save" and wished in CRASHES:
        crash_at(wished)
    elif wished == name:
        crash()


def booking_fault() -> str | None:
    """Return the fault that this request wishes for the worker that books its payment."""
    return None if witness() is None else g.get("fault", Fault()).booking


def booking_begins(payment: str, fault: str | None) -> None:
    """Count this booking, and simulate the fault that came with its message."""
    counting = witness()
    if counting is not None and counting.count(f"booking {payment}") == 1 and fault is not None:
        crash_at(fault)


def crash_at(moment: str) -> None:
    """Kill this worker at the commit of the current session, wherever that is: in the view, or after it in the library."""
    event.listen(db.session(), moment, lambda session: crash(), once=True)


def crash() -> None:
    """Kill this worker as the kernel would, without cleanup. The client sees a broken connection."""
    os.kill(os.getpid(), signal.SIGKILL)


def add_executions(response: Response) -> Response:
    counting = witness()
    if counting is not None:
        response.headers["X-Executions"] = str(counting.read(operation()))
    return response


def operation() -> str:
    """Return the id of this operation: a digest of the caller and the key, or a random one without a key."""
    if "operation" not in g:
        key = request.headers.get("Idempotency-Key") or request.headers.get("X-Idempotency-Key")
        parts = (repr(g.get("caller")), key.strip('"') if key else uuid4().hex)
        g.operation = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    found: str = g.operation
    return found


def witness() -> Witness | None:
    found: Witness | None = current_app.extensions.get(WITNESS)
    return found
