"""The decorator and `serve`, without a worker: calls, eager tasks, identity, waits, and what is checked at the start."""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID, uuid4

import fakeredis
import pytest
from celery import Celery, Task
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.signals import worker_init, worker_process_shutdown
from flask import Flask, current_app, g
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy_lite import SQLAlchemy as Lite
from kombu.exceptions import OperationalError
from sqlalchemy import select

from flask_idempotency import ConfigurationError, Idempotency, current_claim, durable_step, idempotent
from flask_idempotency.activity import Activity
from flask_idempotency.consumers import (
    Later,
    MessageReused,
    MissingMessageId,
    OutcomeUnknown,
    ResultNotKept,
    TaskBusy,
)
from flask_idempotency.consumers.celery import idempotent_task, serve
from flask_idempotency.consumers.celery_messages import WAITS, countdown, derive_link_ids, visibility_timeout
from flask_idempotency.engine.activity import MINUTE
from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.engine.lease import LeaseRenewer
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.sql import engines
from flask_idempotency.testing import FaultyStore
from flask_idempotency.web.doctor import run_checks
from tests.stores.sql.shops import open_shop

SECRET = "s-9f2c47d1e8b35a60"


def make_flask(store: Any = None, *, testing: bool = True, **config: Any) -> Flask:
    app = Flask("shop")
    app.testing = testing
    app.config.update(IDEMPOTENCY_STORE=store or MemoryStore(), IDEMPOTENCY_SECRET=SECRET, **config)
    Idempotency(app)
    return app


def make_celery(**config: Any) -> Celery:
    celery_app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    celery_app.conf.update(config)
    return celery_app


Served = Callable[..., Any]


@pytest.fixture
def served() -> Iterator[Served]:
    """Makes Celery applications, served by a Flask application on this store, and closes them: `served(store)`."""
    with contextlib.ExitStack() as ends:

        def make(store: Any = None, *, by: Flask | None = None, **config: Any) -> Celery:
            celery_app = make_celery(**config)
            ends.callback(celery_app.close)
            serve(celery_app, by or make_flask(store))
            return celery_app

        yield make


@pytest.fixture
def flask_app() -> Flask:
    return make_flask()


@pytest.fixture
def celery_app(flask_app: Flask, served: Served) -> Any:
    """Tasks that are called run at once, in this process."""
    return served(by=flask_app, task_always_eager=True, task_store_eager_result=False)


Register = Callable[..., Any]


@pytest.fixture
def task(celery_app: Celery) -> Register:
    """Makes a task of a function: `task(function, key="order")`, with the task's own options in `options`."""

    def make(function: Callable[..., Any], *, options: dict[str, Any] | None = None, **policy: Any) -> Any:
        register: Any = celery_app.task
        return register(shared=False, name=uuid4().hex, **options or {})(idempotent_task(**policy)(function))

    return make


def idle(order: object = None) -> None:
    """A body that does nothing."""


@pytest.fixture
def runs() -> list[Any]:
    return []


# Calls.


def test_called_as_a_function_it_is_one(task: Register, runs: list[Any]) -> None:
    @functools.partial(task, key="order")
    def charge(order: str) -> bool:
        runs.append(order)
        return bool(current_claim)

    assert [charge("o-1"), charge("o-1")] == [False, False]
    assert runs == ["o-1", "o-1"]


def test_within_another_task_it_is_a_function_too(task: Register, runs: list[Any]) -> None:
    """Also within itself: the message is that of the task which was sent."""

    @functools.partial(task, key="order")
    def charge(order: str) -> None:
        runs.append(order)

    @functools.partial(task, key="order")
    def outer(order: str, again: bool = True) -> None:
        charge(order)
        charge(order)
        if again:
            outer(order, again=False)

    outer.delay("o-1").get()
    outer.delay("o-1").get()

    assert runs == ["o-1"] * 4


def test_a_transactional_task_raises_where_its_rows_would_not_be_committed(tmp_path: Path) -> None:
    """Called as a function, also within other work. A worker, `apply` and transactional work around it commit them."""
    shop = open_shop(f"sqlite:///{tmp_path / 'shop.sqlite3'}")
    celery_app: Any = make_celery(task_always_eager=True)
    serve(celery_app, shop.app)

    def make(name: str, body: Callable[..., Any], effects: str = "transactional") -> Any:
        return celery_app.task(shared=False, name=name)(idempotent_task(name=name, effects=effects)(body))

    def body(amount: int = 100) -> None:
        shop.pay(amount)

    def around() -> str:
        charge(5)
        return "ok"

    def again(times: int) -> None:
        shop.pay(7)
        if times:
            recursive(times - 1)

    charge, recursive = make("charge", body), make("recursive", again)
    plain, joint = make("plain", around, "plain"), make("joint", around)
    shop.view("/joint", endpoint="joint")(around)
    steps = [durable_step(kind, effects=kind)(around) for kind in ("transactional", "plain")]
    for step, path in zip(steps, ("/joint-step", "/plain-step"), strict=True):
        shop.view(path, endpoint=path)(idempotent(steps=steps)(lambda step=step: step()))
    shop.view("/plain", endpoint="plain")(idempotent(effects="plain")(lambda: around()))
    shop.app.config["PROPAGATE_EXCEPTIONS"] = True

    with shop.app.app_context():
        for call in (charge, charge.run, functools.partial(charge, amount=5), charge.s(5)):
            with pytest.raises(ConfigurationError, match=r"charge.*apply"):
                call()
    with pytest.raises(ConfigurationError, match="charge"):
        plain.delay().get(disable_sync_subtasks=False)
    for path in ("/plain", "/plain-step"):
        with pytest.raises(ConfigurationError, match="charge"):
            shop.post(path, key=path)
    assert ([], 0) == (shop.runs, shop.payments())

    for send in (charge.delay, charge.apply, joint.delay, functools.partial(recursive.delay, 2)):
        send().get(disable_sync_subtasks=False)
    answers = [
        shop.post(path, key=key).status_code for path in ("/joint", "/joint-step") for key in ("k-2" + path, None)
    ]
    celery_app.close()
    rows = shop.payments()
    shop.close()

    assert ([200] * 4, 10, 10) == (answers, rows, len(shop.runs))


