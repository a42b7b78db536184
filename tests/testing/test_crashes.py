"""`every_crash` passes a checkout that keeps its promises, and names what is wrong with a broken one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import func, select
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, Step, StillUnknown, current_claim, current_step, idempotent
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import State
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock, every_crash
from flask_idempotency.testing.contract.support import for_each
from flask_idempotency.web.janitor import janitor_of
from tests.stores.sql.shops import Base, Payment

PLAIN = ("charge", Step("mail", effects="deduplicated"))


class Slow(Exception):
    """The gateway of the provider does not answer in time. It may have charged."""


class Declined(Exception):
    """The card is refused, so nothing happened."""


class World:
    """The other side: a payment provider and a mailer, which know their callers' keys."""

    def __init__(self) -> None:
        self.did: Counter[str] = Counter()
        self.seen: set[str] = set()
        self.raises: Exception | None = None

    def act(self, name: str, key: str | None = None) -> str:
        if key is None or key not in self.seen:
            self.did[name] += 1
        if key is not None:
            self.seen.add(key)
        return name

    def act_once(self, name: str) -> str:
        return self.act(name, current_step.downstream_key)

    def counts(self) -> Mapping[str, int]:
        return self.did


def shop(view: Callable[[], Any], steps: Any, **config: Any) -> Flask:
    app = Flask("shop")
    app.testing = True
    config = {"store": MemoryStore(), "secret": "s-9f2c47d1e8b35a60", **config}
    Idempotency(app, **config)
    app.add_url_rule("/checkout", "checkout", idempotent(required=True, steps=steps)(view), methods=["POST"])
    return app


def checkout(client: FlaskClient, key: str) -> TestResponse:
    return client.post("/checkout", json={"cart": 1}, headers={"Idempotency-Key": key})


def buy(world: World) -> Callable[[], Any]:
    def view() -> Any:
        current_claim.step("charge", world.act, "charge")
        current_claim.step("mail", world.act_once, "mail")
        return {}, 201

    return view


def refusal(app: Flask, world: World) -> str:
    """What `every_crash` says of a checkout that breaks a promise."""
    with pytest.raises(AssertionError) as raised:
        every_crash(app, checkout, effects=world.counts)
    return str(raised.value)


def test_each_point_ends_in_the_answer_or_in_a_doubt() -> None:
    """Case 59, without a resolver."""
    world = World()

    report = every_crash(shop(buy(world), PLAIN), checkout, effects=world.counts)

    assert {
        "without a crash": "201",
        "charge: before it begins": "201",
        "charge: in its function": "in doubt (charge)",
        "charge: after its function": "in doubt (charge)",
        "charge: after it is recorded": "201",
        "mail: before it begins": "201",
        "mail: in its function": "201",
        "mail: after its function": "201",
        "mail: after it is recorded": "201",
        "before the answer is kept": "201",
        "after the answer is kept": "201",
    } == report.ends
    ran = {str(crash.point): dict(crash.ran) for crash in report.crashes}
    assert {"charge": 1, "mail": 2} == ran["mail: after its function"]
    assert {} == ran["charge: in its function"]
    assert "charge: in its function -> in doubt (charge)" in str(report)


def test_the_clock_of_a_store_may_stand_still() -> None:
    world, clock = World(), FrozenClock()
    app = shop(buy(world), PLAIN, store=MemoryStore(clock))
    assert "201" == every_crash(app, checkout, clock=clock).ends["charge: before it begins"]


@for_each(
    ("resolver", "fault"),
    [
        ("right", ""),
        ("absent", "charge: in its function: nothing has settled the doubt"),
        ("wrong", "charge: after its function: the plain step 'charge' ran twice"),
    ],
)
def test_a_resolver_ends_each_doubt(resolver: str, fault: str) -> None:
    """Case 59: the resolver knows whether the provider has charged."""
    world, clock = World(), FrozenClock()
    extension = Idempotency(store=MemoryStore(clock), secret="s-9f2c47d1e8b35a60", keep=3_000_000)
    app = Flask("shop")
    app.testing = True
    extension.init_app(app)

    def view() -> Any:
        current_claim.step("charge", world.act_once, "charge")
        return {}, 201

    app.add_url_rule("/checkout", "checkout", idempotent(required=True, steps=("charge",))(view), methods=["POST"])

    @extension.resolver("checkout")
    def what_became_of_it(unknown: Any) -> Any:
        step = unknown.step("charge")
        charged = step.downstream_key in world.seen and resolver == "right"
        return step.completed("charge") if charged else step.never_happened()

    def settle() -> None:
        # "Never happened" is believed when the resolver has said it for a while.
        for _ in range(0 if resolver == "absent" else 3):
            clock.advance(100_000.0)
            janitor_of(app, host_clock=lambda: clock.now).run("reap", Batcher(sleep=print, monotonic=lambda: 0.0))

    if fault:
        with pytest.raises(AssertionError) as raised:
            every_crash(app, checkout, effects=world.counts, settle=settle, clock=clock)
        assert fault in str(raised.value)
    else:
        report = every_crash(app, checkout, effects=world.counts, settle=settle, clock=clock)
        assert {"201"} == set(report.ends.values())


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "testing.md"
RECIPE = next(
    part for part in GUIDE.read_text(encoding="utf-8").split("```python\n") if "settle=reap" in part
).partition("```")[0]
"""The example of the guide to tests whose resolver settles the doubts."""


