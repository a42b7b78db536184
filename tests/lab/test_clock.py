"""Wall clocks that a test sets: of real servers, and of nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import psycopg
import pytest

from tests.lab.clock import DAY, HOUR, WallClock
from tests.lab.postgres import StartPostgres
from tests.lab.programs import REDIS_KINDS
from tests.lab.redis import StartRedis, connect
from tests.tooling.processes import eventually

BUSY_SECONDS = 60.0
"""For how long a machine may be busy with other things between two looks at two clocks."""

STEPS = (HOUR, -HOUR, 2 * DAY, 0.0)

Now: TypeAlias = Callable[[], float]


@pytest.fixture(params=[*REDIS_KINDS, "postgresql"])
def server_now(request: pytest.FixtureRequest, wall_clock: WallClock) -> Iterator[Now]:
    """What time it is, by a server of this kind."""
    if request.param == "postgresql":
        start_postgres: StartPostgres = request.getfixturevalue("start_postgres")
        server = start_postgres(environment=wall_clock.environment)
        with psycopg.connect(server.conninfo("postgres"), autocommit=True) as connection:
            yield lambda: _first(connection.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone())
    else:
        start_redis: StartRedis = request.getfixturevalue("start_redis")
        with connect(start_redis(request.param, environment=wall_clock.environment).url) as client:
            yield lambda: float(client.time()[0])


def _first(row: tuple[float, ...] | None) -> float:
    assert row is not None
    return float(row[0])


def test_a_server_goes_by_the_clock_that_it_is_given(server_now: Now, wall_clock: WallClock) -> None:
    """It moves forwards, backwards and back again, while the server runs and its connections stay."""
    for wall_clock.ahead in STEPS:
        # Not at the first look: Valkey remembers for a millisecond what time it was.
        assert eventually(lambda: abs(server_now() - time.time() - wall_clock.ahead) < BUSY_SECONDS)


LOOK = """
import ctypes, json, time
libc = ctypes.CDLL(None)
libc.time.restype = ctypes.c_long
day = (ctypes.c_long * 2)()
libc.gettimeofday(day, None)
looks = {"clock_gettime": time.time(), "time": libc.time(None), "gettimeofday": day[0]}
looks["coarse"] = time.clock_gettime(5)
looks |= {"monotonic": time.monotonic(), "boottime": time.clock_gettime(time.CLOCK_BOOTTIME)}
print(json.dumps(looks))
"""


def test_only_what_can_be_set_is_shifted(wall_clock: WallClock) -> None:
    """Each way to ask for the wall clock is, and a clock that nobody can set goes on as it was."""
    wall_clock.ahead = HOUR
    environment = {**os.environ, **wall_clock.environment}
    said = subprocess.run([sys.executable, "-I", "-S", "-c", LOOK], env=environment, capture_output=True, check=True)
    looks = json.loads(said.stdout)

    wall = dict.fromkeys(("clock_gettime", "time", "gettimeofday", "coarse"), time.time() + HOUR)
    steady = {"monotonic": time.monotonic(), "boottime": time.clock_gettime(time.CLOCK_BOOTTIME)}
    assert pytest.approx({**wall, **steady}, abs=BUSY_SECONDS) == looks


def test_programs_that_were_not_given_it_have_their_own_time(wall_clock: WallClock, start_redis: StartRedis) -> None:
    """A test that sets one server's clock leaves the next one's alone."""
    wall_clock.ahead = 2 * DAY
    with connect(start_redis().url) as client:
        assert pytest.approx(time.time(), abs=BUSY_SECONDS) == float(client.time()[0])
