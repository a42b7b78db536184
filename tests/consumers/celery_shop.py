"""The Celery application of the tests: tasks that do to the outside world what their case's plan says, and count it there.

The plan of a case is a list in the ledger: each run of its body takes the next step.

    die:<point>    kill -9 of the pool process; `die:dispatch` when the record is written, before Celery sends the chain
    stay:<point>   say so, and wait for the go-ahead
    <ending>       `Ignore`, `Reject`, `Retry`, `ValueError` or `SystemExit`: how the body ends after its effect

The points are `before` and `after` the effect. The task with durable steps has `charging` and `charged`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import wraps
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from flask_idempotency import Idempotency, Step, current_claim, current_step
from flask_idempotency.consumers.celery import idempotent_task, serve
from tests.consumers.celery_worker import QUEUE, ShopLedger

LEASE_SECONDS = 2.0
LONG_LEASE_SECONDS = 600.0
"""Of tasks whose duplicates must wait, also on a machine that stands still for seconds."""


class Base(DeclarativeBase):
    pass


class Charge(Base):
    __tablename__ = "charges"

    id: Mapped[int] = mapped_column(primary_key=True)
    case: Mapped[str]


db = SQLAlchemy(model_class=Base)


def make_flask(store: str, database: str) -> Flask:
    app = Flask("shop")
    app.config.update(
        IDEMPOTENCY_STORE=store,
        IDEMPOTENCY_SECRET="s-9f2c47d1e8b35a60",
        IDEMPOTENCY_AFTER_LOSS="run",
        SQLALCHEMY_DATABASE_URI=database,
        SQLALCHEMY_ENGINE_OPTIONS={"connect_args": {"timeout": 60}} if database.startswith("sqlite") else {},
    )
    db.init_app(app)
    Idempotency(app)
    return app


def make_celery(broker: str, backend: str, **config: Any) -> Celery:
    """The application that senders and workers share."""
    celery_app = Celery("shop", broker=broker, backend=backend, set_as_current=False)
    celery_app.conf.update(
        task_default_queue=QUEUE,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        result_extended=True,
        **config,
    )
    if broker.startswith("amqp"):
        # RabbitMQ delays the messages of quorum queues itself, and needs a topic exchange for that.
        celery_app.conf.update(
            task_default_queue_type="quorum",
            task_default_exchange=QUEUE,
            task_default_exchange_type="topic",
            task_default_routing_key=QUEUE,
            broker_transport_options={"confirm_publish": True},
        )
    if broker.startswith("redis"):
        celery_app.conf.broker_transport_options = {
            "visibility_timeout": 2,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
            "socket_timeout": 5,
        }
    return celery_app


def from_environment() -> Celery:
    """What `celery -A tests.consumers.celery_shop:celery` loads, in the process that forks its pool."""
    found = json.loads(os.environ["CELERY_SHOP"])
    flask_app = make_flask(found["store"], found["database"])
    with flask_app.app_context():
        db.create_all()
        db.session.add(Charge(case="the parent has used its connections"))
        db.session.commit()
    celery_app = make_celery(found["broker"], found["backend"], **found["config"])
    joint = found["store"].startswith("flask-sqlalchemy")
    add_tasks(celery_app, ShopLedger(found["ledger"]), transactional=joint)
    serve(celery_app, flask_app)
    return celery_app


def add_tasks(celery_app: Celery, ledger: ShopLedger, *, transactional: bool = False) -> None:
    """Add the tasks to this application."""

    def late(name: str, **options: Any) -> Callable[[Any], Any]:
        register: Any = celery_app.task
        decorate: Callable[[Any], Any] = register(
            name=name, acks_late=True, reject_on_worker_lost=True, shared=False, **options
        )
        return decorate

    doomed: list[str] = []

    def die_before_dispatch(function: Any) -> Any:
        @wraps(function)
        def run(*args: Any) -> Any:
            value = function(*args)
            if doomed:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        return run

    def befall(step: str, point: str, case: str) -> None:
        if step == f"die:{point}":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == f"stay:{point}":
            ledger.pause(case, os.getpid())

    def act(case: str) -> int:
        """Do what must not be done twice. Returns how often this body has begun, which a second run would change."""
        run = ledger.begin(case, current_claim.attempt if current_claim else 0)
        step = ledger.step(case)
        befall(step, "before", case)
        name = current_claim.downstream_key("charge") if current_claim else ""
        ledger.act(case, name)
        befall(step, "after", case)
        if step == "die:dispatch":
            doomed.append(case)
        if step == "ValueError":
            raise ValueError(case)
        if step == "Ignore":
            raise Ignore(case)
        if step == "Reject":
            raise Reject(case, requeue=False)
        if step == "SystemExit":
            raise SystemExit(1)
        return run

    @late("plain")
    @idempotent_task(lease=LEASE_SECONDS)
    def plain(case: str) -> int:
        return act(case)

    @late("marked")
    @idempotent_task(effects="marked", lease=LEASE_SECONDS)
    def marked(case: str) -> int:
        run = ledger.begin(case, current_claim.attempt)
        step = ledger.step(case)
        befall(step, "before", case)
        current_claim.point_of_no_return()
        ledger.act(case, "")
        befall(step, "after", case)
        return run

    @late("stepped")
    @idempotent_task(steps=("charge", Step("ship", effects="deduplicated")), lease=LEASE_SECONDS)
    def stepped(case: str) -> int:
        run = ledger.begin(case, current_claim.attempt)
        step = ledger.step(case)

        def charge() -> None:
            ledger.act(case, current_step.downstream_key)
            befall(step, "charging", case)

        current_claim.step("charge", charge)
        befall(step, "charged", case)
        current_claim.step("ship", lambda: ledger.note("shipped", case, run))
        return run

    @late("deduplicated")
    @idempotent_task(effects="deduplicated", lease=LEASE_SECONDS, max_attempts=3)
    def deduplicated(case: str) -> int:
        return act(case)

    if transactional:

        @late("transactional")
        @idempotent_task(effects="transactional", lease=LEASE_SECONDS)
        def transactional_charge(case: str) -> int:
            run = ledger.begin(case, current_claim.attempt)
            step = ledger.step(case)
            befall(step, "before", case)
            db.session.add(Charge(case=case))
            db.session.flush()
            befall(step, "after", case)
            return run

    @late("patient")
    @idempotent_task(effects="deduplicated", lease=LONG_LEASE_SECONDS)
    def patient(case: str) -> int:
        return act(case)

    @late("impatient")
    @idempotent_task(lease=LONG_LEASE_SECONDS, settle_wait=1)
    def impatient(case: str) -> int:
        return act(case)

    @late("add")
    @die_before_dispatch
    @idempotent_task(effects="deduplicated", lease=LONG_LEASE_SECONDS)
    def add(total: Any, case: str) -> int:
        return (sum(total) if isinstance(total, list) else total) * 10 + act(case)

    @late("retries", bind=True, max_retries=2)
    @idempotent_task(effects="deduplicated", lease=LONG_LEASE_SECONDS)
    def retries(self: Any, case: str) -> int:
        ledger.note("retries", case, self.request.retries)
        run = act(case)
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return run

    @late("autoretries", bind=True, autoretry_for=(OSError,), max_retries=2, default_retry_delay=0)
    @idempotent_task(effects="deduplicated", lease=LONG_LEASE_SECONDS)
    def autoretries(self: Any, case: str) -> int:
        ledger.note("retries", case, self.request.retries)
        run = act(case)
        if self.request.retries < 2:
            raise OSError(case)
        return run

    @late("descend", bind=True)
    @idempotent_task(effects="deduplicated", lease=LONG_LEASE_SECONDS)
    def descend(self: Any, case: str, left: int) -> int:
        run = act(case)
        if left:
            self.replace(self.s(case, left - 1))
        return run

    @late("hurried", soft_time_limit=1, time_limit=60)
    @idempotent_task(effects="deduplicated", lease=LONG_LEASE_SECONDS)
    def hurried(case: str) -> int:
        try:
            return act(case)
        except SoftTimeLimitExceeded:
            ledger.note("ended", case, "soft")
            raise


if "CELERY_SHOP" in os.environ:
    celery = from_environment()
