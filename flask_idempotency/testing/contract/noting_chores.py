"""Chores are written down, and done by one at a time."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Protocol

import pytest

from flask_idempotency.engine.capabilities import ChoreBook, Entry
from flask_idempotency.testing.clock import FrozenClock
from flask_idempotency.testing.contract.examples import a_token, near
from flask_idempotency.testing.contract.racing import ROUNDS, THREADS, at_once

LONGEST_NAME = 40
LONGEST_REPORT = 4000
LOCK = 60.0


class BookStore(Protocol):
    """A store that has a book of chores."""

    @property
    def chores(self) -> ChoreBook: ...


def a_chore() -> str:
    """One that nobody else does, of the longest name there may be."""
    return secrets.token_hex(LONGEST_NAME // 2)


class ChoreBookContract:
    """The specification of `chores.ChoreBook`. Override `store`."""

    @pytest.fixture
    def clock(self) -> FrozenClock:
        return FrozenClock()

    def test_the_time_is_the_stores(self, store: BookStore, clock: FrozenClock) -> None:
        """Seconds since the epoch; it passes."""
        assert near(clock.now) == store.chores.now()
        clock.advance(86400.5)
        assert near(clock.now) == store.chores.now()

    def test_a_chore_that_was_never_reported_is_not_in_the_book(self, store: BookStore) -> None:
        """Also when somebody is at it."""
        chore = a_chore()
        assert store.chores.take(chore, a_token(), lease=LOCK)

        assert chore not in store.chores.last()

    def test_what_was_reported_last_is_told(self, store: BookStore, clock: FrozenClock) -> None:
        """How long ago, and every character of it. What was written before is written over."""
        chore, other = a_chore(), a_chore()
        store.chores.note(chore, '{"removed":1}')
        clock.advance(100)
        store.chores.note(other, "{}")
        assert (near(100), '{"removed":1}') == told(store.chores.last(), chore)
        store.chores.note(chore, '{"removed":2}')
        clock.advance(0.5)

        assert (near(0.5), '{"removed":2}') == told(store.chores.last(), chore)
        assert (near(0.5), "{}") == told(store.chores.last(), other)

    @pytest.mark.parametrize(
        "report",
        (
            "",
            json.dumps({"said": "größer: ✓ \\ \" ' % :now"}, ensure_ascii=False),
            json.dumps("x" * (LONGEST_REPORT - 2)),
            json.dumps("é" * (LONGEST_REPORT - 2), ensure_ascii=False),
        ),
        ids=("empty", "odd", "longest", "longest, not ascii"),
    )
    def test_a_report_is_told_as_it_was_given(self, store: BookStore, report: str) -> None:
        """However long it may be, and whatever words are in it."""
        chore = a_chore()
        store.chores.note(chore, report)

        assert report == store.chores.last()[chore].report

    def test_a_report_outlives_everything(self, store: BookStore, clock: FrozenClock) -> None:
        """That nobody came for a year is what has to be told."""
        chore = a_chore()
        store.chores.note(chore, "{}")
        clock.advance(400 * 86400)

        assert (near(400 * 86400), "{}") == told(store.chores.last(), chore)

    def test_one_at_a_time(self, store: BookStore, clock: FrozenClock) -> None:
        """The second is refused, and a third; another chore is another's."""
        chore, token = a_chore(), a_token()

        assert store.chores.take(chore, token, lease=LOCK)
        assert [store.chores.take(chore, a_token(), lease=LOCK) for _ in range(2)] == [False, False]
        assert store.chores.take(a_chore(), a_token(), lease=LOCK)

    def test_whoever_dies_has_it_until_the_lease_is_over(self, store: BookStore, clock: FrozenClock) -> None:
        """Not a moment longer, and its late word then counts for nothing."""
        chore, dead, next_one = a_chore(), a_token(), a_token()
        assert store.chores.take(chore, dead, lease=LOCK)
        clock.advance(LOCK - 0.125)
        assert not store.chores.take(chore, next_one, lease=LOCK)
        clock.advance(0.25)
        assert store.chores.take(chore, next_one, lease=LOCK)
        assert not store.chores.take(chore, dead, lease=LOCK)
        store.chores.give_back(chore, dead)
        assert not store.chores.take(chore, a_token(), lease=LOCK)

    def test_a_lock_of_a_clock_that_was_set_back_is_nobodys(self, store: BookStore, clock: FrozenClock) -> None:
        """Or the chore would rest for as long as the clock was ahead."""
        chore = a_chore()
        assert store.chores.take(chore, a_token(), lease=LOCK)
        clock.advance(-2 * 86400)

        assert store.chores.take(chore, a_token(), lease=LOCK)

    def test_to_take_it_again_is_to_have_it_as_long_again(self, store: BookStore, clock: FrozenClock) -> None:
        """After a lost reply nobody knows whether it was the first."""
        chore, token = a_chore(), a_token()
        assert store.chores.take(chore, token, lease=LOCK)
        clock.advance(LOCK - 1)
        assert store.chores.take(chore, token, lease=LOCK)
        clock.advance(LOCK - 1)
        assert not store.chores.take(chore, a_token(), lease=LOCK)
        clock.advance(1.125)
        assert store.chores.take(chore, a_token(), lease=LOCK)

    def test_given_back_it_is_the_next_ones_at_once(self, store: BookStore) -> None:
        """Twice is once, and whoever has not got it gives nothing back."""
        chore, token = a_chore(), a_token()
        store.chores.give_back(chore, token)
        assert store.chores.take(chore, token, lease=LOCK)
        store.chores.give_back(chore, a_token())
        assert not store.chores.take(chore, a_token(), lease=LOCK)
        for _ in range(2):
            store.chores.give_back(chore, token)
        assert store.chores.take(chore, a_token(), lease=LOCK)

    def test_a_lock_is_no_report(self, store: BookStore, clock: FrozenClock) -> None:
        """What is noted, taken and given back goes each its own way."""
        chore, token = a_chore(), a_token()
        store.chores.note(chore, '{"removed":1}')
        assert store.chores.take(chore, token, lease=LOCK)
        clock.advance(10)
        store.chores.note(chore, '{"removed":2}')
        assert not store.chores.take(chore, a_token(), lease=LOCK)
        store.chores.give_back(chore, token)

        assert (near(0), '{"removed":2}') == told(store.chores.last(), chore)

    def test_of_many_one_has_it(self, store: BookStore) -> None:
        """All the others hear that somebody has."""
        for _ in range(ROUNDS):
            chore = a_chore()
            taken = at_once(
                *[lambda chore=chore: store.chores.take(chore, a_token(), lease=LOCK) for _ in range(THREADS)]
            )

            assert [each for each in taken if each] == [True]

    def test_of_many_one_inherits_it(self, store: BookStore, clock: FrozenClock) -> None:
        """When its holder has died."""
        for _ in range(ROUNDS):
            chore = a_chore()
            assert store.chores.take(chore, a_token(), lease=LOCK)
            clock.advance(LOCK + 1)
            taken = at_once(
                *[lambda chore=chore: store.chores.take(chore, a_token(), lease=LOCK) for _ in range(THREADS)]
            )

            assert [each for each in taken if each] == [True]


def told(book: Mapping[str, Entry], chore: str) -> tuple[float, str]:
    return book[chore].ago, book[chore].report