def test_an_eager_task_claims(task: Register, runs: list[Any]) -> None:
    @functools.partial(task, key="order")
    def charge(order: str) -> int:
        runs.append(current_claim.attempt)
        return len(runs)

    assert [charge.delay("o-1").get(), charge.apply(("o-1",)).get(), charge.delay("o-2").get()] == [1, 1, 2]


def test_an_eager_task_does_not_wait(task: Register) -> None:
    """A message that is at work elsewhere, here further up the stack."""
    inner: list[Any] = []

    @functools.partial(task, key="order")
    def charge(order: str) -> None:
        if not inner:
            inner.append(charge.apply((order,)).result)

    charge.delay("o-1").get()

    assert isinstance(inner[0], TaskBusy)


@pytest.mark.parametrize("effects", ("plain", "transactional"))
@pytest.mark.parametrize("around", ("view", "step", "task"))
def test_an_eager_task_beside_uncommitted_rows_on_sqlite_names_the_lock_and_the_outbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effects: str, around: str
) -> None:
    monkeypatch.setattr(engines, "BUSY_MS", 0)
    shop = open_shop(f"sqlite:///{tmp_path / 'shop.sqlite3'}?timeout=0")
    celery_app: Any = make_celery(task_always_eager=True)
    serve(celery_app, shop.app)
    mail = celery_app.task(shared=False, name="mail")(idempotent_task(effects=effects)(idle))
    raised: list[BaseException] = []

    def body() -> str:
        shop.pay(5)
        shop.db.session.flush()
        raised.append(mail.delay().result)
        return "paid"

    if around == "task":
        pay = celery_app.task(shared=False, name="pay")(idempotent_task(name="pay", effects="transactional")(body))
        pay.delay().get()
        holder = "task:pay"
    else:
        step = durable_step("pay", effects="transactional")(body)
        policy = {"steps": (step,)} if around == "step" else {"effects": "transactional"}
        view = idempotent(**policy)(lambda: (step if around == "step" else body)())
        shop.app.add_url_rule("/pay", "pay", view, methods=["POST"])
        assert "paid" == shop.post(path="/pay").text
        holder = "pay"
    celery_app.close()
    shop.close()

    (error,) = raised
    assert isinstance(error, TaskBusy)
    assert f"SQLite has one writer, and the transaction of {holder} may hold its lock" in str(error)
    assert "outbox.publish" in str(error)


def test_an_eager_task_in_a_request_has_a_context_of_its_own(flask_app: Flask, task: Register) -> None:
    """Its session is not the request's, whose rows must not be committed with the task."""
    seen: list[tuple[bool, bool]] = []

    @task
    def charge() -> None:
        seen.append((current_app == flask_app, "of_request" in g))

    @flask_app.get("/")
    def view() -> str:
        g.of_request = True
        charge.delay().get()
        return "done"

    flask_app.test_client().get("/")

    assert seen == [(True, False)]


def test_arguments_are_checked_where_the_message_is_made(task: Register) -> None:
    @functools.partial(task, options={"bind": True})
    def charge(self: Any, order: str) -> None: ...

    with pytest.raises(TypeError):
        charge.delay()
    with pytest.raises(TypeError):
        charge.delay("o-1", colour="red")


# Identity.


@pytest.mark.parametrize(
    ("key", "calls"),
    (
        ("order", [(("o-1",), {}), ((), {"order": "o-1"})]),
        (lambda order, **_: f"{order}!", [(("o-1",), {}), (("o-1",), {})]),
        ("order", [((7,), {}), ((7,), {})]),
        ("order", [((UUID(int=7),), {}), ((), {"order": UUID(int=7)})]),
    ),
)
def test_a_key_makes_two_messages_one(task: Register, runs: list[Any], key: Any, calls: list[Any]) -> None:
    """An argument's name, however it is passed, or a function of the arguments."""

    def charge(order: Any, at: datetime | None = None) -> None:
        runs.append(order)

    def bound(self: Any, order: Any, at: datetime | None = None) -> None:
        runs.append(order)

    for number, function in enumerate((charge, bound)):
        made = task(function, key=key, name=f"charge-{number}", options={"bind": function is bound})
        for args, kwargs in calls:
            made.apply_async(args, kwargs).get()

    assert len(runs) == 2


def test_other_arguments_under_one_key_are_refused(task: Register, runs: list[Any]) -> None:
    """They are another order, or the key is too coarse. Arguments that are no plain JSON are compared as Celery sends them."""

    @functools.partial(task, key="order")
    def charge(order: str, at: datetime) -> None:
        runs.append(order)

    charge.delay("o-1", datetime(2026, 1, 1, tzinfo=UTC)).get()
    charge.delay(order="o-1", at=datetime(2026, 1, 1, tzinfo=UTC)).get()
    with pytest.raises(MessageReused):
        charge.delay("o-1", datetime(2026, 1, 2, tzinfo=UTC)).get()
    assert len(runs) == 1