def test_the_recipe_of_the_guide_waits_for_its_resolver_and_says_so() -> None:
    names: dict[str, Any] = {}
    exec(compile(RECIPE, "testing.md", "exec", dont_inherit=True), names)  # noqa: S102 - our own page

    waited = {str(crash.point): (crash.waited, crash.says_never) for crash in names["report"].crashes if crash.waited}
    assert ["charge: in its function"] == list(waited)
    seconds, says_never = waited["charge: in its function"]
    assert (True, True) == (says_never, 900 <= seconds < 1000)
    assert (
        "charge: in its function -> 201 [charge 1x], waited for the resolver, who says it never happened, 15 min of"
        in str(names["report"])
    )


@for_each(
    ("old", "new", "fault"),
    [
        (", clock=clock)", ")", "which is believed in 15 min. Give the store a FrozenClock and pass it as clock="),
        ("FrozenClock()", "FrozenClock(4e9)", "begin with FrozenClock(), in the past"),
        ("step.never_happened()", "StillUnknown()", "charge: in its function: nothing has settled the doubt\n"),
    ],
)
def test_a_doubt_that_stays_says_what_it_waits_for(old: str, new: str, fault: str) -> None:
    recipe = RECIPE.replace("import every_crash", "import every_crash\nfrom flask_idempotency import StillUnknown")
    recipe = recipe.replace(old, new).replace("import FrozenClock, every_crash", "import FrozenClock, every_crash")
    if "clock=clock)" not in recipe:
        recipe = recipe.replace("MemoryStore(clock)", "MemoryStore()")
    with pytest.raises(AssertionError) as raised:
        exec(compile(recipe, "testing.md", "exec", dont_inherit=True), {"StillUnknown": StillUnknown})  # noqa: S102

    assert fault in str(raised.value)


class CountingStore(MemoryStore):
    """Counts what a worker does that ends its work without an answer."""

    ended = 0

    def release(self, key: StorageKey, token: bytes) -> State | None:
        self.ended += 1
        return super().release(key, token)

    def quarantine(self, key: StorageKey, token: bytes, reason: str) -> None:
        self.ended += 1
        super().quarantine(key, token, reason)


def test_a_dead_worker_cannot_end_its_claim() -> None:
    world, store = World(), CountingStore()
    every_crash(shop(buy(world), PLAIN, store=store), checkout, effects=world.counts)
    assert 0 == store.ended


def test_items_have_points_of_their_own() -> None:
    world = World()

    def view() -> Any:
        for line in (1, 2):
            current_claim.step(("mail", line), world.act_once, f"mail {line}")
        return {}, 201

    ends = every_crash(shop(view, PLAIN), checkout, effects=world.counts).ends
    assert {"mail 1: after its function", "mail 2: after its function"} <= ends.keys()
    assert 11 == len(ends)


def test_a_charge_outside_of_its_step_is_noticed() -> None:
    world = World()

    def view() -> Any:
        world.act("charge")
        current_claim.step("mail", world.act_once, "mail")
        return {}, 201

    text = refusal(shop(view, PLAIN), world)
    assert "mail: before it begins: 'charge' rose by 2, and without a crash it rises by 1" in text
    assert "mail: before it begins -> 201" in text


def test_a_deduplicated_step_without_its_key_is_noticed() -> None:
    world = World()

    def view() -> Any:
        current_claim.step("mail", world.act, "mail")
        return {}, 201

    text = refusal(shop(view, PLAIN), world)
    assert "mail: after its function: 'mail' rose by 2, and without a crash it rises by 1" in text
    assert "mail: in its function: " not in text


def failing(world: World, error: Exception, *, charged: bool) -> Callable[[], Any]:
    """A checkout whose first charge of each key fails."""
    failed: set[str] = set()

    def charge() -> None:
        key = current_step.downstream_key
        first = key not in failed
        failed.add(key)
        if charged or not first:
            world.act("charge")
        if first:
            raise error

    def view() -> Any:
        try:
            current_claim.step("charge", charge)
        except (Slow, Declined):
            return {}, 503
        return {}, 201

    return view


