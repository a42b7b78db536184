"""Notice that this process was forked from another one, and have each part forget what belongs to its parent.

Python runs the callbacks in the child of every `os.fork()`. A server that forks below Python (uWSGI without
`py-call-osafterfork`) does not tell Python, so `notice()` compares process ids where work begins.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable

_log = logging.getLogger("flask_idempotency")

_callbacks: dict[int, weakref.WeakMethod[Callable[[], object]]] = {}
"""In the order of their registration. Weak: a store or an application that is dropped is not kept alive."""

_before: dict[int, weakref.WeakMethod[Callable[[], object]]] = {}

_numbers = itertools.count()
_lock = threading.RLock()
_running = False
_pid = os.getpid()


def after_fork(method: Callable[[], object]) -> None:
    """Call this bound method in every forked child, before the child uses its object."""
    number = next(_numbers)
    _callbacks[number] = weakref.WeakMethod(method, lambda _: _callbacks.pop(number, None))


def before_fork(method: Callable[[], object]) -> None:
    """Call this bound method in the parent before every fork that Python is told of."""
    number = next(_numbers)
    _before[number] = weakref.WeakMethod(method, lambda _: _before.pop(number, None))


def notice() -> None:
    """Run the callbacks if this process is a forked child in which they have not run yet."""
    if os.getpid() != _pid:
        _run()


def _run() -> None:
    global _pid, _running
    # Threads that come here while the first one runs the callbacks wait for it.
    with _lock:
        if _running or os.getpid() == _pid:
            return
        _running = True
        try:
            _call_all(_callbacks)
        finally:
            _pid, _running = os.getpid(), False


def _call_all(callbacks: dict[int, weakref.WeakMethod[Callable[[], object]]]) -> None:
    for reference in list(callbacks.values()):
        if (callback := reference()) is None:
            continue
        try:
            callback()
        except Exception:  # noqa: BLE001 - the other parts must be called all the same
            _log.exception("a part of this process could not get ready for a fork")


def _forks() -> None:
    _call_all(_before)


def _forked() -> None:
    """A thread of the parent may have held the lock, and that thread does not exist in the child."""
    global _lock, _running
    _lock, _running = threading.RLock(), False
    _run()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forks, after_in_child=_forked)
