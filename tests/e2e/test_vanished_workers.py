"""Workers that die in mid-view, or sleep through the end of their lease and then go on."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from http.client import IncompleteRead, RemoteDisconnected

import pytest

from example_app.demo.servers import RedisServer
from tests.e2e.conftest import Serve
from tests.e2e.ledger import Ledger
from tests.e2e.processes import Server, kill, pause, resume
from tests.e2e.wire import Answer, Order, Wire, ask, ask_until_settled, message

LEASE = 1.0
SECOND = "second"
"""Where a second attempt pauses: the go-ahead for one must not reach the other."""


@pytest.fixture
def victim(serve: Serve, redis_server: RedisServer) -> Server:
    """The server whose worker will vanish."""
    return serve(redis_server, lease=LEASE, name="victim")


@pytest.fixture
def other(serve: Serve, redis_server: RedisServer) -> Server:
    """Where retries go."""
    return serve(redis_server, lease=LEASE, name="other")


def killed_at_pause(victim: Server, ledger: Ledger, order: Order, *steps: str) -> None:
    """Send the order, and kill its worker at the `pause` among these steps."""
    with Wire(victim.port) as wire:
        wire.send(order.attempt(*steps))
        kill(ledger.paused(order.case))
        assert wire.ended()


def test_a3_killed_plain_view_never_runs_again(victim: Server, other: Server, ledger: Ledger) -> None:
    """At most once: when its worker died, whether before or after the effect, retries are told that nobody knows."""
    order = Order("/plain")
    killed_at_pause(victim, ledger, order, "effect", "pause")

    told = [ask_until_settled(server.port, order.attempt("effect")) for server in (other, victim, other)]

    assert {answer.told for answer in told} == {(409, "outcome-unknown")}
    assert {answer.header("Retry-After") for answer in told} == {None}
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (1, 1)


def test_76_killed_before_its_point_a_marked_view_runs_again(victim: Server, other: Server, ledger: Ledger) -> None:
    """
    A marked view that died before its point of no return is taken over when the lease is over: the effect happens once.
    """
    order = Order("/marked")
    killed_at_pause(victim, ledger, order, "pause", "point", "effect")

    answer = ask_until_settled(other.port, order.attempt("point", "effect"))

    assert (answer.status, answer.replayed) == (201, False)
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (2, 1)
    assert ask(victim.port, order.attempt()).body == answer.body


def test_76_killed_after_its_point_a_marked_view_never_runs_again(
    victim: Server, other: Server, ledger: Ledger
) -> None:
    """A marked view that died behind its point of no return may have had its effect: it is quarantined."""
    order = Order("/marked")
    killed_at_pause(victim, ledger, order, "point", "effect", "pause")

    assert ask_until_settled(other.port, order.attempt("point", "effect")).told == (409, "outcome-unknown")
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (1, 1)


def test_a5_killed_deduplicated_view_repeats_its_effect_under_the_same_key(
    victim: Server, other: Server, ledger: Ledger
) -> None:
    """A deduplicated view runs again, and what it tells the other side carries the same downstream key."""
    order = Order("/deduplicated")
    killed_at_pause(victim, ledger, order, "effect", "pause")

    answer = ask_until_settled(other.port, order.attempt("effect"))

    assert answer.status == 201
    assert ledger.runs(order.case) == 2
    first, second = ledger.effects(order.case)
    assert first == second != ""


def test_a6_takeover_of_a_plain_effect_repeats_it(victim: Server, other: Server, ledger: Ledger) -> None:
    """The limit: whoever asks for take-over of a plain effect, in so many words, gets it twice."""
    order = Order("/takeover")
    killed_at_pause(victim, ledger, order, "effect", "pause")

    assert ask_until_settled(other.port, order.attempt("effect")).status == 201
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (2, 2)


def test_p06_a_claim_is_not_taken_over_before_its_lease_ends(victim: Server, other: Server, ledger: Ledger) -> None:
    """A dead worker's key is in flight for what is left of its lease, and no longer than that."""
    order = Order("/deduplicated")
    began = time.monotonic()
    killed_at_pause(victim, ledger, order, "pause")

    with Wire(other.port) as wire:
        while (answer := wire.send(order.attempt()).answer()).code == "in-flight":
            assert answer.header("Retry-After") == "1"

    assert answer.status == 201
    assert LEASE <= time.monotonic() - began < LEASE + 60


@pytest.mark.slow
def test_a2_killed_at_any_moment_a_plain_view_has_its_effect_at_most_once(
    victim: Server, other: Server, ledger: Ledger
) -> None:
    """Whenever a worker dies, the effect has happened at most once, and no two different answers are ever given."""
    for number in range(16):
        order = Order("/plain")
        worker = ask(victim.port, message("GET", "/free")).json["pid"]
        with Wire(victim.port) as wire:
            wire.send(order.attempt("effect"))
            # Every other one just behind its effect: by chance alone few would end there.
            while number % 2 and not ledger.effects(order.case):
                pass
            spin(random.uniform(0, 0.001 if number % 2 else 0.008))
            kill(worker)
            given = []
            # Between the head of its answer and the body it may be killed as well: then its client has none.
            with suppress(IncompleteRead, RemoteDisconnected):
                if not wire.ended():
                    given.append(wire.answer())
        given.append(ask_until_settled(other.port, order.attempt("effect")))
        given.append(ask_until_settled(victim.port, order.attempt("effect")))

        assert len(ledger.effects(order.case)) <= 1
        assert {answer.told for answer in given} in ({(201, None)}, {(409, "outcome-unknown")})
        assert len({answer.body for answer in given}) == 1


