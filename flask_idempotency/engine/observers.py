"""Pass events on: to the log, to signals, to the counts of activity, and to whatever else an application adds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from flask_idempotency.engine.events import Event

_log = logging.getLogger("flask_idempotency")

Observer: TypeAlias = "Callable[[Event], None]"

Receivers: TypeAlias = "Mapping[type[Event], Sized]"
"""What receives each kind of event. It may change at any time."""


class Observers:
    """Pass each event to every observer. Log what an observer raises and go on: it must not break a payment."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers: tuple[tuple[Observer, Receivers | None], ...] = tuple((each, None) for each in observers)

    def add(self, observer: Observer, *, receivers: Receivers | None = None) -> None:
        """Pass later events to this observer too. With `receivers`, only those of a kind that has a receiver at that time."""
        self._observers += ((observer, receivers),)

    def __call__(self, event: Event) -> None:
        for observer, receivers in self._observers:
            try:
                if receivers is None or receivers[type(event)]:
                    observer(event)
            except Exception:  # noqa: BLE001 - whatever it is, the payment goes on
                _log.exception("an observer failed on %s", type(event).__name__)
