"""A forked child forgets its parent, also when Python was not told of the fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from flask_idempotency.engine import forks

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import ctypes, os, sys, threading
from flask_idempotency.engine import forks
from flask_idempotency.engine.lease import LeaseRenewer

class Renewable:
    def __init__(self):
        self.seen = threading.Event()
    def run(self):
        self.seen.set()

renewer, mine, theirs = LeaseRenewer(), Renewable(), Renewable()
renewer.add(mine, after=0)
assert mine.seen.wait(60)
renewer.add(mine, after=3600)
# A fork below Python copies the interpreter's lock as it is. The lease thread must be asleep then, and not wait for the lock.
while sys._current_frames()[renewer._thread.ident].f_code.co_name != "wait":
    threading.Event().wait(0.01)
threading.Event().wait(0.1)
fork = os.fork if sys.argv[1] == "python" else ctypes.PyDLL(None).fork
child = fork()
if child == 0:
    renewer.add(theirs, after=0)
    os._exit(0 if theirs.seen.wait(60) and mine not in renewer._due else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("how", ("python", "below-python"))
def test_a_child_renews_its_own_claims_only(how: str) -> None:
    """Its parent's thread is not in the child, although Python believes so after a fork below it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr


class Part:
    def __init__(self, told: list[str], name: str, error: Exception | None = None) -> None:
        self.told, self.name, self.error = told, name, error
        forks.after_fork(self.forget)

    def forget(self) -> None:
        self.told.append(self.name)
        forks.notice()
        if self.error is not None:
            raise self.error


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process looks like a child in which no callback has run."""
    monkeypatch.setattr(forks, "_callbacks", {})
    monkeypatch.setattr(forks, "_pid", os.getpid() + 1)


@pytest.mark.usefixtures("forked")
def test_each_part_is_called_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails is logged, and holds up none of the others.

    A lease thread of an earlier test may be the first to notice. `caplog` shows nothing of such a thread, so note the call.
    """
    told: list[str] = []
    logged: list[str] = []
    monkeypatch.setattr(forks, "_log", SimpleNamespace(exception=lambda text: logged.append(str(sys.exception()))))
    parts = [Part(told, "first"), Part(told, "fails", ValueError("half-way")), Part(told, "last")]
    dropped = Part(told, "dropped")
    del dropped

    forks.notice()
    forks.notice()

    assert told == [part.name for part in parts]
    assert logged == ["half-way"]


@pytest.mark.usefixtures("forked")
def test_a_second_thread_waits_until_the_first_has_called_all() -> None:
    begun, go_on, told = threading.Event(), threading.Event(), list[str]()

    class Slow(Part):
        def forget(self) -> None:
            begun.set()
            assert go_on.wait(60)
            super().forget()

    slow = Slow(told, "slow")

    def second() -> None:
        forks.notice()
        told.append("second")

    threads = [threading.Thread(target=forks.notice), threading.Thread(target=second)]
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
