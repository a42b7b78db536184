"""An application factory that is called again, with one `Idempotency` and one Celery application of the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from flask import Blueprint, Flask, current_app
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import ConfigurationError, Idempotency, idempotent
from flask_idempotency.engine.registrations import is_same
from flask_idempotency.outbox import Outbox
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from janitor.tasks import register
from tests.janitor.apps import run


class Sent:
    """An adapter."""

    def __init__(self, app: Flask) -> None:
        self.app = app

    def send(self, messages: Any) -> list[None]:
        return [None for _ in messages]


class Elsewhere(Sent): ...


@dataclass
class Module:
    """What stands outside the factory. `late`: the factory registers its functions after `init_app`."""

    late: bool
    idempotency: Idempotency = field(default_factory=lambda: Idempotency(secret="s-9f2c47d1e8b35a60"))
    celery: Celery = field(default_factory=lambda: Celery("jobs", broker="memory://", set_as_current=False))
    blueprint: Blueprint = field(default_factory=lambda: Blueprint("shop", __name__))
    used: list[tuple[str, Flask]] = field(default_factory=list)
    """The functions that were called, and the application of their closure."""

    def __post_init__(self) -> None:
        self.blueprint.add_url_rule("/pay", "pay", idempotent(lambda: ("paid", 201)), methods=["POST"])

    def create_app(self, adapter: type[Sent] = Sent) -> Flask:
        app = Flask("shop")
        app.config.update(
            TESTING=True, SQLALCHEMY_DATABASE_URI="sqlite://", IDEMPOTENCY_STORE=MemoryStore(FrozenClock())
        )
        SQLAlchemy(app)
        if self.late:
            self.idempotency.init_app(app)
        self.register(app, adapter)
        if not self.late:
            self.idempotency.init_app(app)
        self.blueprint.name = "shop"
        app.register_blueprint(self.blueprint)
        return app

    def register(self, app: Flask, adapter: type[Sent]) -> None:
        def note(name: str, value: Any) -> Any:
            self.used.append((name, app))
            return value

        idempotency, outbox = self.idempotency, self.idempotency.outbox()

        @idempotency.principal_loader
        def principal() -> str:
            return str(note("principal", "alice"))

        @idempotency.tenant_loader
        def tenant() -> str:
            return str(note("tenant", "acme"))

        @idempotency.quota_loader
        def quota(tenant: str | None) -> None:
            note("quota", None)

        @idempotency.replay_guard
        def allow(record: Any) -> bool:
            return bool(note("replay_guard", True))

        @idempotency.problem_renderer
        def render(problem: Any, **_: Any) -> None:
            note("renderer", None)

        @idempotency.resolver("shop.pay")
        def resolve(unknown: Any) -> Any:
            raise NotImplementedError

        def decide(response: Any, error: Any) -> None:
            note("decide", None)

        idempotency.configure(self.blueprint, decide=decide)
        idempotency.inbox("billing", decide=decide)
        outbox.route("mail.*", adapter(app))


def used_by(module: Module, app: Flask) -> set[str]:
    """Send what calls each function, and return which were those of this application."""
    module.used.clear()
    client, one = app.test_client(), uuid4().hex
    for key in (one, one, "two words"):
        client.post("/pay", headers={"Idempotency-Key": key})
    assert all(each is app for _, each in module.used)
    return {name for name, _ in module.used}


EVERY = {"principal", "tenant", "quota", "replay_guard", "renderer", "decide"}


def closure_of(resolver: Any) -> Any:
    return resolver.__closure__ and resolver.__closure__[0].cell_contents


@pytest.mark.parametrize("late", (True, False), ids=("after init_app", "before init_app"))
def test_each_application_of_a_factory_keeps_its_own_functions(late: bool) -> None:
    """In both orders, and while the others live. A closure of another one would ask the other's bank."""
    module = Module(late)
    first, second, third = apps = [module.create_app() for _ in range(3)]

    for app in (second, first, third, first):
        assert EVERY == used_by(module, app)
    for app in apps:
        services = app.extensions["idempotency_outbox"]
        assert app is services.route_of("mail.receipt").adapter.app
        assert [app] == [route.adapter.app for route, _ in services.routes()]
    resolvers = [app.extensions["idempotency"].loaders.resolvers["shop.pay"] for app in apps]
    assert 3 == len({id(each) for each in resolvers})
    module.celery.close()


@pytest.mark.parametrize("late", (True, False))
def test_an_application_that_has_ended_leaves_nothing_to_the_next(late: bool) -> None:
    """Each test of a suite makes one, and the former is garbage or not."""
    module = Module(late)
    for _ in range(3):
        assert EVERY == used_by(module, module.create_app())


