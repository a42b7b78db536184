"""The victim with durable steps: it reserves, charges, saves a payment and sends a mail, and is killed at a point of that.

Each step notes in the ledger that it ran, outside of the store. An attempt's `X-Steps` header says what befalls its worker, as
in `shop.py`, and at which of these points:

    claimed                  the key is this request's, and its view is still to be entered
    entered                  the view was entered
    entered-<step>           the function of the step was entered
    in-<step>                the step did what must not be done twice, and the store does not know it
    after-<step>             the view has the result of the step
    written-<n>              the store has confirmed the n-th write to the journal
    committing, committed    COMMIT of the transactional step is about to be sent, or was answered
    keeping, kept            the response is about to be stored, or is

    status:<n>     the first attempt has this status
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import uuid4

from flask import Flask, current_app, g, has_request_context, request
from sqlalchemy import event

from flask_idempotency import Idempotency, Step, current_claim, current_step, idempotent
from flask_idempotency.engine.journal import JournalWrite
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import StoredPayload
from flask_idempotency.engine.recovery import Resolution, StillUnknown, UnknownOutcome
from flask_idempotency.signals import claim_granted
from tests.e2e.ledger import Ledger
from tests.e2e.service import CASE, SECRET, STEPS
from tests.e2e.shop import Payment, db, reach

APPLICATION: Final = "tests.e2e.step_shop:from_environment()"
EFFECTS: Final = ("reserve", "charge", "save", "mail")


def from_environment() -> Flask:
    """What servers are told to serve."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    config = json.loads(os.environ.get("E2E_CONFIG", "{}"))
    return create_app(os.environ["E2E_STORE"], ledger=os.environ["E2E_LEDGER"], config=config)


def create_app(url: str, *, ledger: str, config: Mapping[str, Any]) -> Flask:
    """Build one victim. In a SQL database, its own rows and the records are in the same one."""
    app, joint = Flask("step-shop"), not url.startswith("redis")
    app.config.update(
        IDEMPOTENCY_STORE="flask-sqlalchemy://" if joint else url,
        IDEMPOTENCY_SECRET=SECRET,
        SQLALCHEMY_DATABASE_URI=url if joint else "sqlite://",
        LEDGER=Ledger(ledger),
        # Tests count, hold and lose the calls of requests, and would take one that adds counts for one of these.
        IDEMPOTENCY_ACTIVITY=False,
        **config,
    )
    db.init_app(app)
    idempotency = Idempotency(app)
    idempotency.act_for(lambda principal, tenant: None)
    idempotency.resolver("unattended")(what_became_of_it)
    save = Step("save", effects="transactional" if joint else "deduplicated")
    mail = Step("mail", effects="deduplicated", intent=False)
    steps = (Step("reserve", effects="deduplicated"), Step("charge"), save, mail)
    _serve(app, "checkout", EFFECTS, steps=steps)
    _serve(app, "order", ("save", "mail"), steps=steps)
    _serve(app, "mail", ("reserve", "charge", "mail"), steps=steps)
    # Of many duplicates one would take over from a worker that is only late.
    _serve(app, "wait", ("reserve", "charge", "mail"), steps=steps, in_flight="wait", wait=60, lease=60)
    # Its client never asks again. A worker that runs longer than `max_runtime` begins no further step.
    _serve(app, "unattended", EFFECTS, steps=steps, finish="janitor", finish_headers=(CASE,), max_runtime=2)
    app.add_url_rule("/free", "free", lambda: {"pid": os.getpid()})
    _watch(app, joint=joint)
    return app


def _serve(app: Flask, name: str, names: Sequence[str], **policy: Any) -> None:
    def view() -> tuple[dict[str, Any], int]:
        _ledger().note("run", _case(), os.getpid())
        reach("entered")
        results: dict[str, Any] = {}
        for each in names:
            results[each] = current_claim.step(each, _save if each == "save" and _joint() else _act, each)
            reach(f"after-{each}")
        return {**results, "attempt": current_claim.attempt, "run": uuid4().hex}, _status()

    app.add_url_rule(f"/{name}", name, idempotent(required=True, **policy)(view), methods=["POST"])


def _status() -> int:
    for step in request.headers.get(STEPS, "").split():
        match step.partition(":")[::2]:
            case ("status", number) if current_claim.attempt == 1:
                return int(number)
    return 201


def _act(name: str) -> str:
    reach(f"entered-{name}")
    _ledger().note_under(current_step.downstream_key, name, _case())
    reach(f"in-{name}")
    return uuid4().hex


def what_became_of_it(unknown: UnknownOutcome) -> Resolution:
    """Ask the other side whether it has charged."""
    charge = unknown.step("charge")
    if not charge.in_doubt:
        return StillUnknown()
    known = _ledger().noted("known", charge.downstream_key)
    return charge.completed(uuid4().hex) if known else charge.never_happened()


def _save(name: str) -> str:
    g.saves = True
    reach(f"entered-{name}")
    _ledger().note(name, _case(), current_step.downstream_key)
    payment = Payment(id=uuid4().hex, case=_case(), amount=request.get_json()["amount"])
    db.session.add(payment)
    db.session.flush()
    reach(f"in-{name}")
    return payment.id


def _joint() -> bool:
    return str(current_app.config["IDEMPOTENCY_STORE"]).startswith("flask-sqlalchemy")


def _case() -> str:
    return request.headers.get(CASE, "")


def _ledger() -> Ledger:
    ledger: Ledger = current_app.config["LEDGER"]
    return ledger


class _Watched:
    """The journals of the store, which let the points of their calls be reached."""

    def __init__(self, journals: Any) -> None:
        self._journals = journals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journals, name)

    def write(self, key: StorageKey, token: bytes, *, fence: int, writing: JournalWrite, lease: float) -> None:
        self._journals.write(key, token, fence=fence, writing=writing, lease=lease)
        _reach(f"written-{writing.number}")

    def complete(self, key: StorageKey, token: bytes, payload: StoredPayload, *, keep: float) -> None:
        _reach("keeping")
        self._journals.complete(key, token, payload, keep=keep)
        _reach("kept")


def _reach(point: str) -> None:
    # A thread that renews or repeats has no request.
    if has_request_context():
        reach(point)


def _watch(app: Flask, *, joint: bool) -> None:
    """Know when the points are reached that are not in the view's own code."""

    def granted(sender: Flask, **_: Any) -> None:
        # The janitor claims before its request begins.
        _reach("claimed")

    def committing(point: str) -> None:
        # The store commits on its own connections as well.
        if has_request_context() and g.get("saves"):
            reach(point)

    claim_granted.connect(granted, app, weak=False)
    engine = app.extensions["idempotency"].engine
    engine._deps = replace(engine._deps, journals=_Watched(engine._deps.journals))
    if joint:
        with app.app_context():
            event.listen(db.engine, "commit", lambda connection: committing("committing"))
        event.listen(db.session.session_factory, "after_commit", lambda session: committing("committed"))
