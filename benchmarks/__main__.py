"""`python -m benchmarks`, or `python3 run.py bench`: measure this checkout and print the figures beside their budgets."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import redis

from benchmarks import client as http_client
from benchmarks import (
    comparison,
    console,
    features,
    gate,
    imports,
    messages,
    modes,
    outbox,
    page,
    paths,
    profiling,
    sql,
    steps,
    storage,
)
from benchmarks.apps import no_flushes, plain_installation
from benchmarks.harness import BUSY, OURS, OURS_MEMORY, PATHS, Cores, choose_cores, describe, is_idle, pin, pinned
from benchmarks.report import Section
from example_app.demo.servers import RedisServer
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.store import RedisStore

ROUNDS, REQUESTS = 21, 200
PARTS = (
    "compare",
    "sql",
    "memory",
    "growth",
    "import",
    "client",
    "messages",
    "modes",
    "compliance",
    "promises",
    "expiry",
    "outbox",
    "steps",
    "console",
)


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.part) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if options.quick:
        options.rounds, options.requests, options.seconds = 3, 50, 0.25
        options.rows, options.records = min(options.rows, 20_000), min(options.records, 20_000)
    if not (options.gate or options.commit):
        options.rounds, options.requests = options.rounds or ROUNDS, options.requests or REQUESTS
    # After a minute the extension warns that no janitor reports.
    logging.getLogger("flask_idempotency").setLevel(logging.ERROR)
    cores = choose_cores()
    with (
        plain_installation(),
        no_flushes(),
        empty_server(options.redis_url, cores) as (client, url),
        pinned(cores.application),
    ):
        about, idle = describe(client, cores), is_idle()
        if options.gate:
            return gate.report(*gate.check(client, url, cores, **_of_gate(options)))
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
    parser.add_argument("part", nargs="*", help=f"what to measure: {', '.join(PARTS)} (default: {PARTS[0]})")
    parser.add_argument("--rounds", type=int, help="interleaved rounds, each with every case (default 21)")
    parser.add_argument("--requests", type=int, help="requests of each case in a round (default 200)")
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="seconds of each case in a gunicorn round (default 1.5)"
    )
    parser.add_argument(
        "--rows", type=int, default=storage.ROWS, help=f"records for `expiry` to remove (default {storage.ROWS:,})"
    )
    parser.add_argument(
        "--records",
        type=int,
        default=console.RECORDS,
        help=f"completed records for `console` (default {console.RECORDS:,}, which takes minutes and 2 GB)",
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds of everything, for a first impression")
    parser.add_argument(
        "--gate", action="store_true", help="only this: fail if a ratio to by hand is 15 %% above the committed one"
    )
    parser.add_argument(
        "--commit", action="store_true", help="only this: write the ratios that --gate compares with (idle machine)"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="only this: all figures of docs/reference/speed.md, its charts and the committed ratios (idle machine)",
    )
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
        "--keys",
        type=int,
        help="the most live keys of `growth` (default 100,000; with --write 1,000,000, which takes minutes and 2 GB)",
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
    if options.commit:
        yield lambda: [gate.commit(client, url, cores, **_of_gate(options, rounds=gate.COMMIT_ROUNDS))]
        return
    if options.write:
        yield lambda: page.write(
            client,
            url,
            options.database_url,
            cores,
            rounds=options.rounds,
            requests=options.requests,
            serving_rounds=_serving_rounds(options),
            seconds=options.seconds,
            most_keys=options.keys or storage.MOST_KEYS,
        )
        return
    if options.profile:
        yield lambda: _profiled(options, url, cores)
        return
    parts: dict[str, Make] = {
        "compare": lambda: comparison.sections(
            comparison.compare(
                client,
                url,
                cores,
                rounds=options.rounds,
                requests=options.requests,
                serving_rounds=_serving_rounds(options),
                seconds=options.seconds,
            )
        ),
        "memory": lambda: [storage.memory_section(client, url)],
        "growth": lambda: [
            storage.growth(cores, levels=[each for each in storage.LEVELS if each <= (options.keys or 100_000)])[1]
        ],
        "import": lambda: [imports.import_section(url, rounds=max(3, options.rounds // 2))],
        "client": lambda: [http_client.section(rounds=options.rounds, requests_each=max(1, options.requests // 4))],
        "messages": lambda: [messages.section(url, rounds=options.rounds, messages=options.requests)],
        "modes": lambda: [modes.section(url, rounds=options.rounds, requests=options.requests)],
        "compliance": lambda: features.compliance_sections(
            client, url, rounds=options.rounds, requests=options.requests
        ),
        "promises": lambda: [features.data_loss_section(cores, rounds=options.rounds, requests=options.requests)],
        "outbox": lambda: outbox.sections(
            options.database_url, cores, rounds=options.rounds, messages=options.requests
        ),
        "steps": lambda: steps.sections(
            client, url, options.database_url, cores, rounds=options.rounds, requests=options.requests
        ),
        "console": lambda: console.sections(
            options.database_url, cores, records=options.records, rounds=max(3, options.rounds // 2)
        ),
        "expiry": lambda: storage.expiry_sections(options.database_url, cores, rows=options.rows),
        "sql": lambda: sql.sections(options.database_url, url, cores, rounds=options.rounds, requests=options.requests),
    }
    for name in options.part or PARTS[:1]:
        yield parts[name]


def _of_gate(options: argparse.Namespace, rounds: int = gate.ROUNDS) -> dict[str, int]:
    return {"rounds": options.rounds or rounds, "requests": options.requests or gate.REQUESTS}


def _serving_rounds(options: argparse.Namespace) -> int:
    # A round takes seconds here. It has so many requests that fewer rounds are as steady.
    return max(1, int(options.rounds) // 3)


def _profiled(options: argparse.Namespace, url: str, cores: Cores) -> list[Section]:
    if options.on_sql:
        with sql.one_case(options.on_sql, options.profile, options.database_url, url, cores) as case:
            return profiling.profile_sections(case, requests=options.requests * 10)
    name: str
    store: object
    name, store = (OURS_MEMORY, MemoryStore()) if options.on_memory else (OURS, url)
    with paths.our_cases(name, store) as cases:
        case = next(case for case in cases if case.path == options.profile)
        return [
            profiling.parts_section([case], seconds=options.seconds),
            *profiling.profile_sections(case, requests=options.requests * 10),
        ]


@contextmanager
def empty_server(url: str | None, cores: Cores) -> Iterator[tuple[redis.Redis, str]]:
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
