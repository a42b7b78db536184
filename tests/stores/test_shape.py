"""Every store remembers the shape of an application's identity, and no process overwrites what another has noted."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from secrets import token_hex
from threading import Barrier

import pytest

from flask_idempotency.engine.keys import Identity
from flask_idempotency.operations.identity import LOADER, NOTED_EVERY_SECONDS, IdentityShape, look, shape_of
from flask_idempotency.stores.memory.store import MemoryStore
from flask_idempotency.testing.doubles import FrozenClock
from tests.backends import MakeStore, make_kept
from tests.sql_backends import maria_database, sql_databases, sql_stores

__all__ = ["make_kept", "maria_database", "sql_databases", "sql_stores"]

KEEP = 86400.0


def shape(name: str, *secrets: str, namespace: str = "shop", tenant: bool = False, keep: float = KEEP) -> IdentityShape:
    every = [Identity(secret.encode()) for secret in secrets or ("one",)]
    return shape_of(name, namespace, every, tenant=(LOADER,) if tenant else (), keep=keep)


def test_a_change_is_noticed_until_keep_is_over(make_kept: MakeStore, clock: FrozenClock) -> None:
    # Other tests of this process use the same database, by the same clock.
    book, name = make_kept(clock).task_log, token_hex()  # type: ignore[attr-defined]
    look(book, shape(name, name, keep=100_000.0), note=True)
    began = book.now()
    clock.advance(60)

    for _ in range(2):
        (change,) = look(book, shape(name, name, tenant=True), note=True).changes
        assert "a tenant_loader was added" in change.what
        assert abs(change.since - began - 60) < 1
        assert abs(change.until - began - 60 - 100_000) < 1
        clock.advance(NOTED_EVERY_SECONDS)
        (change,) = look(book, shape(name, name, tenant=True), note=False).changes
    clock.advance(100_000 - 60)
    assert () == look(book, shape(name, name, tenant=True), note=True).changes


def test_a_look_without_a_note_changes_no_data(make_kept: MakeStore, clock: FrozenClock) -> None:
    book = make_kept(clock).task_log  # type: ignore[attr-defined]
    look(book, shape("shop 1"), note=True)
    before = {name: entry.report for name, entry in book.reports().items()}

    assert look(book, shape("shop 1", tenant=True), note=False).changes
    assert before == {name: entry.report for name, entry in book.reports().items()}


def test_concurrent_notes_lose_no_shape(make_kept: MakeStore, clock: FrozenClock) -> None:
    book = make_kept(clock).task_log  # type: ignore[attr-defined]
    shapes = [shape("shop 2", f"secret {number}", tenant=number % 2 == 0) for number in range(6)]
    barrier = Barrier(len(shapes))

    def start(mine: IdentityShape) -> None:
        barrier.wait(60)
        for _ in range(200):
            if look(book, mine, note=True).noted:
                return
        raise AssertionError("never noted")

    with ThreadPoolExecutor(len(shapes)) as threads:
        list(threads.map(start, shapes))

    # Each of them sees the five others.
    assert [5] * 6 == [len(look(book, each, note=False).changes) for each in shapes]


@pytest.mark.parametrize(
    ("at", "number"),
    [
        *product(("at", "keep", "last"), (f"1{'0' * 400}", "Infinity", "NaN", "null")),
        *product(("former", "present"), ("Infinity", "[]", '{"owner":1}', '{"owner":"","tenant":1,"principal":[]}')),
        ("present", '{"owner":"","tenant":["function"],"principal":[]}'),
    ],
)
def test_a_damaged_history_counts_as_none(clock: FrozenClock, at: str, number: str) -> None:
    """It is in the store, where others may write. `doctor` and `stats` read it, and a new history replaces it."""
    book, mine = MemoryStore(clock=clock).task_log, shape("shop")
    look(book, shape("shop", "former"), note=True)
    assert 1 == len(look(book, mine, note=False).changes)
    (name,) = book.reports()
    report, count = re.subn(
        rf'"{at}":([0-9.]+|null|{{[^}}]*}})', lambda _: f'"{at}":{number}', book.reports()[name].report
    )
    assert count
    book.report(name, report)

    assert () == look(book, mine, note=False).changes
    assert look(book, mine, note=True).noted
    assert () == look(book, mine, note=False).changes
