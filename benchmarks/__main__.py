"""`python -m benchmarks`, or `python3 run.py bench`: measure this checkout and print the figures beside their budgets."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import redis

from benchmarks import features, paths, serving, sql, storage
from benchmarks.harness import BUSY, OURS, OURS_MEMORY, PATHS, Cores, choose_cores, describe, is_idle, pin, pinned
from benchmarks.report import Section
from example_app.demo.servers import RedisServer
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.store import RedisStore

PARTS = ("requests", "trips", "serving", "memory", "sql", "compliance", "promises", "expiry")


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.part) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if options.quick:
        options.rounds, options.requests, options.seconds = 3, 50, 0.5
        options.rows = min(options.rows, 20_000)
    cores = choose_cores()
    with _server(options.redis_url, cores) as (client, url), pinned(cores.application):
        about, idle = describe(client, cores), is_idle()
        shown = [section for make in _chosen(options, client, url, cores) for section in make()]
    if options.json:
        print(json.dumps({"machine": about, "sections": [section.as_json() for section in shown]}, indent=2))
    else:
        print(" · ".join(f"{name} {value}" for name, value in about.items()), end="\n\n")
        if not idle:
            print(BUSY, end="\n\n")
        print("\n".join(section.as_text() for section in shown))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.py bench", description=__doc__)
    parser.add_argument("part", nargs="*", help=f"what to measure: {', '.join(PARTS)} (default: all of them)")
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds, each with every case (default 21)")
    parser.add_argument("--requests", type=int, default=200, help="requests of each case in a round (default 200)")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds of each case in a gunicorn round (default 2)"
    )
    parser.add_argument(
        "--rows", type=int, default=storage.ROWS, help=f"records for `expiry` to remove (default {storage.ROWS:,})"
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds of everything, for a first impression")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument(
        "--redis-url",
        metavar="URL",
        help="your Redis or Valkey instead of the embedded one; its database must be empty, and is emptied afterwards",
    )
    parser.add_argument(
        "--database-url",
        metavar="URL",
        default=os.environ.get("DATABASE_URL"),
        help="your PostgreSQL instead of the tests' one, for SQLAlchemy with psycopg; its database must be empty, and "
        "is emptied afterwards (default: DATABASE_URL)",
    )
    parser.add_argument(
        "--million", action="store_true", help="only this: claims among 1 M live keys (takes minutes and 1.5 GB)"
    )
    parser.add_argument(
        "--profile",
        choices=PATHS,
        metavar="PATH",
        help=f"only this: where the time goes on one path ({', '.join(PATHS)})",
    )
    parser.add_argument(
        "--on-memory", action="store_true", help="with --profile: on the memory store, without redis-py"
    )
    parser.add_argument(
        "--on-sql",
        choices=sql.PROFILED,
        help="with --profile: on PostgreSQL, or on SQLite where there is none, with this strategy or these effects",
    )
    return parser


Make = Callable[[], list[Section]]


def _chosen(options: argparse.Namespace, client: redis.Redis, url: str, cores: Cores) -> Iterator[Make]:
    if options.million:
        yield lambda: [storage.million_section(cores)]
        return
    if options.profile:
        yield lambda: _profiled(options, url, cores)
        return
    parts: dict[str, Make] = {
        "requests": lambda: [paths.requests_section(client, url, rounds=options.rounds, requests=options.requests)],
        "trips": lambda: [paths.trips_section(url)],
        "serving": lambda: [serving.section(url, cores, rounds=_serving_rounds(options), seconds=options.seconds)],
        "memory": lambda: [storage.memory_section(client, url)],
        "compliance": lambda: features.compliance_sections(
            client, url, rounds=options.rounds, requests=options.requests
        ),
        "promises": lambda: [features.data_loss_section(cores, rounds=options.rounds, requests=options.requests)],
        "expiry": lambda: storage.expiry_sections(options.database_url, cores, rows=options.rows),
        "sql": lambda: sql.sections(
            options.database_url, client, url, cores, rounds=options.rounds, requests=options.requests
        ),
    }
    for name in options.part or PARTS:
        yield parts[name]


def _serving_rounds(options: argparse.Namespace) -> int:
    # A round takes seconds here. It has so many requests that fewer rounds are as steady.
    return max(1, int(options.rounds) // 3)


def _profiled(options: argparse.Namespace, url: str, cores: Cores) -> list[Section]:
    if options.on_sql:
        with sql.one_case(options.on_sql, options.profile, options.database_url, url, cores) as case:
            return paths.profile_sections(case, requests=options.requests * 10)
    name: str
    store: object
    name, store = (OURS_MEMORY, MemoryStore()) if options.on_memory else (OURS, url)
    with paths.our_cases(name, store) as cases:
        case = next(case for case in cases if case.path == options.profile)
        return paths.profile_sections(case, requests=options.requests * 10)


@contextmanager
def _server(url: str | None, cores: Cores) -> Iterator[tuple[redis.Redis, str]]:
    """Yield an empty server on the core of the store, or the server at this URL, which is empty afterwards too."""
    if url is None:
        with RedisServer() as server:
            pin(server.pid, cores.store)
            with redis.Redis.from_url(server.url) as client:
                _make_ready(server.url)
                yield client, server.url
        return
    with redis.Redis.from_url(url) as client:
        if client.dbsize():
            sys.exit(f"{url} is not empty. The benchmarks fill a database and then empty it: name an empty one.")
        try:
            _make_ready(url)
            yield client, url
        finally:
            client.flushdb()


def _make_ready(url: str) -> None:
    with closing(RedisStore(url)) as store:
        store.data_loss.initialise()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
