"""`bench --write`: measure everything that docs/reference/speed.md shows, and write it there.

The page holds each block between `<!-- measured: NAME -->` and `<!-- end of NAME -->`. The same run writes the charts and the
committed ratios.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import redis

from benchmarks import charts, comparison, features, gate, imports, profiling, report, sql, steps, storage
from benchmarks.comparison import Measured
from benchmarks.harness import BY_HAND, FIRST, IDLE_LOAD, OURS, OUTCOMES, PEER, REPLAY, Cores, describe
from benchmarks.paths import redis_cases
from benchmarks.report import Row, Section, markdown
from docs.generate import HERE

PAGE: Final = HERE / "reference" / "speed.md"
BLOCK: Final = re.compile(r"(?<=<!-- measured: )(\w+)( -->\n).*?(?=<!-- end of \1 -->)", re.DOTALL)

IN_PROCESS = ("p50", "p99", "CPU", "× by hand", "trips", "Redis", "its CPU", "bytes")
UNDER_GUNICORN = ("gunicorn/s", "of by hand", "its p99", "worker CPU")
NOT_SHOWN = ("p99", "× bare")
"""Columns of the SQL tables that only the terminal shows."""
ONCE: Final = re.compile(
    r": (conflict|mismatch)$|^(bare Flask|business alone):|: (bare Flask|four empty hooks)$|^(with quotas|both): .*256 KB$"
)
"""Cases of which one row is enough."""
BESIDE: Final = re.compile("sealing|activity")
"""Titles of tables that only the terminal shows: the page has their result in a sentence."""


def write(
    client: redis.Redis,
    url: str,
    database_url: str | None,
    cores: Cores,
    *,
    rounds: int,
    requests: int,
    serving_rounds: int,
    seconds: float,
    most_keys: int,
) -> list[Section]:
    """Measure, then write the page, the charts and the committed ratios. Return every table."""
    about = describe(client, cores)
    _say("by hand, ours and the peer")
    measured = comparison.compare(
        client, url, cores, rounds=rounds, requests=requests, serving_rounds=serving_rounds, seconds=seconds
    )
    table, commands = comparison.sections(measured)
    _say("profiles")
    with redis_cases(client, url, BY_HAND, OURS) as cases:
        profiled = [case for path in (FIRST, REPLAY) for case in cases if case.path == path]
        parts = profiling.parts_section(profiled, seconds=4 * seconds)
    _say("the committed ratios")
    ratios = gate.commit(client, url, cores, rounds=4 * rounds)
    _say("SQL")
    databases = sql.sections(database_url, url, cores, rounds=rounds, requests=requests)
    _say("encryption and quotas")
    options = features.compliance_sections(client, url, rounds=rounds, requests=requests)
    _say("durable steps")
    stepped = steps.sections(client, url, database_url, cores, rounds=rounds, requests=requests)
    imported = imports.import_section(url, rounds=max(3, rounds // 2))
    _say("live keys")
    levels, grown = storage.growth(cores, levels=[each for each in storage.LEVELS if each <= most_keys])
    blocks = {
        "machine": machine(about),
        "in_process": markdown(with_goals(table, gunicorn=False), IN_PROCESS),
        "gunicorn": markdown(brief(with_goals(table, gunicorn=True)), UNDER_GUNICORN),
        "sql": "\n".join(f"{each.title}:\n\n{markdown(brief(each), shown(each))}" for each in joined(databases)),
        "options": "\n".join(
            f"{each.title}:\n\n{markdown(brief(each))}" for each in options if not BESIDE.search(each.title)
        ),
        "steps": steps_block(stepped),
        "imports": markdown(imported),
        "growth": markdown(grown),
    }
    PAGE.write_text(with_blocks(PAGE.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    charts.write("ratios", charts.ratios(bars(measured), report.CPU_TO_BY_HAND))
    charts.write("growth", charts.growth([(level.keys, level.p50, level.p99) for level in levels]))
    return [table, commands, parts, ratios, *databases, *options, *stepped, imported, grown]


def brief(table: Section) -> Section:
    """Return the table without the rows that the page has in its first table only. The terminal has them in each."""
    return replace(table, rows=[row for row in table.rows if not ONCE.search(row.case)])


def shown(table: Section) -> list[str]:
    """Return the columns of a SQL table that the page shows."""
    return list(dict.fromkeys(name for row in table.rows for name in row.cells if name not in NOT_SHOWN))


def steps_block(sections: Sequence[Section]) -> str:
    return "\n".join(f"{each.title}:\n\n{markdown(each)}" for each in sections)


def with_goals(table: Section, *, gunicorn: bool) -> Section:
    """Return the table with the goals under gunicorn only, or with the others."""
    rows = [
        replace(row, verdicts=[each for each in row.verdicts if each.budget.startswith("gunicorn") == gunicorn])
        for row in table.rows
    ]
    return replace(table, rows=rows)


def joined(tables: Sequence[Section]) -> list[Section]:
    """Return one table for all whose titles end with the same word: a row has the cells and the goals of each."""
    found: dict[str, Section] = {}
    for table in tables:
        kind, rows = table.title.rpartition(" ")[2], {row.case: row for row in table.rows}
        if kind in found:
            table = replace(found[kind], rows=[_both(row, rows.get(row.case)) for row in found[kind].rows])
        found[kind] = table
    return [*found.values()]


def _both(row: Row, other: Row | None) -> Row:
    if other is None:
        return row
    return replace(row, cells={**row.cells, **other.cells}, verdicts=[*row.verdicts, *other.verdicts])


def _say(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)


def with_blocks(text: str, blocks: Mapping[str, str]) -> str:
    """Return the page with these blocks. Raise if it has no place for one, or a place without one."""
    if (places := set(BLOCK.findall(text))) and {name for name, _ in places} != blocks.keys():
        raise ValueError(f"{PAGE.name} has the blocks {sorted(name for name, _ in places)}, not {sorted(blocks)}")
    return BLOCK.sub(lambda found: f"{found[1]}{found[2]}\n{blocks[found[1]].strip()}\n\n", text)


def machine(about: Mapping[str, str]) -> str:
    """Return the sentence without which the figures mean nothing."""
    left_out = ("cpu", "cores", "pinned", "load before")
    named = ", ".join(f"{name} {value}" for name, value in about.items() if name not in left_out)
    busy = about["load before"].partition(" ")[0]
    measured = f"Measured on {datetime.now(UTC):%-d %B %Y}: {about['cpu']}, {about['cores']} cores, {named}. "
    return measured + (
        f"The load before the run was {busy}."
        if float(busy) < IDLE_LOAD
        else f"**Other processes used this machine: its load was {busy}.** Only counts and sizes hold."
    )


def bars(measured: Measured) -> dict[str, dict[str, float]]:
    """Return the ratios that the chart shows."""
    return {
        path: {
            app: measured[app, path].timing.processor_ratio_to(measured[BY_HAND, path].timing)
            for app in (OURS, PEER)
            if (app, path) in measured
        }
        for path in OUTCOMES
    }
