"""Every event has its signal."""

from __future__ import annotations

import gc
import weakref

import pytest
from flask import Flask, got_request_exception, request_finished

from flask_idempotency import Idempotency, signals
from flask_idempotency.engine import events
from flask_idempotency.engine.events import Event, Released, kinds, name_of
from flask_idempotency.engine.journal import STEPS_CHANGED
from flask_idempotency.engine.model import IN_DOUBT
from flask_idempotency.engine.observers import Observers
from flask_idempotency.stores.memory import MemoryStore


def test_every_event_has_a_documented_signal_of_its_name() -> None:
    for kind in kinds():
        signal = getattr(signals, name_of(kind).replace("-", "_"))

        assert signals.SIGNALS[kind] is signal
        assert signal.__doc__ == kind.__doc__
        assert name_of(kind).replace("-", "_") in dir(signals)


def test_an_event_of_steps_is_named_as_the_reason_of_its_quarantine() -> None:
    """The log line of a doubt and its record then say the same words."""
    assert ("step-in-doubt", "steps-changed") == (name_of(events.StepDoubtful), name_of(events.StepsChangedHeld))
    assert {IN_DOUBT, STEPS_CHANGED} <= {name_of(kind) for kind in kinds()}
    assert signals.step_in_doubt is signals.SIGNALS[events.StepDoubtful]


def test_an_unknown_signal_is_an_error_that_names_the_signals() -> None:
    with pytest.raises(AttributeError, match=r"no signal 'finished' .*claim_granted, .*"):
        _ = signals.finished


def test_every_event_is_listed_once() -> None:
    """`slots=True` replaces a class, and the replaced one may still be alive: no code sends its events."""
    names = [kind.__name__ for kind in kinds()]
    classes = [each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)]

    assert len(names) == len(set(names))
    # Only a base class of several events has no sentence.
    assert set(names) == {each.__name__ for each in classes if hasattr(each, "SENTENCE")}
    assert {each for each in classes if not hasattr(each, "SENTENCE")} <= {
        base for kind in kinds() for base in kind.__mro__
    }
    assert all(getattr(events, kind.__name__) is kind for kind in kinds())


def test_the_sender_of_a_signal_is_the_application() -> None:
    app, other = Flask("app"), Flask("other")
    seen: list[tuple[object, Event]] = []

    def receive(sender: object, event: Event) -> None:
        seen.append((sender, event))

    event = Released("abc", "pay", reason="status-503")
    with signals.released.connected_to(receive, sender=app):
        signals.sender_for(app)(event)
        signals.sender_for(other)(event)

    assert [(app, event)] == seen


def test_a_receiver_gets_events_from_when_it_connects_until_it_leaves() -> None:
    app, seen, observers = Flask("app"), list[Event](), Observers()
    observers.add(signals.sender_for(app), receivers=signals.RECEIVERS)

    def receive(sender: object, event: Event) -> None:
        seen.append(event)

    before, meant, after = (Released("abc", "pay", reason=reason) for reason in ("before", "meant", "after"))
    observers(before)
    with signals.released.connected_to(receive, sender=app):
        observers(meant)
    observers(after)

    assert [meant] == seen


def test_a_sender_does_not_keep_its_application_alive() -> None:
    app = Flask("app")
    weak = weakref.ref(app)
    send = signals.sender_for(app)

    del app
    gc.collect()
    send(Released("abc", "pay", reason="test"))

    assert weak() is None


def test_applications_share_their_receivers_of_flasks_signals() -> None:
    """Blinker fails where one thread collects a dead receiver, and another connects one at that moment."""
    first, second = Flask("app"), Flask("app")
    for app in (first, second):
        Idempotency(app, store=MemoryStore(), secret="s-9f2c47d1e8b35a60")

    for signal in (request_finished, got_request_exception):
        receivers = list(signal.receivers_for(first))
        assert receivers
        assert list(signal.receivers_for(second)) == receivers
