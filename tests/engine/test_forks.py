"""A forked child forgets its parent, also when Python was not told of the fork."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flask_idempotency.console.access import Attempts
from flask_idempotency.engine import forks
from flask_idempotency.stores.redis.data_loss import LastGrant
from flask_idempotency.web.responses import LostFields

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import ctypes, os, sys, threading
from flask_idempotency.engine import forks
from flask_idempotency.engine.lease import LeaseRenewer

class Renewable:
    def __init__(self, fd=None):
        self.seen, self.fd = threading.Event(), fd
    def run(self):
        self.thread = threading.get_native_id()
        self.seen.set()
        if self.fd is not None:
            os.read(self.fd, 1)

read_end, write_end = os.pipe()
renewer, mine, theirs = LeaseRenewer(), Renewable(read_end), Renewable()
renewer.add(mine, after=0)
assert mine.seen.wait(60)
# A fork below Python copies the interpreter's lock as it is. The lease thread must read then, and not wait for the lock.
while open(f"/proc/self/task/{mine.thread}/syscall").read().split()[1:2] != [hex(read_end)]:
    os.sched_yield()
fork = os.fork if sys.argv[1] == "python" else ctypes.PyDLL(None).fork
child = fork()
if child == 0:
    mine.seen.clear()
    renewer.add(theirs, after=0)
    # In one round, `mine` would run before `theirs`, because it is due longer.
    os._exit(0 if theirs.seen.wait(60) and not mine.seen.is_set() else 1)
os.write(write_end, b"1")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("how", ("python", "below-python"))
def test_a_child_renews_its_own_claims_only(how: str) -> None:
    """Its parent's thread is not in the child, although Python believes so after a fork below it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr


class Part:
    def __init__(self, forks: ModuleType, told: list[str], name: str, error: Exception | None = None) -> None:
        self.forks, self.told, self.name, self.error = forks, told, name, error
        forks.after_fork(self.forget)

    def forget(self) -> None:
        self.told.append(self.name)
        self.forks.notice()
        if self.error is not None:
            raise self.error


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A copy of the module that believes to be in a child in which no callback has run.

    A copy, because the lease thread of an earlier test may notice the fork first, and then runs the callbacks.
    """
    spec = importlib.util.find_spec(forks.__name__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patched:
        # Callbacks of the copy would run in each later fork of this process.
        patched.delattr(os, "register_at_fork")
        spec.loader.exec_module(copy)
    monkeypatch.setattr(copy, "pid", os.getpid() + 1)
    return copy


def test_each_part_is_called_once_and_in_order(forked: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    parts = [
        Part(forked, told, "first"),
        Part(forked, told, "fails", ValueError("half-way")),
        Part(forked, told, "last"),
    ]
    dropped = Part(forked, told, "dropped")
    del dropped
    gc.collect()

    forked.notice()
    forked.notice()

    assert told == [part.name for part in parts]
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["half-way"]


def test_a_second_thread_waits_until_the_first_has_called_all(forked: ModuleType) -> None:
    begun, go_on, told = threading.Event(), threading.Event(), list[str]()

    class Slow(Part):
        def forget(self) -> None:
            begun.set()
            assert go_on.wait(60)
            super().forget()

    slow = Slow(forked, told, "slow")

    def second() -> None:
        forked.notice()
        told.append("second")

    threads = [threading.Thread(target=forked.notice), threading.Thread(target=second)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(60)

    assert told == [slow.name, "second"]


def test_what_is_to_be_done_before_a_fork_is_done_in_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_before", {})
    told: list[int] = []

    class Ready:
        def prepare(self) -> None:
            told.append(os.getpid())

    ready = Ready()
    forks.before_fork(ready.prepare)
    child = os.fork()
    if child == 0:
        os._exit(len(told))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert told == [os.getpid()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("make", (LastGrant, LostFields, partial(Attempts, most=1)))
def test_a_child_that_was_forked_while_a_thread_held_a_lock_takes_it(make: Callable[[], Any]) -> None:
    """The thread that held it does not exist in the child, which would wait for ever."""
    locked = make()
    with locked._lock:
        child = os.fork()
        if child == 0:
            status = 1
            with suppress(BaseException):
                status = int(not locked._lock.acquire(timeout=5))
            os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
