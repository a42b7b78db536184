"""One Blinker signal for every event, such as `signals.completed`: the sender is the application, `event` the event.

A signal is sent after the fact and cannot change it. What a receiver raises is logged and passed over, because a
payment must not fail with its metrics. Receivers run in the thread of the request, or in the lease thread for
renewals and repeated writes; keep them quick.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType

from blinker import NamedSignal, Namespace
from flask import Flask

from flask_idempotency.engine.events import Event, kinds, name_of
from flask_idempotency.engine.observers import Observer, Receivers

__all__ = ["SIGNALS"]

_namespace = Namespace()

SIGNALS: Mapping[type[Event], NamedSignal] = MappingProxyType(
    {kind: _namespace.signal(f"idempotency-{name_of(kind)}", kind.__doc__) for kind in kinds()}
)
"""Every event and its signal, if you want to connect to all of them."""

RECEIVERS: Receivers = MappingProxyType({kind: signal.receivers for kind, signal in SIGNALS.items()})
"""What is connected to each signal now. Most have nothing, and then need not be sent."""

_BY_NAME = {name_of(kind).replace("-", "_"): signal for kind, signal in SIGNALS.items()}


def __getattr__(name: str) -> NamedSignal:
    """Return the signal of this name: the name of its event in snake case, such as `claim_granted`."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise AttributeError(f"There is no signal {name!r} in {__name__}; there are {', '.join(_BY_NAME)}.") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_BY_NAME})


def sender_for(app: Flask) -> Observer:
    """Return an observer that sends each event as its signal, with this application as sender.

    It keeps no reference to the application, so that you can drop one.
    """
    weak = weakref.ref(app)

    def send(event: Event) -> None:
        if (sender := weak()) is not None:
            SIGNALS[type(event)].send(sender, event=event)

    return send
