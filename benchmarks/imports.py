"""How long a worker takes to start: the import of this package and the set-up of an application, beside bare Flask.

Each case runs in a new process, one after the other in every round. A worker finds compiled modules, as pip installs them: so a
first run, which is not measured, compiles them into a folder of this benchmark.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, TypeAlias

from benchmarks import report
from benchmarks.report import Row, Section, at_most

ROOT: Final = Path(__file__).resolve().parents[1]

# A collection of all objects, most of them Flask's, is due now and then. It must not count for the import that it meets.
MEASURE: Final = """
import gc, logging, time
import flask
logging.getLogger("flask_idempotency").setLevel(logging.CRITICAL)
gc.collect()
began = time.process_time()
{client}
client = time.process_time()
gc.collect()
continued = time.process_time()
{ours}
imported = time.process_time()
app = flask.Flask("shop")
made = time.process_time()
{set_up}
ended = time.process_time()
print(client - began, imported - continued, ended - made)
"""
SET_UP: Final = "flask_idempotency.extension.Idempotency(app, store={store!r}, secret='s-9f2c47d1e8b35a60')"
# What the SQL store imports of it.
SQLALCHEMY: Final = "import sqlalchemy.dialects.postgresql, sqlalchemy.dialects.sqlite"
OF_STORE: Final = "import flask_idempotency.extension, flask_idempotency.stores.{store}.store"

BARE: Final = "import flask_idempotency"
MEMORY: Final = "memory store"
REDIS: Final = "Redis store"
SQL: Final = "SQL store (SQLite)"

Taken: TypeAlias = tuple[float, float, float]


def import_section(url: str, *, rounds: int) -> Section:
    """Time each case in new processes. The Redis at this URL holds the records of one application."""
    with TemporaryDirectory() as folder:
        records = f"sqlite:///{folder}/records.db"
        programs = {
            BARE: MEASURE.format(client="", ours=BARE, set_up=""),
            MEMORY: MEASURE.format(
                client="", ours=OF_STORE.format(store="memory"), set_up=SET_UP.format(store="memory://")
            ),
            REDIS: MEASURE.format(
                client="import redis", ours=OF_STORE.format(store="redis"), set_up=SET_UP.format(store=url)
            ),
            SQL: MEASURE.format(
                client=SQLALCHEMY, ours=OF_STORE.format(store="sql"), set_up=SET_UP.format(store=records)
            ),
        }
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for program in programs.values():
            _timed(program, environment)
        taken: dict[str, list[Taken]] = {case: [] for case in programs}
        for _ in range(rounds):
            for case, program in programs.items():
                taken[case].append(_timed(program, environment))
    note = "Milliseconds of processor time in a new process, beside bare Flask. `client` is redis-py or SQLAlchemy."
    return Section("Import", note, [row(case, times) for case, times in taken.items()])


def row(case: str, taken: list[Taken]) -> Row:
    limit = report.IMPORT_MILLISECONDS
    client, ours, set_up = (median(each[part] for each in taken) * 1000 for part in range(3))
    if case == BARE:
        return Row(case, {"ours": ours})
    whole = median(map(sum, taken)) * 1000
    verdicts = [at_most(f"ours and set-up ≤ {limit:g} ms", ours + set_up, limit)]
    if case == REDIS:
        verdicts.append(at_most(f"with redis-py ≤ {limit:g} ms", whole, limit))
    return Row(case, {"ours": ours, "client": client, "set-up of an app": set_up, "whole": whole}, verdicts)


def _timed(program: str, environment: Mapping[str, str]) -> Taken:
    """Return the seconds of processor time for the client, for the import of ours, and for the set-up."""
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, capture_output=True, check=True, text=True, cwd=ROOT, env=environment).stdout
    client, ours, set_up = map(float, printed.split())
    return client, ours, set_up
