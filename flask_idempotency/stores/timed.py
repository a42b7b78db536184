"""A wrapper that reports how long each call of a store takes and how it ends.

It passes every call on and changes no outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, get_args

from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.model import Grant, Record
from flask_idempotency.engine.offered import CAPABILITIES
from flask_idempotency.engine.store import Store

Call: TypeAlias = Literal[
    "claim", "renew", "mark_point_of_no_return", "complete", "release", "quarantine", "read", "mark_corrupt"
]
Ending: TypeAlias = Literal["done", "granted", "replayed", "refused", "lost", "unavailable", "failed"]
"""How a call ended: a claim is granted, replayed or refused. Any other call that succeeds is done."""

Timing: TypeAlias = Callable[[Call, Ending, float], object]
"""The store calls it after each call with the call's name, its ending and its seconds. It must be quick and not raise."""

OutcomeT = TypeVar("OutcomeT")
ArgumentsP = ParamSpec("ArgumentsP")


class TimedStore:
    """Pass each call of the `Store` protocol on, and report its time. All other attributes come from the store."""

    def __init__(self, store: Store, timing: Timing, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._store = store
        self._timing = timing
        self._clock = clock
        for call in get_args(Call):
            setattr(self, call, partial(self._timed, call, getattr(store, call)))
        for name in CAPABILITIES:
            if hasattr(store, name):
                setattr(self, name, getattr(store, name))

    def __getattr__(self, name: str) -> Any:
        if name == "_store":  # `copy` looks attributes up before it sets any
            raise AttributeError(name)
        return getattr(self._store, name)

    def _timed(
        self,
        call: Call,
        method: Callable[ArgumentsP, OutcomeT],
        *arguments: ArgumentsP.args,
        **options: ArgumentsP.kwargs,
    ) -> OutcomeT:
        ending: Ending = "failed"
        began = self._clock()
        try:
            outcome = method(*arguments, **options)
            ending = "done"
            if call == "claim":
                match outcome:
                    case Grant():
                        ending = "granted"
                    case Record():
                        ending = "replayed"
                    case _:
                        ending = "refused"
            return outcome
        except LeaseLost:
            ending = "lost"
            raise
        except StoreUnavailable:
            ending = "unavailable"
            raise
        finally:
            self._timing(call, ending, self._clock() - began)