def test_a_timeout_called_harmless_is_noticed() -> None:
    world = World()
    text = refusal(shop(failing(world, Slow(), charged=True), [Step("charge", harmless=(Slow,))]), world)
    assert "without a crash: 'charge' raised Slow, which it calls harmless, but 'charge' rose by 1 while it ran" in text


def test_what_is_harmless_may_run_again() -> None:
    world = World()
    app = shop(failing(world, Declined(), charged=False), [Step("charge", harmless=(Declined,))])
    report = every_crash(app, checkout, effects=world.counts)
    assert ("201", {"charge": 1}) == (report.crashes[0].end, dict(report.crashes[0].ran))


def test_a_random_argument_is_noticed() -> None:
    world, numbers = World(), count()

    def view() -> Any:
        current_claim.step("charge", lambda number: world.act("charge"), next(numbers))
        return {}, 201

    text = refusal(shop(view, PLAIN), world)
    assert (
        "charge: after it is recorded: the end is neither the answer nor a doubt: quarantined (steps-changed)" in text
    )


def test_a_retry_that_never_succeeds_is_noticed() -> None:
    world = World()

    def view() -> Any:
        current_claim.step("charge", world.act, "charge")
        return {}, 201 if current_claim.attempt == 1 else 503

    assert "neither the answer nor a doubt: paused (503)" in refusal(shop(view, PLAIN), world)


def test_a_request_without_steps_is_refused() -> None:
    with pytest.raises(AssertionError, match="took no step and ended in 201"):
        every_crash(shop(lambda: ({}, 201), PLAIN), checkout)


def test_a_view_that_swallows_the_crash_does_nothing_more() -> None:
    world = World()

    def view() -> Any:
        try:
            current_claim.step("charge", world.act, "charge")
        finally:
            current_claim.step("mail", world.act_once, "mail")
        return {}, 201

    steps = ("charge", Step("mail", effects="deduplicated", intent=False))
    report = every_crash(shop(view, steps), checkout, effects=world.counts)
    ran = {str(crash.point): dict(crash.ran) for crash in report.crashes}
    assert {} == ran["charge: in its function"]
    assert {"charge": 1, "mail": 1} == ran["charge: after it is recorded"]


def test_another_answer_than_without_a_crash_is_noticed() -> None:
    world = World()

    def view() -> Any:
        current_claim.step("charge", world.act, "charge")
        return {}, 201 if current_claim.attempt == 1 else 200

    text = refusal(shop(view, PLAIN), world)
    assert "charge: after it is recorded: the answer is 200, and without a crash it is 201" in text


def sql_shop(path: Path, world: World, *, outside: bool) -> tuple[Flask, Callable[[], Mapping[str, int]]]:
    app, db = Flask("shop"), SQLAlchemy(model_class=Base)
    app.testing = True
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": f"sqlite:///{path}",
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
        "IDEMPOTENCY_SECRET": "for tests only: 9f2c47d1e8b35a60c1d47be2",
    }
    db.init_app(app)
    Idempotency(app)

    def save() -> int:
        payment = Payment(amount=1)
        db.session.add(payment)
        db.session.flush()
        if outside:
            world.act("told")
        return payment.id

    def view() -> Any:
        current_claim.step("charge", world.act, "charge")
        try:
            return {"payment": current_claim.step("save", save)}, 201
        finally:
            db.session.commit()

    steps = ("charge", Step("save", effects="transactional"))
    app.add_url_rule("/checkout", "checkout", idempotent(required=True, steps=steps)(view), methods=["POST"])
    with app.app_context():
        db.create_all()

    def effects() -> Mapping[str, int]:
        with app.app_context(), db.engine.connect() as connection:
            rows = connection.execute(select(func.count()).select_from(Payment)).scalar_one()
        return {**world.did, "rows": rows}

    return app, effects


def test_transactional_steps_happen_once(tmp_path: Path) -> None:
    app, effects = sql_shop(tmp_path / "shop.db", World(), outside=False)

    report = every_crash(app, checkout, effects=effects)

    ends = {
        str(crash.point): (crash.end, crash.effects.get("rows", 0), crash.committed["save"]) for crash in report.crashes
    }
    assert ("in doubt (charge)", 0, 0) == ends["charge: after its function"]
    assert ("201", 1, 1) == ends["save: in its function"]
    assert ("201", 1, 1) == ends["save: after its function"]
    assert ("201", 1, 1) == ends["save: after it is recorded"]
    rolled_back = next(crash for crash in report.crashes if str(crash.point) == "save: after its function")
    assert 2 == rolled_back.ran["save"]


def test_an_effect_that_a_rollback_cannot_undo_is_noticed(tmp_path: Path) -> None:
    app, effects = sql_shop(tmp_path / "shop.db", World(), outside=True)
    with pytest.raises(AssertionError, match="save: after its function: 'told' rose by 2"):
        every_crash(app, checkout, effects=effects)