def spin(seconds: float) -> None:
    """Wait for less than a scheduler's tick."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_worker_told_to_end_finishes_what_it_does(victim: Server, other: Server, ledger: Ledger) -> None:
    """A deployment's SIGTERM in mid-view costs nothing: the view ends, its client is answered, and retries replay."""
    order = Order("/plain")
    with Wire(victim.port) as wire:
        wire.send(order.attempt("pause", "effect"))
        os.kill(ledger.paused(order.case), signal.SIGTERM)
        ledger.let_go(order.case)
        answer = wire.answer()
    again = ask(other.port, order.attempt("effect"))

    assert (answer.status, answer.replayed) == (201, False)
    assert (again.replayed, again.body) == (True, answer.body)
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (1, 1)


class Sleeper:
    """An attempt whose worker is stopped in mid-view, and wakes when somebody says so."""

    def __init__(self, server: Server, ledger: Ledger, order: Order, *steps: str) -> None:
        self._ledger, self._order = ledger, order
        self._wire = Wire(server.port).send(order.attempt(*steps))
        self._pid = ledger.paused(order.case)
        pause(self._pid)

    def wake(self) -> Answer:
        """Let the view go on. What its client is told."""
        self._ledger.let_go(self._order.case)
        resume(self._pid)
        with self._wire as wire:
            return wire.answer()


def test_a4_late_owner_of_a_plain_view_is_believed(victim: Server, other: Server, ledger: Ledger) -> None:
    """Quarantine ends by itself when the owner was only slow: its answer is delivered, stored and replayed."""
    order = Order("/plain")
    sleeper = Sleeper(victim, ledger, order, "pause", "effect")
    assert ask_until_settled(other.port, order.attempt("effect")).told == (409, "outcome-unknown")

    late = sleeper.wake()
    third = ask(other.port, order.attempt("effect"))

    assert (late.status, late.replayed) == (201, False)
    assert (third.status, third.replayed, third.body) == (201, True, late.body)
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (1, 1)


def test_a5_late_owner_delivers_the_answer_of_its_successor(victim: Server, other: Server, ledger: Ledger) -> None:
    """A worker that was taken over gives its client the stored answer, never its own; the effects carry one key."""
    order = Order("/deduplicated")
    sleeper = Sleeper(victim, ledger, order, "pause", "effect")
    successor = ask_until_settled(other.port, order.attempt("effect"))

    late = sleeper.wake()

    assert (successor.status, successor.replayed) == (201, False)
    assert (late.status, late.replayed, late.body) == (201, True, successor.body)
    assert ask(victim.port, order.attempt()).body == successor.body
    assert (ledger.runs(order.case), len(set(ledger.effects(order.case)))) == (2, 1)


def test_a5_late_owner_whose_successor_is_running_is_refused(victim: Server, other: Server, ledger: Ledger) -> None:
    """A worker that was taken over by one that still runs tells its client so, and cannot end the other's claim."""
    order = Order("/deduplicated")
    sleeper = Sleeper(victim, ledger, order, "pause")
    with Wire(other.port) as wire:
        run_on(wire, ledger, order)

        late = sleeper.wake()
        third = ask(victim.port, order.attempt())
        ledger.let_go(order.case + SECOND)
        answer = wire.answer()

    assert late.told == third.told == (409, "in-flight")
    assert (answer.status, answer.replayed) == (201, False)
    assert ask(victim.port, order.attempt()).body == answer.body


def run_on(wire: Wire, ledger: Ledger, order: Order) -> None:
    """Ask until an attempt runs, and pauses; its answer is still to come."""
    again = order.attempt(f"pause:{SECOND}")
    wire.send(again)
    while not ledger.noted("paused", order.case + SECOND):
        if not wire.silent(0.02):
            assert wire.answer().code == "in-flight"
            wire.send(again)


def test_76_late_owner_of_a_marked_view_is_stopped_at_its_point(victim: Server, other: Server, ledger: Ledger) -> None:
    """
    A marked view that was taken over before its point learns so there, before its effect, and delivers the stored answer.
    """
    order = Order("/marked")
    sleeper = Sleeper(victim, ledger, order, "pause", "point", "effect")
    successor = ask_until_settled(other.port, order.attempt("point", "effect"))

    late = sleeper.wake()

    assert (successor.status, successor.replayed) == (201, False)
    assert (late.status, late.body) == (201, successor.body)
    assert (ledger.runs(order.case), len(ledger.effects(order.case))) == (2, 1)
