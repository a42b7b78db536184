"""Which machine this is, and who runs on which core of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import redis

# One process that starts something now and then, but none that runs all the time.
IDLE_LOAD = 0.7

BUSY = (
    "Others are using this machine. A request that waits for a round trip then comes back to a core that is taken and to "
    "cold caches, and the more code it runs, the more it pays: rows with round trips look far worse than they are, and "
    "the dearer ones most of all. Rows without any, and counts and sizes, hold."
)


@dataclass(frozen=True, slots=True)
class Cores:
    """Client and server apart, so that neither waits for the other's core. All None where that cannot be arranged."""

    application: int | None = None
    store: int | None = None
    load: int | None = None


def choose_cores() -> Cores:
    if not hasattr(os, "sched_setaffinity"):
        return Cores()
    free: Sequence[int] = sorted(os.sched_getaffinity(0))
    if len(free) < 2:
        return Cores()
    # The load generator shares the store's core before it takes the application's: that one is being measured.
    return Cores(application=free[0], store=free[1], load=free[2] if len(free) > 2 else free[1])


def pin(pid: int, core: int | None) -> None:
    """Keeps a process, 0 for this thread, and what it starts from now on, on a core; None leaves it where it is."""
    if core is not None:
        os.sched_setaffinity(pid, {core})


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Keeps this process on a core until the end of the block."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    pin(0, core)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def describe(client: redis.Redis, cores: Cores) -> dict[str, str]:
    """What a reader of the numbers must know."""
    server: dict[str, Any] = client.info("server")
    name, number = "Valkey", server.get("valkey_version")
    if number is None:
        name, number = "Redis", server["redis_version"]
    return {
        "cpu": _cpu_model(),
        "cores": str(os.cpu_count()),
        "pinned": "yes" if cores.application is not None else "no",
        "python": platform.python_version(),
        "flask": version("flask"),
        "redis-py": version("redis"),
        "hiredis": version("hiredis") if _has_hiredis() else "absent",
        "server": f"{name} {number}",
        "load before": f"{os.getloadavg()[0]:.1f}" + ("" if is_idle() else " (NOT IDLE: see below)"),
    }


def is_idle() -> bool:
    """Whether nobody else seems to need a core for long."""
    return os.getloadavg()[0] < IDLE_LOAD


def _has_hiredis() -> bool:
    from redis.utils import HIREDIS_AVAILABLE

    return bool(HIREDIS_AVAILABLE)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
