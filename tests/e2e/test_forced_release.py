"""A worker stands still for longer than its lease, a person overrules every warning, and then it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from flask import abort
from sqlalchemy import BigInteger, create_engine, insert, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from example_app.demo.servers import RedisServer
from flask_idempotency import current_claim
from flask_idempotency.assembly import build_store
from flask_idempotency.engine.model import State
from flask_idempotency.sql import fenced
from flask_idempotency.web.janitor import settler_of
from tests.e2e.conftest import Serve
from tests.e2e.janitor_crowd import looked_after
from tests.e2e.ledger import Ledger
from tests.e2e.processes import pause, resume
from tests.e2e.till import Till
from tests.e2e.wire import Order, Wire, ask, ask_until_settled
from tests.lab.clock import DAY, Place

LEASE = 1.0


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)
    written_by: Mapped[int | None] = mapped_column(BigInteger)


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Any]:
    """Rows beside which a claim is held: in another database than its record is."""
    engine = create_engine(f"sqlite:///{tmp_path / 'books.sqlite'}")
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(Account), [{"id": 1, "balance": 0}])
    yield engine
    engine.dispose()


def released_by_force(store: Any, app: Any) -> int:
    """How many quarantined keys a person has released who was told that their owners may live."""
    state = app.extensions["idempotency"]
    settler = settler_of(state.built, state.settings, state.observers)
    assert settler is not None
    found = store.recovery.scan(State.QUARANTINED, limit=100).found
    return sum(settler.force_release(each, actor="operator", reason="they said so", forced=True) for each in found)


def test_limit_a_release_by_force_while_the_owner_lives_runs_a_plain_view_twice(
    serve_once: Serve, redis_server: RedisServer, ledger: Ledger, ledger_server: RedisServer
) -> None:
    """The limit: nobody can tell a frozen worker from a dead one. Its client is still told of one answer only."""
    victim = serve_once(redis_server, lease=LEASE, name="victim")
    other = serve_once(redis_server, lease=LEASE, name="other")
    order = Order("/plain")
    with Wire(victim.port) as wire:
        wire.send(order.attempt("pause", "effect"))
        worker = ledger.paused(order.case)
        pause(worker)
        assert (409, "outcome-unknown") == ask_until_settled(other.port, order.attempt("effect")).told
        with closing(cast("Any", build_store(redis_server.url, memory={"after_loss": "run"}))) as store:
            app = looked_after(store=store, ledger=ledger_server.url, config={}, crowd="")
            assert 1 == released_by_force(store, app)
        second = ask(other.port, order.attempt("effect"))
        ledger.let_go(order.case)
        resume(worker)
        late = wire.answer()

    assert (201, False) == (second.status, second.replayed)
    assert (201, True, second.body) == (late.status, late.replayed, late.body)
    assert (2, 2) == (ledger.runs(order.case), len(ledger.effects(order.case)))


def test_after_a_release_by_force_the_fence_stops_who_comes_late(place: Place, books: Any) -> None:
    """A view that writes under `fenced()` is entered twice as well, and what its late owner would write is refused."""
    till, matched = Till(place.store), []

    def pay() -> tuple[dict[str, int], int]:
        till.pause_if_told()
        with Session(books) as session:
            paid = update(Account).where(Account.id == 1).values(balance=Account.balance + 100)
            rows = session.execute(fenced(paid, Account.written_by, current_claim.fence))
            matched.append(cast("Any", rows).rowcount)
            if not matched[-1]:
                abort(409)
            session.commit()
        return {"fence": current_claim.fence}, 201

    till.app.add_url_rule("/fenced", "fenced", pay, methods=["POST"])
    owner = till.begin("/fenced", "k")
    place.set_ahead(DAY)
    assert (409, "outcome-unknown") == till.ask("/fenced", "k").told
    place.set_ahead(0)
    assert 1 == released_by_force(place.store, till.app)
    second = till.ask("/fenced", "k")
    late = owner.finish()

    assert (201, None, second.body) == (*second.told, late.body)
    assert [1, 0] == matched
    with books.connect() as connection:
        assert 100 == connection.execute(select(Account.balance)).scalar_one()
