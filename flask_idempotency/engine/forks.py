"""Run callbacks around a fork, so that a child drops the connections, locks and threads of its parent.

Python runs the callbacks in the child of every `os.fork()`. A server that forks below Python (uWSGI without
`py-call-osafterfork`) does not tell Python, so `notice()` compares process ids before each unit of work.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeAlias, cast

_log = logging.getLogger("flask_idempotency")

_Callbacks: TypeAlias = dict[int, tuple[weakref.ref[object], Callable[[Any], object]]]
"""The object of each method, and its function. A `WeakMethod` may raise in its own callback while the interpreter ends."""

_callbacks: _Callbacks = {}
"""In the order of registration. References are weak, so that a store or an application can be garbage-collected."""

_before: _Callbacks = {}

_numbers = itertools.count()
_lock = threading.RLock()
_running = False
pid = os.getpid()
"""The process in which the callbacks have run. What each request does compares it first, which saves the call of `notice`."""


def after_fork(method: Callable[[], object]) -> None:
    """Call this bound method in every forked child, before the child uses its object."""
    _add(_callbacks, method)


def before_fork(method: Callable[[], object]) -> None:
    """Call this bound method in the parent before every `os.fork()`."""
    _add(_before, method)


def _add(callbacks: _Callbacks, method: Callable[[], object]) -> None:
    number, bound = next(_numbers), cast("MethodType", method)
    callbacks[number] = weakref.ref(bound.__self__, lambda _: callbacks.pop(number, None)), bound.__func__


def notice() -> None:
    """Run the callbacks if this process is a forked child in which they have not run yet."""
    if os.getpid() != pid:
        _run()


def _run() -> None:
    global pid, _running
    # Other threads wait here until the first one has run the callbacks.
    with _lock:
        if _running or os.getpid() == pid:
            return
        _running = True
        try:
            _call_all(_callbacks)
        finally:
            pid, _running = os.getpid(), False


def _call_all(callbacks: _Callbacks) -> None:
    for reference, function in list(callbacks.values()):
        if (target := reference()) is None:
            continue
        try:
            function(target)
        except Exception:  # noqa: BLE001 - the other callbacks must run as well
            _log.exception("a fork callback failed")


def _forked() -> None:
    # A thread of the parent may have held the lock, and that thread does not exist in the child.
    global _lock, _running
    _lock, _running = threading.RLock(), False
    _run()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: _call_all(_before), after_in_child=_forked)
