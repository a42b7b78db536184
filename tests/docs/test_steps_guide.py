"""The checkout of the guide to durable steps: at whatever point its worker dies, each effect happens once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from flask import Flask
from flask.testing import FlaskClient
from flask_jwt_extended import JWTManager, create_access_token, get_jwt_identity, jwt_required
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from docs.generate import HERE
from flask_idempotency import Idempotency, current_claim, idempotent
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.testing import every_crash
from flask_idempotency.web.janitor import janitor_of
from tests.docs.test_pages import BLOCK, run_block, surroundings

PAGE = (HERE / "guides" / "steps.md").read_text(encoding="utf-8")
CART = SimpleNamespace(id="cart-1", card="tok_visa", total=1050, email="alice@shop.example")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    cart_id: Mapped[str]
    charge_id: Mapped[str]
    total: Mapped[int]


class World:
    """The other sides: stock and mailer know a key that comes twice, and the provider does not."""

    def __init__(self) -> None:
        self.did: Counter[str] = Counter()
        self.charges: dict[str, dict[str, str]] = {}
        self._keys: set[tuple[str, str]] = set()

    def once(self, what: str, key: str) -> None:
        if (what, key) not in self._keys:
            self._keys.add((what, key))
            self.did[what] += 1

    def charge(self, card: str, total: int, *, key: str) -> dict[str, str]:
        assert (CART.card, CART.total) == (card, total)
        self.did["charge"] += 1
        self.charges[key] = {"id": f"ch_{self.did['charge']}"}
        return self.charges[key]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def app(tmp_path: Path, world: World) -> Flask:
    names, db = surroundings(), SQLAlchemy(model_class=Base)
    app: Flask = names["app"]
    app.testing = True
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path / 'shop.sqlite3'}",
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
    }
    names |= {
        "db": db,
        "Order": Order,
        "load_cart": {CART.id: CART}.__getitem__,
        "stock": SimpleNamespace(reserve=lambda cart, *, key: world.once("reserve", key)),
        "provider": SimpleNamespace(charge=world.charge, find=lambda *, key: world.charges.get(key)),
        "mailer": SimpleNamespace(send=lambda to, text, order, *, key: world.once("mail", key)),
    }
    (block,) = (block for block in BLOCK.findall(PAGE) if "def what_became_of_it" in block)
    exec(compile(block, "documentation", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    db.init_app(app)
    idempotency: Idempotency = names["idempotency"]
    idempotency.init_app(app)
    with app.app_context():
        db.create_all()
    return app


def check_out(client: FlaskClient, key: str) -> Any:
    return client.post("/checkout", json={"cart": CART.id}, headers={"Idempotency-Key": key})


def effects_of(app: Flask, world: World) -> Callable[[], Mapping[str, int]]:
    def effects() -> Mapping[str, int]:
        with app.app_context(), app.extensions["sqlalchemy"].engine.connect() as connection:
            orders = connection.execute(select(func.count()).select_from(Order)).scalar_one()
        return {**world.did, "orders": orders}

    return effects


def test_the_checkout_survives_a_crash_at_each_point(app: Flask, world: World) -> None:
    """Only a death in the charge leaves a doubt."""
    report = every_crash(app, check_out, effects=effects_of(app, world))

    doubtful = {point for point, end in report.ends.items() if end == "in doubt (charge)"}
    assert {"charge: in its function", "charge: after its function"} == doubtful
    assert {"201"} == {end for point, end in report.ends.items() if point not in doubtful}
    assert {"reserve", "charge", "save", "mail"} <= {point.partition(":")[0] for point in report.ends}


def test_the_resolver_settles_only_what_the_provider_knows(app: Flask, world: World) -> None:
    """Before the provider has the charge, its silence is no proof, and the step stays in doubt."""

    def settle() -> None:
        janitor_of(app).run("reap", Batcher())

    with pytest.raises(AssertionError) as caught:
        every_crash(app, check_out, effects=effects_of(app, world), settle=settle)

    assert "charge: in its function -> in doubt (charge)" in str(caught.value)
    assert "charge: after its function -> 201" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "then", "charged"),
    (
        (201, (201, None), 1),
        (402, (402, None), 2),
        (502, (409, "outcome-unknown"), 1),
        (0, (409, "outcome-unknown"), 1),
    ),
)
def test_only_the_answer_of_the_provider_is_harmless(
    monkeypatch: pytest.MonkeyPatch, status: int, then: tuple[int, str | None], charged: int
) -> None:
    """Status 0: the reply is lost."""
    names, sent = surroundings(), []

    def post(url: str, **options: Any) -> requests.Response:
        sent.append(options)
        if not status:
            raise requests.ReadTimeout
        response = requests.Response()
        response.status_code, response._content = status, b'{"id": "ch_1"}'
        return response

    monkeypatch.setattr(requests, "post", post)
    (block,) = (block for block in BLOCK.findall(PAGE) if "response.raise_for_status()" in block)
    exec(compile(block, "documentation", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    app: Flask = names["app"]

    def charge() -> Any:
        try:
            return {"charge": names["charge_card"]("tok_visa", 1050)}, 201
        except names["CardDeclined"]:
            return {}, 402

    decided = idempotent(required=True, steps=(names["charge_card"],), release_statuses=(402,))
    app.add_url_rule("/charges", "charges", decided(charge), methods=["POST"])
    names["idempotency"].init_app(app)
    client = app.test_client()
    client.post("/charges", headers={"Idempotency-Key": "k"})
    again = client.post("/charges", headers={"Idempotency-Key": "k"})

    assert then == (again.status_code, (again.get_json() or {}).get("code"))
    assert charged == len(sent)


def unattended(app: Flask, names: Mapping[str, Any], **headers: str) -> tuple[int, Any]:
    """Charge, fail behind the view, and let the janitor finish it. Return what a late retry gets."""
    failing = [True]

    def fail(response: Any) -> Any:
        if failing:
            failing.clear()
            raise RuntimeError("the application failed behind its view")
        return response

    app.after_request(fail)
    names["idempotency"].init_app(app)
    client = app.test_client(use_cookies=False)
    sent = {"json": {"card": "tok_visa"}, "headers": {"Idempotency-Key": "k", **headers}}
    assert 500 == client.post("/rides", **sent).status_code
    report: Any = janitor_of(app).run("finish", Batcher())
    assert (1, 0) == (report.completed, report.failed)
    late = client.post("/rides", **sent)
    assert "true" == late.headers["Idempotency-Replayed"]
    return late.status_code, late.get_json()


def rides(world: World) -> dict[str, Any]:
    names = surroundings()
    names["app"].config["SECRET_KEY"] = "kept-in-tests-only-and-32-bytes-long"
    charge = world.charges.setdefault
    names["provider"] = SimpleNamespace(
        charge=lambda card, total: charge(card, {"id": f"ch_{len(world.charges)}"})["id"]
    )
    return names


def test_a_ride_is_finished_for_a_user_of_flask_login(world: World) -> None:
    names = run_block(PAGE, "login_user(load_user(principal))", rides(world))
    names["login_manager"].request_loader(lambda sent: names["load_user"](sent.headers.get("X-User")))

    assert (201, {"charge": "ch_0"}) == unattended(names["app"], names, **{"X-User": "alice"})
    assert ["tok_visa"] == list(world.charges)


def test_a_ride_is_finished_for_a_user_of_flask_jwt_extended(world: World) -> None:
    names = rides(world)
    app: Flask = names["app"]
    JWTManager(app)
    run_block(PAGE, 'principal.removeprefix("jwt:")', names)

    @jwt_required()  # type: ignore[untyped-decorator, unused-ignore]
    def ride() -> Any:
        charge_id = current_claim.step("charge", names["provider"].charge, "tok_visa", 1050)
        return {"charge": charge_id, "by": get_jwt_identity()}, 201

    view = idempotent(required=True, steps=("charge",), finish="janitor")(ride)
    app.add_url_rule("/rides", "ride", view, methods=["POST"])
    with app.app_context():
        token = create_access_token("alice")

    assert (201, {"charge": "ch_0", "by": "alice"}) == unattended(app, names, Authorization=f"Bearer {token}")
