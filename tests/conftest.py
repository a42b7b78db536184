"""Fixtures that every test may use, logs of the right test, and an orderly end when the run is stopped."""

from __future__ import annotations

import atexit
import fcntl
import gc
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import IO, Final

import pytest

from flask_idempotency.engine.lease import THREAD_NAME

# The first starts servers, and imports what it needs for one only when a test uses it.
pytest_plugins = ["tests.lab.fixtures", "tests.stages", "tests.progress"]


SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it
ROOM: Final = 6 << 30
"""Bytes that must be free there: the databases of the slow stage take a third of it."""

EARLIER_THREADS: Final[set[threading.Thread]] = set()
"""The threads that ran before the current test began."""

TESTS_BETWEEN: Final = 20
"""So many tests may leave garbage before it is collected. Each application is in a circle."""
ENDED: Final = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    if "TMPDIR" not in os.environ and not hasattr(config, "workerinput"):
        keep_files_in_memory()
    # Ctrl-C lets fixtures put their servers and folders away; a SIGTERM from run.py or CI should as well.
    signal.signal(signal.SIGTERM, _interrupt)
    # A shell ignores SIGINT for what it starts behind `&`, and so would every program that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def keep_files_in_memory() -> None:
    """Let this run, with all that it starts, keep its temporary files in memory where there is room.

    A commit of SQLite waits for the disk, and so does each table that PostgreSQL creates: half the time of the core stage.
    """
    for folder in SHARED_MEMORY.glob("idempotency-tests-*"):
        # What is locked is of a run that goes on, in whichever container. What another user has stays.
        with suppress(OSError), (folder / "owner").open("rb") as former:
            fcntl.flock(former, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    try:
        if free_memory() < ROOM or os.statvfs(SHARED_MEMORY).f_flag & os.ST_NOEXEC:
            return
        own = SHARED_MEMORY / f"idempotency-tests-{os.getpid()}"
        own.mkdir()
        # Servers that run as another user have folders of their own in it.
        own.chmod(0o711)
        owner = (own / "owner").open("wb")
        fcntl.flock(owner, fcntl.LOCK_EX)
    except OSError:
        return
    # Registered first, so it runs after what other modules put away when the process ends.
    atexit.register(remove_as_its_owner, own, owner, os.getpid())
    os.environ["TMPDIR"], tempfile.tempdir = str(own), None


def free_memory() -> int:
    """Return how many bytes the folder in memory may take: as many as it has, and the machine, and this container."""
    free = [shutil.disk_usage(SHARED_MEMORY).free]
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free.append(int(facts["MemAvailable"].split()[0]) * 1024)
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        free.append(int(text) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return min(free)


def remove_as_its_owner(folder: Path, owner: IO[bytes], pid: int) -> None:
    """Do nothing in a process that a test has forked."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
        owner.close()


def pytest_sessionstart(session: pytest.Session) -> None:
    plugin = session.config.pluginmanager.get_plugin("logging-plugin")
    assert plugin is not None
    plugin.caplog_handler.addFilter(_is_of_this_test)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    # `given` keeps the settings of the moment at which its module is imported. Other runs do without Hypothesis.
    if "CI" not in os.environ and b"hypothesis" in module_path.read_bytes():
        let_examples_take_their_time()


@cache
def let_examples_take_their_time() -> None:
    """A busy machine is slow, and no example is wrong because of that. Hypothesis knows this by itself where CI is set."""
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


def pytest_collection_finish() -> None:
    # Thousands of collected tests and all modules live until the end. To look for garbage among them, as often as Python
    # does by default, took a quarter of the processor time of the core stage.
    leave_alone_what_lives()
    gc.set_threshold(10_000, 20, 20)


def leave_alone_what_lives() -> None:
    """Drop the garbage, and let later collections pass over all that is left."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    # Modules that a test was the first to import, and what the tests since left behind, are otherwise looked through again by
    # each collection that a test or the first request of an application asks for.
    ran = yield
    if next(ENDED) % TESTS_BETWEEN == 0:
        leave_alone_what_lives()
    return ran


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    EARLIER_THREADS.clear()
    EARLIER_THREADS.update(threading.enumerate())
    reset_logging()
    forget_annotated()


def forget_annotated() -> None:
    """Forget the functions and classes that earlier tests annotated.

    The first request of each application looks for annotations that protect nothing. Where it finds one that may be garbage,
    it collects, which takes up to a second among the objects of all tests.
    """
    annotated = getattr(sys.modules.get("flask_idempotency.web.policies"), "annotated_here", {})
    for number, each in list(annotated.items()):
        if isinstance(each, FunctionType | type) and "<locals>" in each.__qualname__:
            annotated.pop(number, None)


def reset_logging() -> None:
    """Undo what an earlier test did to the loggers of this process.

    Alembic's `fileConfig` disables each logger that it does not name, and a Celery worker sets the level of the root. The
    warnings of a later test would then be lost.
    """
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    root.manager.disable = logging.NOTSET
    for name, logger in root.manager.loggerDict.items():
        if name.partition(".")[0] == "flask_idempotency" and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            logger.setLevel(logging.NOTSET)


def _is_of_this_test(_: logging.LogRecord) -> bool:
    """Return whether `caplog` is to see a record of the current thread.

    A claim of an earlier test may still be retried by the lease thread of its application, half a minute long. Its log
    lines are none of this test's.
    """
    thread = threading.current_thread()
    return thread.name != THREAD_NAME or thread not in EARLIER_THREADS


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Its summary imports all of Hypothesis, a third of the time of one unit test file. Workers of xdist report to a
    # process that has imported nothing, so there it stays.
    manager = session.config.pluginmanager
    if "hypothesis" not in sys.modules and not manager.has_plugin("dsession"):
        manager.unregister(name="hypothesispytest")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")
