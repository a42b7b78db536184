"""Annotations that no endpoint leads to are named in the log and by doctor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest
from flask import Blueprint, Flask, current_app
from flask.views import MethodView

from flask_idempotency import Idempotency, claim_here, exempt, idempotent, webhook
from flask_idempotency.web.unreached import NOT_REACHED, NOT_REGISTERED, unreached
from tests.apps import new_world, run, said


def shop(guard: str = "chosen") -> Flask:
    """An application whose view is in this module, and whose payment is a function that the view looks up."""
    app = Flask("shop")
    app.config.update(TESTING=True, IDEMPOTENCY_GUARD=guard, IDEMPOTENCY_SECRET="Zk3m-8fjQwe_09xPlTnbvRsaYcdUh27L")
    app.add_url_rule("/call", "call", call, methods=["POST"])
    Idempotency(app)
    return app


def call() -> Any:
    return current_app.config["PAY"]()


@pytest.mark.parametrize("guard", ("all", "chosen"))
@pytest.mark.parametrize("annotate", (idempotent, exempt, idempotent(steps=("charge",)), webhook("acme", key="/id")))
def test_an_annotated_helper_is_named_at_the_first_request(
    annotate: Callable[[Any], Any], guard: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and whatever the request asks for. The endpoint that calls it runs as its own policy says."""
    app = shop(guard)

    @annotate
    def helper() -> str:
        return "paid"

    app.config["PAY"] = helper
    client = app.test_client()

    assert [404, 200, 200] == [client.get("/nowhere").status_code, *(client.post("/call").status_code for _ in "ab")]
    warned = [message for message in caplog.messages if message.startswith(NOT_REACHED)]
    assert 1 == len(warned)
    assert f"{__name__}.test_an_annotated_helper_is_named_at_the_first_request.<locals>.helper" in warned[0]


def test_a_function_in_the_table_of_a_dispatcher_is_named() -> None:
    """And the dispatcher is not closed: a dictionary may be any namespace."""
    app = shop()

    @idempotent
    def pay() -> str:
        return "paid"

    table = {"pay": pay}
    app.add_url_rule("/table", "table", lambda: table["pay"](), methods=["POST"])

    assert 200 == app.test_client().post("/table").status_code
    assert [f"{__name__}.{pay.__qualname__}"] == unreached(app).here


def test_doctor_names_it_and_the_views_of_a_blueprint_apart() -> None:
    """A blueprint that is not registered is no mistake of an annotation."""
    world = new_world()
    world.view()(call)
    late, nested = Blueprint("late", __name__), Blueprint("nested", "elsewhere")
    late.register_blueprint(nested)

    @idempotent
    def forgotten() -> str:
        return "paid"

    @late.post("/late")
    @idempotent
    def of_late() -> str:
        return "paid"

    class Nested(MethodView):
        @idempotent
        def post(self) -> str:
            return "paid"

    nested.add_url_rule("/nested", view_func=Nested.as_view("nested"))

    found = [each for each in said(run(world, "doctor", "--json"))["findings"] if each["check"] == "policies"]

    assert {"advice"} == {each["verdict"] for each in found}
    texts = {each["text"].partition(": ")[0]: each["text"] for each in found}
    assert "<locals>.forgotten" in texts[NOT_REACHED]
    assert "of_late" not in texts[NOT_REACHED]
    assert "<locals>.of_late" in texts[NOT_REGISTERED]
    assert "<locals>.Nested.post" in texts[NOT_REGISTERED]


def test_what_another_application_serves_is_not_named() -> None:
    """Two applications in one process, or of one test run."""
    first, second = shop(), shop()

    @first.post("/pay")
    @idempotent
    def pay() -> str:
        return "paid"

    assert ([], []) == unreached(second)


def test_what_is_garbage_is_not_named() -> None:
    """A class, and an application that served it, are in circles: they are there until the collector runs."""

    class Pay(MethodView):
        @idempotent
        def post(self) -> str:
            return "paid"

    former = Flask("former")
    former.add_url_rule("/pay", view_func=Pay.as_view("pay"))
    del former, Pay

    assert ([], []) == unreached(shop())


def test_an_annotation_in_a_module_that_the_application_does_not_use_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test run imports the views of many modules. Those that the views import are looked at."""

    @idempotent
    def imported() -> str:
        return "paid"

    imported.__module__, imported.__qualname__ = "elsewhere.services", "pay"
    app = shop()

    assert ([], []) == unreached(app)
    monkeypatch.setitem(globals(), "pay", imported)
    assert (["elsewhere.services.pay"], []) == unreached(app)


def test_what_an_endpoint_leads_to_is_not_named() -> None:
    """A base class, a method that a subclass replaces, and what a decorator wraps or hides."""
    app = shop()

    class Base(MethodView):
        @idempotent
        def post(self) -> str:
            return "paid"

    @idempotent
    class Pay(Base):
        @idempotent
        def post(self) -> str:
            return "paid"

    @claim_here
    @idempotent
    def wrapped() -> str:
        return "paid"

    @idempotent
    def hidden() -> str:
        return "paid"

    app.add_url_rule("/class", view_func=Pay.as_view("class"))
    app.add_url_rule("/wrapped", "wrapped", wrapped, methods=["POST"])
    app.add_url_rule("/hidden", "hidden", lambda: hidden(), methods=["POST"])

    assert ([], []) == unreached(app)


class LazyView:
    """As Flask documents it: the module of the view is imported when it is called first."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self.load = load
        self.__name__, self.__module__ = "lazy", __name__

    @cached_property
    def view(self) -> Any:
        return self.load()

    def __call__(self) -> Any:
        return self.view()


def test_a_view_that_a_request_imports_runs_no_second_time(caplog: pytest.LogCaptureFixture) -> None:
    """Its annotation was unknown, so the first request ran without it. The retry finds it, and does not pay again."""
    app = shop()
    runs: list[str] = []

    def load() -> Any:
        @idempotent
        def pay() -> str:
            runs.append("pay")
            return "paid"

        return pay

    app.add_url_rule("/pay", "pay", LazyView(load), methods=["POST"])
    client = app.test_client()

    assert [200, 500] == [client.post("/pay", headers={"Idempotency-Key": "k"}).status_code for _ in "ab"]
    assert ["pay"] == runs
    assert "was annotated while a request was served" in caplog.text
    assert [logging.WARNING] == [each.levelno for each in caplog.records if "while a request" in each.getMessage()]


def test_a_fault_of_the_search_closes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = shop()
    app.config["PAY"] = lambda: "paid"

    def fail(app: Flask, policies: Any) -> None:
        raise RuntimeError("an object of the application")

    monkeypatch.setattr("flask_idempotency.web.unreached.unprotected", fail)

    assert "paid" == app.test_client().post("/call").text
    assert "not every annotation could be checked" in caplog.text
