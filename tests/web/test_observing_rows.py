"""Transactional views that are only observed: their rows are committed as without a key, and counted as enforcing ends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Response, abort, make_response, request

from flask_idempotency import Step, current_claim, idempotent
from flask_idempotency.engine.events import ClaimGranted as Granted
from flask_idempotency.engine.events import Completed, Observation, Quarantined, Released, ReplayServed, UnknownRefused
from tests.stores.sql.shops import Shop, broken_commit, open_shop

OF_ENFORCED = {
    Granted: "new",
    ReplayServed: "replayed",
    Completed: "completed",
    Released: "released",
    Quarantined: "quarantined",
    UnknownRefused: "unknown",
}


@pytest.fixture
def shops(tmp_path: Path) -> Iterator[list[Shop]]:
    """An observing shop, an enforcing one, and one that observes nothing because its requests have no key."""
    opened = [
        open_shop(f"sqlite:///{tmp_path / f'{number}.db'}", IDEMPOTENCY_MODE=mode, existing=False)
        for number, mode in enumerate(("observe", "enforce", "enforce"))
    ]
    for shop in opened:
        shop.app.config["PROPAGATE_EXCEPTIONS"] = False
        views(shop)
    yield opened
    for shop in opened:
        shop.close()


def views(shop: Shop) -> None:
    @shop.view()
    def pay() -> Any:
        shop.pay(**({"account": 7} if request.args.get("do") == "refused" else {}))
        match request.args.get("do"):
            case "raise":
                raise RuntimeError("the view failed")
            case "declined":
                current_claim.keep_rows()
                return "declined", 402
            case "early":
                shop.db.session.commit()
                raise RuntimeError("the view failed after its own commit")
            case "abort":
                return abort(make_response("no such account", 422))
            case "stream":
                return Response(iter(["a", "b"]))
            case "422" | "503" | "302" as status:
                return status, int(status)
            case _:
                return "paid", 201

    @shop.view("/steps")
    @idempotent(effects="steps", steps=(Step("save", effects="transactional"),))
    def steps() -> Any:
        current_claim.step("save", shop.pay, 7)
        return "saved", 201


def counted(shop: Shop) -> list[str]:
    if any(isinstance(event, Observation) for event in shop.events):
        return [event.outcome for event in shop.events if isinstance(event, Observation)]
    return [OF_ENFORCED[type(event)] for event in shop.events if type(event) in OF_ENFORCED]


@pytest.mark.parametrize("do", ("", "raise", "declined", "422", "503", "302", "refused", "abort", "stream"))
def test_rows_are_committed_as_without_a_key_and_counted_as_with_one(shops: list[Shop], do: str) -> None:
    """The first request, and then its retry on what became of it."""
    observed, enforced, unkeyed = shops
    path = f"/pay?do={do}"

    answers = [
        (observed.post(path), enforced.post(path), unkeyed.post(path, key=None))
        for _ in range(2)
    ]  # fmt: skip

    for seen, _, bare in answers:
        assert (bare.status, bare.data, list(bare.headers)) == (seen.status, seen.data, list(seen.headers))
    assert unkeyed.payments() == observed.payments()
    assert counted(enforced) == [each for each in counted(observed) if each != "not-kept"]
    assert ("stream" == do) is ("not-kept" in counted(observed))


def test_an_early_commit_is_not_noticed(shops: list[Shop]) -> None:
    """Without a record to mark, no listener looks for it. The guide says that this differs."""
    observed, enforced, unkeyed = shops
    for shop, key in ((observed, "k"), (enforced, "k"), (unkeyed, None)):
        assert 500 == shop.post("/pay?do=early", key=key).status_code

    assert [1, 1, 1] == [shop.payments() for shop in shops]
    assert (["new", "quarantined"], ["new", "released"]) == (counted(enforced), counted(observed))


@pytest.mark.parametrize("applied", (False, True))
def test_a_commit_that_fails_is_answered_as_without_a_key(
    shops: list[Shop], applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed, _, unkeyed = shops
    answers = []
    for shop, key in ((observed, "k"), (unkeyed, None)):
        with monkeypatch.context() as patch:
            broken_commit(shop, patch, applied=applied)
            answers.append(shop.post(key=key))

    assert (answers[1].status, answers[1].data) == (answers[0].status, answers[0].data)
    assert ["new", "released"] == counted(observed)


def test_a_commit_that_fails_is_never_counted_as_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under a policy that keeps the 5xx of views: this one is ours."""
    shop = open_shop(f"sqlite:///{tmp_path / 'kept.db'}", IDEMPOTENCY_MODE="observe", IDEMPOTENCY_KEEP_STATUSES=["5xx"])
    views(shop)
    broken_commit(shop, monkeypatch, applied=False)
    shop.post()
    shop.close()

    assert ["new", "released"] == counted(shop)


def test_a_transactional_step_is_committed(shops: list[Shop]) -> None:
    observed, _, unkeyed = shops
    for shop, key in ((observed, "k"), (unkeyed, None)):
        for _ in range(2):
            assert 201 == shop.post("/steps", key=key).status_code

    assert [2, 2] == [observed.payments(), unkeyed.payments()]
    assert ["new", "completed", "replayed"] == counted(observed)


def test_no_record_is_written(shops: list[Shop]) -> None:
    observed = shops[0]
    observed.post()

    assert observed.record() is None


def test_a_transactional_view_without_its_store_stays_closed() -> None:
    """It leaves its commit to us, so without us its rows would be lost."""
    from flask import Flask

    from flask_idempotency import Idempotency

    app = Flask("x")
    app.config["TESTING"] = True
    Idempotency(app, secret="only-tests-9f2c47d1e8b35a60c1d47be2", mode="observe")

    @app.post("/pay")
    @idempotent(effects="transactional")
    def pay() -> str:
        return "paid"

    assert 500 == app.test_client().post("/pay").status_code