def test_a_function_of_the_module_serves_every_application() -> None:
    """Also if it is registered when some are there already; and another one takes its place in all."""
    idempotency = Idempotency(secret="s-9f2c47d1e8b35a60", store="memory://")
    apps = [Flask("shop"), Flask("shop")]
    for app in apps:
        app.testing = True
        idempotency.init_app(app)
    first, second = (lambda: "alice"), (lambda: "bob")

    for loader in (first, first, second):
        idempotency.principal_loader(loader)
        assert [loader, loader] == [app.extensions["idempotency"].loaders.principal for app in apps]


def test_a_helper_may_register_again_for_its_application() -> None:
    """Nothing was set up since, so the new closure is for the application that is there."""
    idempotency = Idempotency(secret="s-9f2c47d1e8b35a60", store="memory://")

    def name(principal: str) -> Callable[[], str | None]:
        @idempotency.principal_loader
        def load() -> str | None:
            return principal

        return load

    name("alice")
    app = Flask("shop")
    app.testing = True
    idempotency.init_app(app)
    loaded = name("bob")

    assert loaded is app.extensions["idempotency"].loaders.principal


def test_another_function_or_route_of_the_name_is_refused() -> None:
    module = Module(late=True)
    module.create_app()

    with pytest.raises(ConfigurationError, match="has one already"):
        module.idempotency.resolver("shop.pay")(lambda unknown: NotImplemented)
    with pytest.raises(ConfigurationError, match="has a route already"):
        module.create_app(Elsewhere)
    with pytest.raises(ConfigurationError, match="has a route already"):
        module.idempotency.outbox().route("mail.*", Sent(Flask("shop")))
    # The same line twice, for one application.
    add = (
        lambda: module.idempotency.outbox().route("bills.*", Sent(Flask("shop"))),
        lambda: module.idempotency.resolver("shop.refund")(lambda unknown: NotImplemented),
    )
    for each in add:
        each()
        with pytest.raises(ConfigurationError, match="already"):
            each()
    with pytest.raises(ConfigurationError, match="with another policy"):
        module.idempotency.inbox("billing", decide=lambda response, error: None)
    module.celery.close()


def test_the_janitors_tasks_run_for_the_newest_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another name is refused: its tasks would be lost in silence."""
    module = Module(late=True)

    def create_app() -> Flask:
        app = module.create_app()
        register(module.celery, app)
        return app

    first = create_app()
    where: list[Flask] = []

    def sweep(**options: object) -> int:
        where.append(current_app._get_current_object())  # type: ignore[attr-defined]
        return 0

    second = create_app()
    for app in (first, second):
        monkeypatch.setattr(app.config["IDEMPOTENCY_STORE"].expiry, "sweep", sweep)
    run(module.celery, "expire")

    assert [second] == where
    other = Flask("other")
    other.testing = True
    other.config["IDEMPOTENCY_STORE"] = MemoryStore(FrozenClock())
    Idempotency(other, secret="s-9f2c47d1e8b35a60")
    with pytest.raises(ConfigurationError, match="already runs the tasks of another Flask application"):
        register(module.celery, other)
    module.celery.close()


@pytest.mark.parametrize("configured", (True, False))
def test_the_schedule_is_that_of_the_newest_application(configured: bool) -> None:
    """An entry of the user with the same name stays."""
    celery_app, every = Celery("jobs", broker="memory://", set_as_current=False), [5, 7]
    celery_app.conf.beat_schedule = {"flask_idempotency.expire": {"task": "mine", "schedule": 60}}
    if configured:
        celery_app.conf.get("timezone")
    for seconds in every:
        app = Flask("shop")
        app.testing = True
        app.config |= {"IDEMPOTENCY_STORE": MemoryStore(FrozenClock()), "IDEMPOTENCY_REAP_INTERVAL": seconds}
        Idempotency(app, secret="s-9f2c47d1e8b35a60")
        register(celery_app, app)

    schedule = celery_app.conf.beat_schedule
    assert (7.0, "mine") == (
        schedule["flask_idempotency.reap"]["schedule"],
        schedule["flask_idempotency.expire"]["task"],
    )
    celery_app.close()


def test_what_comes_from_the_same_code_is_the_same() -> None:
    def made(value: int) -> Callable[[], int]:
        return lambda: value

    pair = [lambda: 1, lambda: 1]

    assert is_same(made(1), made(2))
    assert not is_same(*pair)
    assert is_same({"keep": 5, "decide": made(1)}, {"keep": 5, "decide": made(2)})
    assert not is_same({"keep": 5, "decide": made(1)}, {"keep": 6, "decide": made(2)})
    assert not is_same(made(1), None)
    assert is_same(Module(True).create_app, Module(True).create_app)
    assert not is_same(Module(True).create_app, Module(True).register)
    assert is_same(Outbox, Outbox)
    assert not is_same(Sent, Elsewhere)
