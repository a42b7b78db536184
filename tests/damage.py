"""Damaged bytes, and every question that a caller may put to a store that holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex, overload

from hypothesis import strategies as st

from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import State
from flask_idempotency.testing import FrozenClock
from flask_idempotency.testing.contract.support import LEASE

LENGTHS = (b"\0", b"\x7f", b"\x80\0", b"\x80\x01", b"\xff" * 9, b"\xff" * 9 + b"\x01", b"\x80" * 400_000 + b"\x01")
"""Numbers as a record spells lengths: the least, the largest, twice the same, and one of 2.8 million bits."""


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """These bytes after one or two accidents, or attacks."""
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("flip", "cut", "drop", "double", "insert", "length", "replace", "number"))):
            case "flip" if at < len(data):
                data = data[:at] + bytes((data[at] ^ draw(st.integers(1, 255)),)) + data[at + 1 :]
            case "cut":
                data = data[:at]
            case "drop":
                data = data[:at] + data[at + draw(st.integers(1, 20)) :]
            case "double":
                data = data[:at] + data[at : at + draw(st.integers(1, 40))] * 2 + data[at:]
            case "insert":
                data = data[:at] + draw(st.binary(min_size=1, max_size=20)) + data[at:]
            case "length":
                data = data[:at] + draw(st.sampled_from(LENGTHS)) + data[at + 1 :]
            case "number":
                number = draw(st.integers(-(2**70), 2**70)) if draw(st.booleans()) else int("9" * 4000)
                data = data[:at] + (b"%d" % number) + data[at + draw(st.integers(0, 20)) :]
            case "replace":
                data = data[:at] + b"9" * draw(st.sampled_from((1, 21, 5000))) + data[at + 1 :]
    return data


def outcome(call: Callable[[], object], errors: tuple[type[Exception], ...]) -> object:
    """Return the result of this call, or its error if it is one of these. Every other error fails the test."""
    try:
        return call()
    except errors as error:
        return error


def questions(store: Any, clock: FrozenClock, key: StorageKey, *, limit: int) -> dict[str, Callable[[], object]]:
    """Return each call that reads a store with all capabilities, by name. The pages are of this length."""
    return {
        "read": lambda: store.read(key),
        "responses": lambda: store.responses.scan(limit=max(limit, 10)),
        "response count": lambda: store.responses.count(),
        "scan": lambda: [store.recovery.scan(state, limit=limit) for state in State],
        "expired leases": lambda: store.recovery.expired_leases(horizon=clock.now + 10 * LEASE, limit=limit),
        "next for resolver": lambda: store.recovery.next_for_resolver(horizon=clock.now, least=1, most=10, limit=limit),
        "counts": lambda: store.recovery.counts(),
        "usage": lambda: store.ledger.usage(key.tid),
        "limits": lambda: store.ledger.limits(key.tid),
        "tenants": lambda: store.ledger.tenants(),
        "reconcile": lambda: store.ledger.reconcile(key.tid),
        "data keys": lambda: store.data_keys.read_keys(key.tid),
        "keys under other masters": lambda: store.data_keys.wrapped_by_other("new"),
        "data key count": lambda: store.data_keys.count(),
        "task reports": lambda: store.task_log.reports(),
        "task lock": lambda: store.task_log.lock("reap", b"t" * 16, lease=60),
    }


class Watched(bytes):
    """Bytes that count how many of them are looked at one by one: the steps that no slice and no `struct` takes."""

    looks = 0

    @overload
    def __getitem__(self, at: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> bytes: ...
    def __getitem__(self, at: Any, /) -> Any:
        if not isinstance(at, slice):
            self.looks += 1
        return super().__getitem__(at)
