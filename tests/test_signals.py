"""Every event has its signal."""

from __future__ import annotations

import gc
import weakref

from blinker import NamedSignal
from flask import Flask

from flask_idempotency import signals
from flask_idempotency.engine import events
from flask_idempotency.engine.events import Event, Released, kinds


def test_every_event_has_a_signal_with_a_contract() -> None:
    """A new event cannot be forgotten, and each signal says what it tells."""
    public = {value for value in vars(signals).values() if isinstance(value, NamedSignal)}

    assert set(signals.SIGNALS.values()) == public
    assert all(signal.__doc__ for signal in public)


def test_every_event_is_there_once() -> None:
    """
    `slots=True` makes a class anew, and the one that it replaces may still be about: its events are never sent.
    """
    names = [kind.__name__ for kind in kinds()]

    assert len(names) == len(set(names))
    assert set(names) == {each.__name__ for each in Event.__subclasses__() if each.__module__ == Event.__module__}
    assert all(getattr(events, kind.__name__) is kind for kind in kinds())


def test_an_event_is_sent_in_the_applications_name() -> None:
    """Receivers can tell two applications apart."""
    app, other = Flask("app"), Flask("other")
    seen: list[tuple[object, Event]] = []

    def receive(sender: object, event: Event) -> None:
        seen.append((sender, event))

    event = Released("abc", "pay", reason="status-503")
    with signals.released.connected_to(receive, sender=app):
        signals.sender_for(app)(event)
        signals.sender_for(other)(event)

    assert [(app, event)] == seen


def test_the_sender_does_not_keep_its_application_alive() -> None:
    """An application that is dropped is collected; what happens later is told to nobody."""
    app = Flask("app")
    weak = weakref.ref(app)
    send = signals.sender_for(app)

    del app
    gc.collect()
    send(Released("abc", "pay", reason="test"))

    assert weak() is None
