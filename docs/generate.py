"""Write the reference pages from the code that they describe: `python -m docs.generate`.

Other pages may hold generated parts, each between `<!-- generated: NAME -->` and `<!-- end of NAME -->`.
A test fails when a page or a part is not what this would write.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from docs.commands import page as cli
from flask_idempotency.engine.events import Event, facts_of, kinds, name_of
from flask_idempotency.engine.model import TRANSITIONS, State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.engine.store import Store
from flask_idempotency.logs import LOGGER
from flask_idempotency.metrics import COUNTED, FAMILIES, GAUGES, Family, Uncounted
from flask_idempotency.settings.options import DeploymentSchema, PolicySchema
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.signals import SIGNALS
from flask_idempotency.web.problems import PROBLEMS, ProblemType

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "flask_idempotency"
NOTICE = "<!-- Written by docs/generate.py from the code. Change the code, then run it. -->\n"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _shown(value: object) -> str:
    match value:
        case frozenset():
            return f"`{sorted(value)}`" if value else "none"
        case tuple() if not value:
            return "none"
        case tuple():
            return ", ".join(_shown(each) for each in value)
        case None:
            return "by `effects`"
        case float():
            return f"`{value:g}`"
        case _:
            return f"`{value}`"


def configuration() -> str:
    """Every setting, its default and its meaning."""
    plain = Policy()
    policy = [
        (f"`{name}`", _default(name, plain), str(field.metadata["doc"]))
        for name, field in PolicySchema().fields.items()
    ]
    deployment = [
        (f"`IDEMPOTENCY_{name.upper()}`", _shown_default(field.metadata.get("default")), str(field.metadata["doc"]))
        for name, field in DeploymentSchema().fields.items()
        if name not in PolicySchema().fields
    ]
    return (
        f"# Configuration\n\n{NOTICE}\n"
        "An unknown `IDEMPOTENCY_*` key is an error with a suggestion, and all faults are reported together when the "
        "extension is set up.\n\n"
        "A fault of the whole application stops it when it starts. A fault of one view closes that endpoint: it answers 500 "
        "[`misconfigured`](problems/misconfigured.md) and never runs unprotected; all other URLs work. Your log has all such "
        "faults together, when the extension is set up and before the first request. `flask idempotency doctor` lists them.\n\n"
        "A view with `@idempotent` or `@claim_here`, or a blueprint that you passed to `configure`, needs the extension. An "
        "application without `Idempotency(app)` answers 500 in its place and names the remedy. Tests that call the view as a "
        "function are not affected, and `@exempt` views run. `IDEMPOTENCY_ENABLED=False` runs the views without protection, "
        "also where the extension was never set up.\n\n## Policy\n\n"
        "Usable in `Idempotency(…)`, `idempotency.configure(blueprint, …)`, `@idempotent(…)`, and as `IDEMPOTENCY_<UPPER>`.\n"
        "The innermost that names a value decides: application, blueprint, nested blueprint, view, method of a view.\n"
        "A value that you write at any layer beats every value that a profile brings, whichever layer names the profile.\n"
        "Durations are seconds or a `timedelta`.\n\n"
        + _table(("keyword", "default", "meaning"), policy)
        + "\n## Deployment\n\nConfiguration or `Idempotency(…)` only.\n\n"
        + _table(("key", "default", "meaning"), deployment)
    )


def _default(name: str, plain: Policy) -> str:
    if name == "replayed_header":
        return ", ".join(f"`{header}: {value}`" for header, value in plain.replayed_header)
    if name in ("decide", "form_field"):
        return "none"
    if name == "max_request_body":
        return "what Flask allows"
    return _shown(getattr(plain, name))


def _shown_default(default: object) -> str:
    return str(default) if isinstance(default, str) and " " in default else _shown(default)


def problems() -> str:
    """The list of all problems."""
    rows = [(f"[`{row.code}`]({row.code}.md)", _status(row), row.title) for row in PROBLEMS.values()]
    return (
        f"# Problems\n\n{NOTICE}\n"
        "Every refusal is an RFC 9457 problem document with a stable `code`; its `type` is `IDEMPOTENCY_DOCS_URL` followed "
        "by the code.\nThe profiles `stripe` and `playbook` and a `problem_renderer` of yours give it another form.\n"
        "No key, record, payload or principal appears in one.\n"
        "In debug mode only, `outcome-unknown` names the record by its handle, and `misconfigured` says what is wrong.\n\n"
        + _table(("code", "status", "what it says"), rows)
    )


def _status(problem: ProblemType) -> str:
    if problem.status is None:
        return "that of the first answer"
    # 500 if the application lacks what would name the caller: see `Asking._unnamed_caller`.
    own = "403 or 500" if problem.code == "principal-required" else str(problem.status)
    others = [
        f"`{profile.name}`: {profile.statuses[problem.code]}"
        for profile in PROFILES.values()
        if problem.code in profile.statuses
    ]
    return f"{own} ({', '.join(others)})" if others else own


def _problem_page(problem: ProblemType) -> str:
    """What happened, is it safe to retry, what to do."""
    again = "yes" if problem.retry else "no"
    return (
        f"# {problem.title}\n\n{NOTICE}\n"
        f"Code `{problem.code}`, status {_status(problem)}.\n"
        f"Can the same request under the same key end better when a machine sends it again: {again}.\n\n{problem.guide}\n"
    )


def signals() -> str:
    """Every event, its signal and what it tells."""
    rows = [
        (f"`{kind.__name__}`", f"`{signal.name}`", _facts(kind), " ".join((kind.__doc__ or "").split()))
        for kind, signal in SIGNALS.items()
    ]
    return (
        f"# Signals\n\n{NOTICE}\n"
        "Receivers get the application as sender and the event as `event`.\n"
        "Every event carries `record`, a short keyed hash that tells two keys apart and leads back to neither, and "
        "`operation`, the endpoint.\nWhat a receiver raises is logged and passed over.\n\n"
        + _table(("event", "signal", "facts", "meaning"), rows)
    )


def _facts(kind: type[Event]) -> str:
    return _listed(facts_of(kind))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


def events() -> str:
    """Where each event is heard of: as a signal, in the log, and as a metric; and every metric."""
    rows = [
        (f"`{kind.__name__}`", f"`{signal.name}`", f"`{name_of(kind)}`", _levels(kind), _counted(kind))
        for kind, signal in SIGNALS.items()
    ]
    sentences = [(f"`{name_of(kind)}`", kind.SENTENCE, _facts(kind)) for kind in kinds()]
    counted = [
        (f"`{family.exposed}`", _kind(family), _labels(family.labels), family.help) for family in FAMILIES.values()
    ]
    gauges = [(f"`{name}`", _listed(labels), about) for name, (about, labels) in GAUGES.items()]
    return (
        f"# Events, logs and metrics\n\n{NOTICE}\n"
        "Whatever happens to a key is told once, and heard of in three ways: as a [signal](signals.md), as a line on the "
        f"logger `{LOGGER}`, and as a [metric](metrics.md).\n\n"
        + _table(("event", "signal", "`event` in the log", "level", "metrics"), rows)
        + "\n## The log\n\n"
        "The sentence is always the same, so that lines can be counted by it. Everything else is a field of the log record "
        "(`extra`): `event`, `app` (the namespace), `record` (a short keyed hash that leads back to no key), `operation` (the "
        "endpoint, or the task), and the facts of the event. A formatter for JSON writes them; others show them behind the "
        "sentence.\nNo key, principal or body is ever in one, and a tenant only as its pseudonym, where an operator "
        "named it.\n\n"
        + _table(("`event`", "sentence", "facts"), sentences)
        + "\n## The metrics\n\nEach has the label `app` as well, which is the application's namespace.\n\n"
        + _table(("metric", "type", "labels", "what it counts"), counted)
        + "\n## The gauges\n\nRead from the store when somebody scrapes, and at most once in ten seconds.\n\n"
        + _table(("gauge", "labels", "what it says"), gauges)
    )


def _levels(kind: type[Event]) -> str:
    return " or ".join(logging.getLevelName(level) for level in kind.LEVELS)


def _counted(kind: type[Event]) -> str:
    counted = COUNTED[kind]
    if isinstance(counted, Uncounted):
        return f"none: {counted.because}"
    return ", ".join(f"`{FAMILIES[counts.family].exposed}`" for counts in counted)


def _kind(family: Family) -> str:
    return "histogram" if family.buckets else "counter"


def _labels(labels: Mapping[str, tuple[str, ...]]) -> str:
    return "; ".join(f"`{label}`: {', '.join(values)}" for label, values in labels.items()) or "–"


def states() -> str:
    """Every move that a record can make."""
    name: Mapping[State | None, str] = {None: "absent", **{state: state.name for state in State}}
    rows = [(name[before], verb, name[after], who) for (before, verb), (after, who) in TRANSITIONS.items()]
    return (
        f"# States of a record\n\n{NOTICE}\n"
        "What is not listed changes nothing. An expired record is an absent one, whether or not it is still stored.\n\n"
        + _table(("from", "verb", "to", "who, and when"), rows)
    )


def layers() -> str:
    """The layers of the package, from the import contract."""
    contract = next(each for each in _tools()["importlinter"]["contracts"] if each["type"] == "layers")
    rows = []
    for number, line in enumerate(contract["layers"], start=1):
        names = [name.strip(" ()") for name in line.split("|")]
        there = [f"`{name}`" for name in names if list(PACKAGE.glob(f"{name}.py")) or list(PACKAGE.glob(f"{name}/"))]
        rows.append((str(number), ", ".join(there)))
    return _table(("layer", "modules of `flask_idempotency`"), [row for row in rows if row[1]])


def _tools() -> Mapping[str, Any]:
    tools: Mapping[str, Any] = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    return tools


def layout() -> str:
    """Every Python file and folder, with the first sentence of its docstring."""
    lines = ["```text"]
    for top in (PACKAGE, HERE.parent / "janitor"):
        lines += _tree(top, 0)
    return "\n".join([*lines, "```"]) + "\n"


def _tree(folder: Path, depth: int) -> Iterator[str]:
    indent = "  " * depth
    scripts, libraries = len(list(folder.glob("*.lua"))), len(list(folder.glob("lib/*.lua")))
    yield _described(
        f"{indent}{folder.name}/",
        f"{scripts} scripts, one for each operation, and {libraries} libraries in lib/."
        if scripts
        else _first(folder / "__init__.py"),
    )
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    for path in files:
        yield _described(f"{indent}  {path.name}", _first(path))
    for inner in sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in ("__pycache__", "lib")):
        yield from _tree(inner, depth + 1)


def _described(name: str, sentence: str) -> str:
    return f"{name:<28} {sentence}".rstrip()


def _first(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph, maxsplit=1)[0]


def protocol() -> str:
    """The methods of `Store`, with the first sentence of each."""
    rows = []
    for name, method in inspect.getmembers(Store, inspect.isfunction):
        if not name.startswith("_"):
            parameters = [each for each in inspect.signature(method).parameters if each != "self"]
            sentence = re.split(
                r"(?<=\.) ", " ".join((inspect.getdoc(method) or "").partition("\n\n")[0].split()), maxsplit=1
            )[0]
            rows.append((method.__code__.co_firstlineno, f"`{name}({', '.join(parameters)})`", sentence))
    return _table(("method", "what it does"), [(name, sentence) for _, name, sentence in sorted(rows)])


@cache
def _walks() -> str:
    """The walks of a fresh process, because loggers and caches of this one could add calls."""
    command = [sys.executable, "-m", "benchmarks.walk", "memory", "redis", "sqlite", "--markdown"]
    return subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True, text=True).stdout


def walks() -> str:
    """Every function that one keyed POST crosses, where Redis is the store."""
    return (
        f"# The walk of a request\n\n{NOTICE}\n"
        "These are the functions of this package that one keyed POST enters, in call order, in a warm process. "
        "[Architecture](architecture.md) explains the steps. `python3 run.py walk` prints the same for the other stores.\n\n"
        + _walks()
    )


PAGES: Mapping[str, Callable[[], str]] = {
    **{f"problems/{row.code}.md": partial(_problem_page, row) for row in PROBLEMS.values()},
    "problems/README.md": problems,
    "cli.md": lambda: cli(NOTICE),
    "configuration.md": configuration,
    "events.md": events,
    "signals.md": signals,
    "states.md": states,
    "walk.md": walks,
}

# The parts that a page written by hand may hold, by name.
PARTS: Mapping[str, Callable[[], str]] = {
    "layers": layers,
    "layout": layout,
    "protocol": protocol,
    "walk": lambda: _walks().partition("\n\n")[0] + "\n",
}
PART = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end of \1 -->)", re.DOTALL)


def with_parts(page: str) -> str:
    """Return the text of a page with its generated parts as they should be."""
    return PART.sub(lambda part: f"{part[1]}{part[2]}{PARTS[part[1]]()}", page)


def main() -> None:
    """Write every page, and the generated parts of the others."""
    for page, render in PAGES.items():
        (HERE / page).parent.mkdir(exist_ok=True)
        (HERE / page).write_text(render(), encoding="utf-8")
    for path in sorted(HERE.rglob("*.md")):
        path.write_text(with_parts(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