@pytest.mark.parametrize("keyword", ("key", "tenant", "fingerprint"))
@pytest.mark.parametrize("function", (lambda: "o-1", lambda a, b, c, d: a))
def test_a_function_that_no_message_fits_is_refused_at_the_decorator(keyword: str, function: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{keyword} is called with the arguments of the message"):

        @idempotent_task(**{keyword: function})
        def charge(order: str, amount: int, trace: str = "") -> None: ...


@pytest.mark.parametrize(
    "function",
    (
        lambda order, amount: order,
        lambda o, a: o,
        lambda order, **_: order,
        lambda *args: args[0],
        lambda order, amount, trace="": order,
        lambda amount, order, trace: order,
    ),
)
def test_a_function_that_some_message_fits_is_taken(function: Any) -> None:
    @idempotent_task(key=function)
    def charge(order: str, amount: int, trace: str = "") -> None: ...

    @idempotent_task(key=function)
    def bound(self: Any, order: str, amount: int, trace: str = "") -> None: ...

    @idempotent_task(key=function)
    def strict(order: str, amount: int, /, trace: str = "") -> None: ...


@pytest.mark.parametrize("fingerprint", ("amount", lambda order, amount, **_: {"amount": amount}))
def test_a_fingerprint_narrows_what_must_be_the_same(task: Register, runs: list[Any], fingerprint: Any) -> None:
    @functools.partial(task, key="order", fingerprint=fingerprint)
    def charge(order: str, amount: int, trace: str = "") -> None:
        runs.append(order)

    charge.delay("o-1", 1, trace="a").get()
    charge.delay("o-1", 1, trace="b").get()
    with pytest.raises(MessageReused):
        charge.delay("o-1", 2).get()
    assert len(runs) == 1


@pytest.mark.parametrize("key", ("order", lambda order: order))
@pytest.mark.parametrize("order", (None, ""))
def test_a_message_without_its_key_is_an_error(task: Register, runs: list[Any], key: Any, order: str | None) -> None:
    @functools.partial(task, key=key)
    def charge(order: str | None) -> None:
        runs.append(order)

    with pytest.raises(MissingMessageId):
        charge.delay(order).get()
    assert runs == []


def test_tenants_have_their_own_keys(task: Register, runs: list[Any]) -> None:
    """`tenant` is given as `key` is."""

    @functools.partial(task, key="order", tenant="shop", fingerprint="order")
    def charge(order: str, shop: str) -> None:
        runs.append(current_claim.tenant)

    for shop in ("a", "b", "a"):
        charge.delay("o-1", shop).get()

    assert runs == ["a", "b"]


def test_two_tasks_have_their_own_ids_unless_they_share_a_name(task: Register, runs: list[Any]) -> None:
    def charge(order: str) -> None:
        runs.append("charge")

    def bill(order: str) -> None:
        runs.append("bill")

    for function in (charge, bill):
        task(function, key="order").delay("o-1").get()
    assert runs == ["charge", "bill"]
    for function in (charge, bill):
        task(function, key="order", name="shop.charge").delay("o-1").get()
    assert runs == ["charge", "bill", "charge"]


def test_two_tasks_of_one_function_need_names(
    task: Register, celery_app: Celery, flask_app: Flask, runs: list[Any]
) -> None:
    """A factory and an abstract class make such tasks. The second one would return the first one's values, and never run."""

    def made(kind: str, **policy: Any) -> Any:
        def run(order: str) -> str:
            runs.append(kind)
            return kind

        return task(run, key="order", **policy)

    charge, refund = made("charge"), made("refund")
    assert charge.delay("o-1").get() == "charge"
    with pytest.raises(ConfigurationError, match="would share their keys"):
        refund.delay("o-1").get()
    assert {each.verdict for each in run_checks(flask_app).findings if "would share" in each.text} == {Verdict.FAULT}
    assert made("refund", name="refund").delay("o-1").get() == "refund"
    assert runs == ["charge", "refund"]


def test_positional_arguments_of_a_bound_task_are_compared(task: Register) -> None:
    """`bind=True` puts the task among them."""

    @functools.partial(task, key=lambda order, amount: order, options={"bind": True})
    def charge(*args: Any) -> None: ...

    charge.delay("o-1", 5).get()
    with pytest.raises(MessageReused):
        charge.delay("o-1", 6).get()


def test_a_tenant_is_the_same_text_in_every_process(task: Register, runs: list[Any]) -> None:
    @functools.partial(task, key="order", tenant="shop", fingerprint="order")
    def charge(order: str, shop: object) -> None:
        runs.append(order)

    with pytest.raises(TypeError, match="a tenant is"):
        charge.apply(("o-1", object())).get()
    assert runs == []


@pytest.mark.parametrize("failure", (OSError(), Ignore()))
def test_a_decorator_that_repeats_the_call_repeats_a_run_of_the_message(
    celery_app: Celery, runs: list[Any], failure: Exception
) -> None:
    def repeating(function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            with contextlib.suppress(type(failure)):
                return function(*args)
            return function(*args)

        return run

    def charge(order: str) -> str:
        runs.append(bool(current_claim))
        if len(runs) == 1:
            raise failure
        return order

    register: Any = celery_app.task
    made = register(shared=False)(repeating(idempotent_task(key="order")(charge)))
    for _ in range(2):
        made.apply(("o-1",))

    assert runs == [True] * (1 if isinstance(failure, Ignore) else 2)


@pytest.mark.parametrize(("kind", "on_error"), ((Retry, "keep"), (Reject, "quarantine")))
def test_a_body_that_asks_for_another_run_gets_it(
    task: Register, runs: list[Any], kind: type[Exception], on_error: str
) -> None:
    """`Retry` and `Reject` are no failures, so `on_error` does not decide about them."""

    @functools.partial(task, key="order", on_error=on_error, options={"throws": (kind,)})
    def charge(order: str) -> str:
        runs.append(order)
        if len(runs) == 1:
            raise kind()
        return order

    charge.apply(("o-1",))
    assert charge.apply(("o-1",)).result == "o-1"
    assert runs == ["o-1", "o-1"]


# Results.


def test_a_value_that_is_not_kept_is_returned_once(task: Register) -> None:
    @functools.partial(task, key="order", max_result=8)
    def charge(order: str) -> str:
        return "x" * 9

    assert charge.delay("o-1").get() == "x" * 9
    with pytest.raises(ResultNotKept):
        charge.delay("o-1").get()


CARRIED = {
    "id": UUID(int=7),
    "amount": Decimal("10.50"),
    "at": datetime(2026, 1, 1, 12, tzinfo=UTC),
    "day": date(2026, 1, 2),
    "time": time(12, 30),
    "raw": b"\xff",
    "parts": [Decimal("0.10"), None, "ü"],
}


@pytest.mark.parametrize("value", (*CARRIED.values(), CARRIED), ids=(*CARRIED, "all"))
def test_what_the_json_of_celery_carries_is_kept(task: Register, runs: list[Any], value: Any) -> None:
    @functools.partial(task, key="order")
    def charge(order: str) -> Any:
        runs.append(order)
        return value

    for result in (charge.delay("o-1").get(), charge.delay("o-1").get(), charge.apply(("o-1",)).get()):
        assert (type(value), value) == (type(result), result)
    assert ["o-1"] == runs


@pytest.mark.parametrize(
    "value",
    ({"__type__": "money", "__value__": 1}, {1: "a"}, float("nan"), {"a", "b"}, {"deep": {1: Decimal(1)}}),
    ids=("unknown type", "name", "nan", "set", "deep"),
)
def test_what_it_does_not_carry_is_returned_once(task: Register, value: Any) -> None:
    @functools.partial(task, key="order")
    def charge(order: str) -> Any:
        return value

    assert repr(value) == repr(charge.apply(("o-1",)).result)
    assert isinstance(charge.apply(("o-1",)).result, ResultNotKept)


def test_ignore_completes_and_reject_does_not(task: Register, runs: list[Any]) -> None:
    """Celery's `Ignore` says that the message is done with; `Reject` that it is not."""

    @functools.partial(task, key="order")
    def charge(order: str) -> None:
        runs.append(order)
        raise Ignore if order == "ignored" else Reject("no", requeue=False)

    for order in ("ignored", "ignored", "rejected", "rejected"):
        charge.apply((order,))

    assert runs == ["ignored", "rejected", "rejected"]


@pytest.mark.parametrize("effects", ("plain", "deduplicated"))
def test_a_body_that_is_terminated_settles_as_a_vanished_worker(task: Register, runs: list[Any], effects: str) -> None:
    """`revoke(terminate=True)`, a cold shutdown and a hard limit raise `SystemExit`. Others may take over at once, or never."""

    @functools.partial(task, key="order", effects=effects)
    def charge(order: str) -> None:
        runs.append(order)
        if len(runs) == 1:
            raise SystemExit

    with pytest.raises(SystemExit):
        charge.apply(("o-1",))
    again = charge.apply(("o-1",))

    if effects == "plain":
        assert isinstance(again.result, OutcomeUnknown)
    else:
        assert again.successful()


def test_an_outcome_that_is_unknown_is_a_failure(task: Register, runs: list[Any]) -> None:
    """It failed past its point of no return, so it may have taken effect."""

    @functools.partial(task, key="order")
    def charge(order: str) -> None:
        runs.append(order)
        current_claim.point_of_no_return()
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - the body's own
        charge.delay("o-1").get()
    with pytest.raises(OutcomeUnknown):
        charge.delay("o-1").get()
    assert runs == ["o-1"]


def test_it_runs_unguarded_where_the_extension_is_switched_off(served: Served, runs: list[Any]) -> None:
    celery_app = served(by=make_flask(IDEMPOTENCY_ENABLED=False), task_always_eager=True)

    def charge(order: str) -> int:
        runs.append(order)
        return len(runs)

    made: Any = celery_app.task(shared=False)(idempotent_task(key="order")(charge))

    assert [made.delay("o-1").get() for _ in range(2)] == [1, 2]


# Waiting.


COUNTDOWNS: tuple[tuple[int, float | None, float | None, int], ...] = (
    *((waits, None, None, seconds) for waits, seconds in enumerate((1, 2, 4, 8, 16, 30, 30))),
    (10**9, None, None, 30),
    (9, None, 3600.0, 30),
    (9, None, 60.0, 20),
    (9, None, 2.0, 1),
    (9, 5.2, None, 6),
    (9, 0.0, None, 1),
    (9, 600.0, 30.0, 10),
)


def test_a_message_waits_longer_each_time() -> None:
    """Whole seconds, at most 30, a third of the visibility timeout, and not beyond the lease."""
    for waits, lease_left, visibility, seconds in COUNTDOWNS:
        later = Later(1.0, "in-flight", lease_left=lease_left)
        assert countdown(waits, later, visibility=visibility) == seconds, (waits, lease_left, visibility)


TIMEOUTS: tuple[tuple[str, dict[str, Any], float | None], ...] = (
    ("redis://localhost/0", {}, 3600.0),
    ("redis://localhost/0", {"visibility_timeout": 60}, 60.0),
    ("sentinel://localhost:26379/0", {"visibility_timeout": 60, "master_name": "m"}, 60.0),
    ("amqp://localhost//", {"visibility_timeout": 60}, None),
    ("memory://", {}, None),
)


def test_only_redis_has_a_visibility_timeout() -> None:
    for broker, options, seconds in TIMEOUTS:
        with contextlib.closing(Celery("shop", broker=broker, set_as_current=False)) as celery_app:
            celery_app.conf.broker_transport_options = options
            assert visibility_timeout(celery_app) == seconds, (broker, options)


class Away(MemoryStore):
    """A store that does not answer."""

    def claim(self, *args: Any, **kwargs: Any) -> Any:
        raise StoreUnavailable("away")


def received(made: Any, *, headers: dict[str, Any] | None = None, **request: Any) -> dict[str, Any]:
    """What a worker's trace calls this task with."""
    return {
        "id": str(uuid4()),
        "task": made.name,
        "root_id": "root",
        "retries": 1,
        "delivery_info": {"exchange": "", "routing_key": "payments", "priority": 3},
        "chain": [{"task": "next", "args": [], "kwargs": {}, "options": {}}],
        "ignore_result": True,
        **(headers or {}),
        **request,
    }


def run_as_worker(made: Any, request: dict[str, Any]) -> Any:
    from celery.app.trace import build_tracer

    tracer: Any = build_tracer(made.name, made, app=made.app, propagate=False)
    return tracer(request["id"], [["o-1"]], {}, request)


def test_what_is_sent_again_is_the_same_message(served: Served) -> None:
    """Same id, retries, chain and queue; changed by no body; one wait more; and without RabbitMQ's own headers."""
    celery_app = served(Away())

    def charge(orders: list[str]) -> None: ...

    made: Any = celery_app.task(shared=False)(idempotent_task()(charge))
    request = received(
        made, headers={WAITS: 2, "trace": "t-1", "x-death": [{"count": 1}], "x-first-death-queue": "celery_delayed_0"}
    )
    sent: list[Any] = []

    with mock.patch.object(Celery, "send_task", lambda self, *args, **options: sent.append((args, options))):
        ended = run_as_worker(made, request)

    assert ended.info.state == "IGNORED"
    ((name, args, kwargs), options) = sent[0]
    assert (name, list(args), kwargs) == (made.name, [["o-1"]], {})
    assert options["headers"] == {WAITS: 3, "trace": "t-1"}
    assert (options["task_id"], options["countdown"], options["retries"]) == (request["id"], 4, 1)
    assert (options["queue"], options["priority"], options["root_id"]) == ("payments", 3, "root")
    assert (options["chain"], options["ignore_result"]) == (request["chain"], True)


@pytest.mark.parametrize("options", ({}, {"autoretry_for": (Exception,)}))
def test_a_message_that_cannot_be_sent_again_goes_back_to_its_broker(served: Served, options: dict[str, Any]) -> None:
    """After a second: the broker gives it back at once. It is no failure of the body, so Celery does not retry it."""
    celery_app = served(Away())
    register: Any = celery_app.task
    made = register(shared=False, **options)(idempotent_task()(idle))

    def fail(self: Celery, *args: Any, **options: Any) -> None:
        raise OperationalError("away")

    with (
        mock.patch.object(Celery, "send_task", fail),
        mock.patch("flask_idempotency.consumers.celery_messages.time.sleep") as sleep,
    ):
        ended = run_as_worker(made, received(made))

    assert (ended.info.state, ended.info.retval.requeue) == ("REJECTED", True)
    sleep.assert_called_once_with(1.0)


def test_a_task_that_replaces_itself_is_another_message_at_each_depth(served: Served, runs: list[Any]) -> None:
    celery_app = served()

    def descend(orders: list[str]) -> None:
        runs.append(orders)

    made: Any = celery_app.task(shared=False)(idempotent_task()(descend))
    request = received(made, chain=None)
    for depth in (0, 1, 1, 2):
        run_as_worker(made, {**request, "replaced_task_nesting": depth})

    assert len(runs) == 3


def test_no_sender_can_name_a_depth(served: Served, runs: list[Any]) -> None:
    """`task_id="order-7:1"` is a message of its own, and so are its links."""
    celery_app = served()

    def descend(orders: list[str]) -> None:
        runs.append(orders)

    made: Any = celery_app.task(shared=False)(idempotent_task()(descend))
    request = received(made, chain=None)
    messages = [{**request, "id": "order-7:1"}, {**request, "id": "order-7", "replaced_task_nesting": 1}]
    links = []
    for message in messages:
        run_as_worker(made, message)
        given = mock.Mock(**{"replaced_task_nesting": 0, **message}, is_eager=False)
        given.callbacks = [{"task": "receipt", "options": {}}]
        derive_link_ids(given)
        links.append(given.callbacks[0]["options"]["task_id"])

    assert (2, 2) == (len(runs), len(set(links)))


def test_links_keep_their_ids_when_a_message_is_replayed(served: Served, runs: list[Any]) -> None:
    """Celery gives a link a new id at each dispatch. Those that have one, and those of other messages, are left alone."""
    celery_app = served()

    def charge(orders: list[str]) -> int:
        runs.append(orders)
        return 7

    made: Any = celery_app.task(shared=False)(idempotent_task()(charge))
    other: Any = celery_app.task(shared=False, name="receipt")(idle)
    request = received(made, chain=None)
    sent: list[list[str]] = []

    def send(self: Celery, *args: Any, task_id: str = "", **options: Any) -> Any:
        sent[-1].append(task_id)
        return mock.Mock(id=task_id)

    with mock.patch.object(Celery, "send_task", send):
        for message in (request, request, {**request, "id": "another"}):
            links = [dict(other.s()), dict(other.s()), dict(other.s().set(task_id="chosen"))]
            sent.append([])
            run_as_worker(made, {**message, "callbacks": links})

    assert len(runs) == 2
    assert sent[0] == sent[1]
    assert len(set(sent[0])) == 3
    assert set(sent[0]) & set(sent[2]) == {"chosen"}


def test_a_task_class_that_pushes_a_context_and_a_request_is_claimed_once(runs: list[Any]) -> None:
    """As Flask's documentation writes it: its `__call__` has a context, in which the body and its record share a session."""
    flask_app = make_flask()

    class ContextTask(Task[Any, Any]):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with flask_app.app_context():
                g.outer = True
                return super().__call__(*args, **kwargs)

    celery_app: Any = make_celery()
    celery_app.task_cls = ContextTask
    serve(celery_app, flask_app)

    def charge(orders: list[str]) -> int:
        runs.append("outer" in g)
        return 7

    made: Any = celery_app.task(shared=False)(idempotent_task()(charge))
    other: Any = celery_app.task(shared=False, name="receipt")(idle)
    request = received(made, chain=None)
    sent: list[str] = []

    def send(self: Celery, *args: Any, task_id: str = "", **options: Any) -> Any:
        sent.append(task_id)
        return mock.Mock(id=task_id)

    with mock.patch.object(Celery, "send_task", send):
        ended = [run_as_worker(made, {**request, "callbacks": [dict(other.s())]}).retval for _ in range(2)]

    assert (ended, runs) == ([7, 7], [True])
    assert len(sent) == 2
    assert len(set(sent)) == 1
    celery_app.close()


def test_a_link_that_eager_calls_share_runs_for_each(task: Register, runs: list[Any]) -> None:
    """The signature is the caller's own object: an id of one message must not stay in it."""

    @task
    def charge(order: str) -> str:
        return order

    @task
    def notify(order: str) -> None:
        runs.append(order)

    link = notify.s()
    for order in ("o-1", "o-2"):
        charge.apply((order,), link=link)

    assert runs == ["o-1", "o-2"]


# Start.


WRONG: tuple[dict[str, Any], ...] = (
    {"key": "colour"},
    {"tenant": "colour"},
    {"fingerprint": "colour"},
    {"lease": -1},
    {"on_store_down": "allow"},
    {"maxattempts": 3},
)


def test_a_wrong_keyword_is_refused_where_it_stands() -> None:
    def charge(order: str) -> None: ...

    for wrong in WRONG:
        with pytest.raises(ConfigurationError):
            idempotent_task(**wrong)(charge)


def test_it_decorates_functions(celery_app: Celery) -> None:
    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    made: Any = celery_app.task(shared=False)(idle)
    wrong: Any
    for wrong in (made, coroutine, generator, 7):
        with pytest.raises(ConfigurationError):
            idempotent_task()(wrong)


def test_serve_needs_the_extension_and_one_application(flask_app: Flask) -> None:
    """Twice for the same one is harmless."""
    celery_app = make_celery()
    with pytest.raises(ConfigurationError, match="init_app"):
        serve(celery_app, Flask("bare"))
    deployed = make_flask(testing=False)
    serve(celery_app, deployed)
    serve(celery_app, deployed)
    with pytest.raises(ConfigurationError, match="another"):
        serve(celery_app, make_flask(testing=False))
    celery_app.close()


@pytest.mark.parametrize("former", ("testing", "tested later", "gone", "before a test"))
def test_the_newest_application_serves_a_celery_application_of_a_module(former: str, runs: list[Any]) -> None:
    """As a pytest suite with an application factory has it: each test makes an application and calls `serve`."""
    celery_app: Any = make_celery(task_always_eager=True)

    @idempotent_task(key="order")
    def charge(order: str) -> str:
        runs.append(current_app.config["NUMBER"])
        return str(current_app.config["NUMBER"])

    task = celery_app.task(shared=False, name="shop.charge")(charge)
    kept = []
    for number in range(3):
        # One store for each application, as its memory is one of its own.
        app = make_flask(testing=former == "testing" or (former == "before a test" and number > 0), NUMBER=number)
        serve(celery_app, app)
        if former == "tested later":
            app.testing = True
        results = [task.delay("o-7").get(disable_sync_subtasks=False) for _ in range(2)]
        assert [str(number)] * 2 == results
        if former != "gone":
            kept.append(app)
        del app

    assert [0, 1, 2] == runs
    celery_app.close()


def test_an_application_that_only_celery_holds_goes_on_serving(runs: list[Any]) -> None:
    """As `serve(celery_app, create_app())` in the module of a worker has it. A second one that cannot serve changes nothing."""
    celery_app: Any = make_celery(task_always_eager=True)
    task = celery_app.task(shared=False)(idempotent_task(effects="deduplicated")(idle))
    serve(celery_app, make_flask(testing=False))
    gc.collect()

    with pytest.raises(ConfigurationError, match="init_app"):
        serve(celery_app, Flask("bare"))
    assert task.delay().get(disable_sync_subtasks=False) is None
    celery_app.close()


def test_a_task_without_an_application_says_what_is_missing() -> None:
    """`serve` was forgotten."""
    celery_app = make_celery(task_always_eager=True)
    made: Any = celery_app.task(shared=False)(idempotent_task()(idle))

    with pytest.raises(ConfigurationError, match="serve"):
        made.delay().get()
    with make_flask().app_context():
        made.delay().get()
    celery_app.close()


@pytest.mark.parametrize("late", (True, False))
def test_a_message_of_a_worker_without_an_application_is_not_lost(late: bool) -> None:
    """It goes back to the broker for a worker that is started right. One that Celery acknowledged before is a failure."""
    celery_app = make_celery()

    def charge(order: str) -> None: ...

    made: Any = celery_app.task(shared=False, acks_late=late, autoretry_for=(Exception,))(idempotent_task()(charge))
    with mock.patch("flask_idempotency.consumers.celery_messages.time.sleep") as slept:
        ended = run_as_worker(made, received(made, retries=3))

    assert (ended.info.state, slept.called) == (("REJECTED", True) if late else ("FAILURE", False))
    celery_app.close()


def hides(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run


def shows(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(hides(function))


def test_an_eager_task_whose_body_is_hidden_does_not_run(celery_app: Any, runs: list[Any]) -> None:
    """No worker has started that would have refused it."""

    @idempotent_task(key="order")
    def charge(order: str) -> None:
        runs.append(order)

    hidden: Any = celery_app.task(shared=False, name="hidden")(hides(charge))

    assert isinstance(hidden.apply(("o-1",)).result, ConfigurationError)
    assert [] == runs


@pytest.mark.parametrize(
    ("decorator", "policy", "fault"),
    ((hides, {}, "functools.wraps"), (shows, {"effects": "transactional"}, "transactional"), (shows, {}, None)),
)
def test_a_worker_does_not_start_with_a_task_that_cannot_hold_its_policy(
    flask_app: Flask, decorator: Any, policy: dict[str, Any], fault: str | None
) -> None:
    """Nor does `serve`, if the tasks are there already. `doctor` says the same."""
    celery_app = make_celery()
    celery_app.task(shared=False, acks_late=True, reject_on_worker_lost=True)(
        decorator(idempotent_task(**policy)(idle))
    )
    serve(celery_app, flask_app)
    worker = mock.Mock(app=celery_app)

    if fault is None:
        worker_init.send(sender=worker)
    else:
        with pytest.raises(SystemExit, match=fault):
            worker_init.send(sender=worker)
        finalized = make_celery()
        finalized.task(shared=False)(decorator(idempotent_task(**policy)(idle)))
        finalized.finalize()
        with pytest.raises(ConfigurationError, match=fault):
            serve(finalized, flask_app)

    found = [finding for finding in run_checks(flask_app).findings if finding.check == "celery"]
    assert {finding.verdict for finding in found} == {Verdict.FINE if fault is None else Verdict.FAULT}
    celery_app.close()


@pytest.mark.parametrize(
    ("pool", "fault", "store"),
    (
        ({"pool_cls": "prefork", "concurrency": 2}, True, "memory"),
        ({"pool_cls": "prefork", "concurrency": 2}, True, "wrapped"),
        ({"pool_cls": "prefork", "concurrency": 2}, True, "factory"),
        ({"pool_cls": "prefork", "concurrency": 2}, True, "fakeredis"),
        ({"pool_cls": "prefork", "concurrency": 2}, True, "file"),
        ({"pool_cls": "processes", "concurrency": 2}, True, "memory"),
        ({"pool_cls": PreforkPool, "concurrency": 8}, True, "memory"),
        ({"pool_cls": "prefork", "concurrency": 1, "autoscale": "4,1"}, True, "memory"),
        ({"pool_cls": "prefork", "concurrency": "auto"}, True, "memory"),
        ({"pool_cls": "prefork", "concurrency": 1}, False, "memory"),
        ({"pool_cls": "solo", "concurrency": 8}, False, "memory"),
        ({"pool_cls": "threads", "concurrency": 8}, False, "memory"),
    ),
)
def test_a_pool_of_processes_needs_a_store_that_all_of_them_see(
    pool: dict[str, Any], fault: bool, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a message that is delivered again runs again, in another process."""
    stores: dict[str, Callable[[], Any]] = {
        "memory": MemoryStore,
        "wrapped": lambda: FaultyStore(MemoryStore()),
        "factory": lambda: f"{MemoryStore.__module__}:{MemoryStore.__qualname__}",
        "fakeredis": fakeredis.FakeRedis,
        "file": lambda: f"sqlite:///{tmp_path / 'records.sqlite3'}",
    }
    made = stores[store]()
    celery_app: Any = make_celery()
    for name in ("shop.charge", "shop.mail"):
        celery_app.task(shared=False, name=name, acks_late=True)(idempotent_task(name=name)(idle))
    celery_app.task(shared=False, name="shop.free")(idle)
    options: dict[str, Any] = {"IDEMPOTENCY_AFTER_LOSS": "run"} if store == "fakeredis" else {}
    serve(celery_app, make_flask(made, **options))
    monkeypatch.setattr("flask_idempotency.consumers.celery.cpu_count", lambda: 2)

    if fault and store != "file":
        with pytest.raises(SystemExit, match=r"shop\.charge, shop\.mail") as refused:
            celery_app.WorkController(**pool)
        assert "shop.free" not in str(refused.value)
    else:
        worker_init.send(sender=mock.Mock(app=celery_app, **{"options": {}, **pool}))
    celery_app.close()


def test_serve_refuses_a_store_that_the_configured_pool_cannot_share(flask_app: Flask) -> None:
    """An application in tests may serve: there, no worker of this pool runs. `doctor` says the same."""

    def pooled() -> Any:
        celery_app: Any = make_celery(worker_concurrency=4)
        celery_app.task(shared=False, name="shop.charge", acks_late=True)(idempotent_task()(idle))
        return celery_app

    tested, early, late = pooled(), pooled(), pooled()
    tested.finalize()
    serve(tested, flask_app)
    deployed = make_flask(testing=False)
    serve(early, deployed)
    found = [finding.text for finding in run_checks(deployed).findings if finding.verdict is Verdict.FAULT]
    late.finalize()

    assert any("shop.charge" in text and "4 processes" in text for text in found)
    with pytest.raises(ConfigurationError, match=r"4 processes.*shop\.charge"):
        serve(late, deployed)
    for each in (tested, early, late):
        each.close()


@pytest.mark.parametrize(
    ("broker", "options", "policy", "config", "advice"),
    (
        ("memory://", {}, {}, {}, ["acknowledge"]),
        ("memory://", {"acks_late": True}, {"effects": "deduplicated"}, {}, ["killed in"]),
        ("memory://", {"acks_late": True}, {"effects": "plain"}, {}, []),
        ("memory://", {"acks_late": True, "reject_on_worker_lost": True}, {"effects": "deduplicated"}, {}, []),
        ("memory://", {}, {}, {"task_acks_late": True}, []),
        ("redis://h/0", {"acks_late": True, "time_limit": 60}, {}, {}, []),
        ("redis://h/0", {"acks_late": True, "time_limit": 3600}, {}, {}, ["while it runs"]),
        ("redis://h/0", {"acks_late": True}, {}, {"task_time_limit": 3600}, ["while it runs"]),
        ("redis://h/0", {"acks_late": True, "time_limit": 900}, {}, {}, ["reserved"]),
        ("redis://h/0", {"acks_late": True, "time_limit": 900}, {}, {"worker_prefetch_multiplier": 1}, []),
        (
            "redis://h/0",
            {"acks_late": True, "time_limit": 2000},
            {},
            {"worker_prefetch_multiplier": 1},
            ["1 message may"],
        ),
        (
            "redis://h/0",
            {"acks_late": True, "time_limit": 900},
            {},
            {"worker_prefetch_multiplier": 0},
            ["any number of"],
        ),
        ("amqp://h//", {"acks_late": True}, {}, {}, ["confirm"]),
        ("amqp://h//", {"acks_late": True}, {}, {"broker_transport_options": {"confirm_publish": True}}, []),
    ),
)
def test_settings_that_cost_messages_are_advised_against(
    served: Served,
    flask_app: Flask,
    caplog: pytest.LogCaptureFixture,
    broker: str,
    options: dict[str, Any],
    policy: dict[str, Any],
    config: dict[str, Any],
    advice: list[str],
) -> None:
    """By `doctor`, and in the log of a worker that starts."""
    celery_app = served(by=flask_app, **config, broker_url=broker)
    register: Any = celery_app.task
    register(shared=False, name="charge", **options)(idempotent_task(**policy)(idle))

    worker_init.send(sender=mock.Mock(app=celery_app))

    logged = [record.getMessage() for record in caplog.records if record.name == "flask_idempotency"]
    found = [finding for finding in run_checks(flask_app).findings if finding.check == "celery"]
    assert len(logged) == len(advice)
    assert [finding.verdict for finding in found] == [Verdict.ADVICE] * len(advice) or [Verdict.FINE]
    for text in advice:
        assert any(text in line for line in logged)
        assert any(text in finding.text and finding.remedy for finding in found)


def test_max_runtime_is_the_tasks_time_limit(flask_app: Flask, celery_app: Celery) -> None:
    """Six hours without one. `max_runtime` itself goes first."""
    seconds: dict[str, float] = {}
    chosen: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("limited", {"time_limit": 60}, {}),
        ("hurried", {"time_limit": 5}, {}),
        ("unlimited", {}, {}),
        ("chosen", {"time_limit": 60}, {"max_runtime": 90}),
    )
    register: Any = celery_app.task
    for name, options, policy in chosen:
        register(shared=False, name=name, **options)(idempotent_task(name=name, **policy)(idle))

    operations = flask_app.extensions["idempotency"].consumers.operations
    for name, _, _ in chosen:
        seconds[name] = operations.get(f"task:{name}").policy.max_runtime

    assert seconds == {"limited": 60, "hurried": 5, "unlimited": 6 * 3600, "chosen": 90}


@pytest.mark.parametrize(
    ("policy", "limit", "seconds"), (({}, 3600, 3600), ({}, 1, 5), ({}, None, 5), ({"max_runtime": 90}, 3600, 90))
)
def test_a_message_may_set_a_longer_time_limit(
    served: Served, policy: dict[str, Any], limit: int | None, seconds: float
) -> None:
    """`apply_async(time_limit=…)`: without a renewed lease, another worker would take the message over while it runs."""
    celery_app = served()
    register: Any = celery_app.task
    made = register(shared=False, time_limit=5)(idempotent_task(**policy)(idle))

    with mock.patch.object(Engine, "claim", autospec=True, side_effect=Engine.claim) as claim:
        ended = run_as_worker(made, received(made, chain=None, timelimit=[limit, None]))

    assert ended.info is None
    assert claim.call_args.args[2].max_runtime == seconds


def test_a_pool_process_writes_what_is_left_before_it_ends(flask_app: Flask, celery_app: Celery) -> None:
    """Else the write would end with it."""
    engine = flask_app.extensions["idempotency"].engine
    with mock.patch.object(type(engine), "drain", return_value=0) as drain:
        worker_process_shutdown.send(sender=None, pid=1, exitcode=0)

    drain.assert_called_with(10.0)


def test_a_pool_process_adds_its_last_counts_before_it_ends(celery_app: Celery) -> None:
    """It ends without the functions of `atexit`. Under `max_tasks_per_child=1` no count would ever reach the store."""
    store = MemoryStore()
    activity = Activity(store.activity, owner=b"own", renewer=LeaseRenewer(threaded=False))
    activity.count("task:pay", "new")

    worker_process_shutdown.send(sender=None, pid=1, exitcode=0)

    page = store.activity.read(b"own", length=MINUTE, seconds=MINUTE)
    assert [{"task:pay": {"new": 1}}] == [bucket.counts for bucket in page.buckets]


@pytest.mark.parametrize("extension", (SQLAlchemy, Lite))
def test_a_forked_child_leaves_the_applications_connections_alone(tmp_path: Path, extension: Any) -> None:
    app = Flask("shop")
    app.config.update(
        IDEMPOTENCY_STORE=MemoryStore(),
        IDEMPOTENCY_SECRET=SECRET,
        IDEMPOTENCY_AFTER_LOSS="run",
        SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path / 'shop.sqlite'}",
        SQLALCHEMY_ENGINES={"default": f"sqlite:///{tmp_path / 'shop.sqlite'}"},
    )
    db = extension(app)
    Idempotency(app)
    celery_app = make_celery()
    serve(celery_app, app)
    with app.app_context():
        db.session.execute(select(1))
        before = db.engine.pool
        vars(celery_app)["_flask_idempotency_consumers"][0].after_fork()

        assert db.engine.pool is not before
        assert extension is Lite or not db.session().in_transaction()
    celery_app.close()


# Signals.


@pytest.fixture
def soft_limit() -> Iterator[int]:
    """Billiard's handler, as a pool process has it."""

    def raise_soft_limit(number: int, frame: object) -> None:
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGUSR1, raise_soft_limit)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("call", ("claim", "complete", "release", "mark_point_of_no_return"))
def test_a_soft_limit_ends_no_call_of_the_store(served: Served, soft_limit: int, runs: list[Any], call: str) -> None:
    """It ends the body, or comes too late: it is never raised in the middle of a call."""
    store = MemoryStore()
    finished: list[str] = []
    original = getattr(store, call)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(soft_limit)
        answer = original(*args, **kwargs)
        finished.append(call)
        return answer

    setattr(store, call, interrupted)
    celery_app = served(store, task_always_eager=True)

    def charge(order: str) -> str:
        if call == "mark_point_of_no_return":
            current_claim.point_of_no_return()
        runs.append(order)
        if call == "release":
            raise ValueError
        return order

    made: Any = celery_app.task(shared=False)(idempotent_task(key="order", effects="deduplicated")(charge))
    result = made.apply(("o-1",)).result

    assert finished == [call]
    match call:
        case "claim" | "mark_point_of_no_return":
            assert isinstance(result, SoftTimeLimitExceeded)
            assert runs == []
        case "complete":
            assert result == "o-1"
        case "release":
            assert isinstance(result, ValueError)


@pytest.mark.parametrize("on_error", ("release", "keep", "quarantine"))
def test_a_signal_before_the_body_leaves_the_key_free(
    served: Served, soft_limit: int, runs: list[Any], on_error: str
) -> None:
    """Under `plain` too: the body did not begin."""
    store = MemoryStore()
    claim, signalled = store.claim, [True]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if signalled:
            signalled.pop()
            signal.raise_signal(soft_limit)
        return claim(*args, **kwargs)

    store.claim = interrupted  # type: ignore[method-assign]
    celery_app = served(store, task_always_eager=True)

    def charge(order: str) -> None:
        runs.append(order)

    made: Any = celery_app.task(shared=False)(idempotent_task(key="order", name="charge", on_error=on_error)(charge))

    assert isinstance(made.apply(("o-1",)).result, SoftTimeLimitExceeded)
    assert made.apply(("o-1",)).successful()
    assert runs == ["o-1"]


def test_a_handler_that_a_body_sets_for_a_while_leaves_the_workers_own(task: Register, runs: list[Any]) -> None:
    """It may call the one before it, and it is put back after we have looked at the signals."""

    def of_worker(number: int, frame: object) -> None:
        runs.append("worker")

    before = signal.signal(signal.SIGUSR1, of_worker)

    @functools.partial(task, effects="marked")
    def charge() -> None:
        earlier: Any = signal.getsignal(signal.SIGUSR1)

        def of_body(number: int, frame: object) -> None:
            runs.append("body")
            earlier(number, frame)

        signal.signal(signal.SIGUSR1, of_body)
        current_claim.point_of_no_return()
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, earlier)

    try:
        charge.delay().get()
        assert runs == ["body", "worker"]
        signal.raise_signal(signal.SIGUSR1)
        assert runs == ["body", "worker", "worker"]
    finally:
        signal.signal(signal.SIGUSR1, before)
