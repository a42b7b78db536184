"""A checkout of three steps, whose requests the janitor finishes: for tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flask import Flask, abort, g, request
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, Step, current_claim, idempotent
from flask_idempotency.maintenance.finish import FinishReport
from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.testing import FrozenClock
from flask_idempotency.web.janitor import janitor_of

SECRET = "only-tests-9f2c47d1e8b35a60c1d47be2"
STEPS = (Step("reserve", effects="deduplicated"), "charge", Step("mail", effects="deduplicated"))


class Shop:
    """A checkout of three steps in an application that signs callers in by a header, and its janitor."""

    def __init__(self, store: Any = None, clock: FrozenClock | None = None, **config: Any) -> None:
        self.clock = FrozenClock() if clock is None else clock
        self.store = MemoryStore(self.clock) if store is None else store
        self.app = Flask("shop")
        self.app.secret_key = "only-tests"
        self.ran: Counter[str] = Counter()
        self.users = {"alice", "bob"}
        self.seen: list[Any] = []
        self.failing = True
        """Whether the view stops after its charge."""
        self.cart: Any = 1
        """What the client sends as its cart."""
        policy = {"steps": STEPS, "finish": "janitor", **config.pop("policy", {})}
        self.extension = Idempotency(
            self.app,
            principal=lambda: g.get("user"),
            tenant=lambda: g.get("tenant"),
            store=self.store,
            secret=config.pop("secret", SECRET),
            **config,
        )
        self.app.before_request(self.authenticate)
        self.extension.act_for(self.act_for)
        view = idempotent(required=True, **policy)(lambda **kwargs: self.checkout())
        self.app.add_url_rule("/checkout/<cart>", "checkout", view, methods=["POST"])
        self.events: list[Any] = []
        self.app.extensions["idempotency"].observers.add(self.events.append)

    def authenticate(self) -> Any:
        user = request.headers.get("X-Token") or g.get("acting")
        if user not in self.users:
            abort(401)
        g.user, g.tenant = user, g.get("acting_tenant", "acme")

    def act_for(self, principal: Any, tenant: Any) -> Any:
        g.acting, g.acting_tenant = principal, tenant

    def run(self, name: str, result: Any = None) -> Any:
        self.ran[name] += 1
        return result

    def checkout(self) -> Any:
        self.seen.append((current_claim.finishing, request.get_json()["cart"], request.args.get("q"), g.user))
        current_claim.step("reserve", self.run, "reserve")
        return self.checkout_after_reserve()

    def checkout_after_reserve(self) -> Any:
        paid = current_claim.step("charge", self.run, "charge", {"id": "ch_1"})
        if self.failing:
            return {}, 503
        current_claim.step("mail", self.run, "mail")
        return {"paid": paid["id"]}, 201

    def post(self, key: str = "k", user: str = "alice", **headers: str) -> TestResponse:
        return self.app.test_client().post(
            "/checkout/1?q=%C3%A9",
            json={"cart": self.cart},
            headers={"Idempotency-Key": key, "X-Token": user, **headers},
        )

    def finish(self) -> FinishReport:
        report: Any = janitor_of(self.app, host_clock=self.clock).run("finish", Batcher())
        return report  # type: ignore[no-any-return]

    def told(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def counts(report: FinishReport) -> dict[str, int]:
    names = ("completed", "failed", "gave_up", "quarantined", "overtaken", "waiting", "unreadable")
    return {name: getattr(report, name) for name in names if getattr(report, name)}


def paused(**config: Any) -> Shop:
    """A shop with one checkout that stopped after its charge."""
    shop = Shop(**config)
    assert "paused" == shop.post().headers["Idempotency-Status"]
    shop.failing = False
    return shop
