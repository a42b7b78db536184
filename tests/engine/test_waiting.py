"""Seats for duplicates that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.waiting import SLOTS_PER_KEY, Waiters

A = StorageKey(b"a" * 32, b"t" * 32)
B = StorageKey(b"b" * 32, b"t" * 32)
C = StorageKey(b"c" * 32, b"t" * 32)


def test_no_more_waiters_than_seats() -> None:
    room = Waiters(2)
    with ExitStack() as stack:
        first = room.slot(A)
        assert first.__enter__() is not None
        assert stack.enter_context(room.slot(B)) is not None
        assert stack.enter_context(room.slot(C)) is None
        first.__exit__(None, None, None)
        assert stack.enter_context(room.slot(C)) is not None


def test_one_key_cannot_take_every_seat() -> None:
    room = Waiters(SLOTS_PER_KEY + 2)
    with ExitStack() as stack:
        for _ in range(SLOTS_PER_KEY):
            assert stack.enter_context(room.slot(A)) is not None

        assert stack.enter_context(room.slot(A)) is None
        assert stack.enter_context(room.slot(B)) is not None


@pytest.mark.parametrize(("slots", "most"), ((0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)))
def test_status_waits_take_at_most_half_of_the_slots(slots: int, most: int) -> None:
    """And one of a key, so that a request that repeats it can wait too."""
    room = Waiters(slots)
    keys = [StorageKey(bytes([number]) * 32, b"t" * 32) for number in range(6)]
    with ExitStack() as stack:
        asked = [stack.enter_context(room.slot(key, status=True)) for key in keys]
        assert most == sum(seat is not None for seat in asked)
        assert stack.enter_context(room.slot(keys[0], status=True)) is None

        sent = [stack.enter_context(room.slot(key)) for key in keys]
        assert slots - most == sum(seat is not None for seat in sent)
    with ExitStack() as stack:
        assert most == sum(stack.enter_context(room.slot(key, status=True)) is not None for key in keys)


def test_settling_a_key_wakes_its_waiters_and_nobody_else() -> None:
    """Different keys never wait for each other (P-20)."""
    room = Waiters(4)
    with room.slot(A) as of_a, room.slot(B) as of_b:
        room.notify(A)

        assert of_a is not None
        assert of_b is not None
        assert (True, False) == (of_a.is_set(), of_b.is_set())


def test_a_seat_is_given_back_when_its_waiter_fails() -> None:
    room = Waiters(1)
    try:
        with room.slot(A):
            raise ValueError
    except ValueError:
        pass

    with room.slot(A) as seat:
        assert seat is not None


class ToyBell:
    """Rings for whoever hears it."""

    def __init__(self) -> None:
        self.hearing: list[tuple[Sequence[StorageKey], Callable[[], object]]] = []

    @contextmanager
    def subscribe(self, keys: Sequence[StorageKey], wake: Callable[[], object]) -> Iterator[None]:
        self.hearing.append((keys, wake))
        yield
        self.hearing.remove((keys, wake))


def test_whoever_has_a_seat_hears_the_stores_bell() -> None:
    bell = ToyBell()
    room = Waiters(1, notifier=bell)
    with room.slot(A, B) as seat, room.slot(C):
        [(keys, wake)] = bell.hearing
        wake()

        assert seat is not None
        assert ((A, B), True) == (keys, seat.is_set())

    assert [] == bell.hearing
