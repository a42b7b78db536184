"""Pass events on: to the log, to signals, to the counts of activity, and to whatever else an application adds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from flask_idempotency.engine.events import Event

_log = logging.getLogger("flask_idempotency")

Observer: TypeAlias = "Callable[[Event], None]"


class Observers:
    """Pass each event to every observer. Log what an observer raises and go on: it must not break a payment."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def add(self, observer: Observer) -> None:
        """Pass later events to this observer too."""
        self._observers += (observer,)

    def __call__(self, event: Event) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception:  # noqa: BLE001 - whatever it is, the payment goes on
                _log.exception("an observer failed on %s", type(event).__name__)
