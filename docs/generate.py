"""Write the reference pages from the code that they describe: `python -m docs.generate`.

Other pages may hold generated parts, each between `<!-- generated: NAME -->` and `<!-- end of NAME -->`.
A test fails when a page or a part is not what this would write.
"""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from docs import diagrams, llms, public, screenshots
from docs.commands import page as cli
from flask_idempotency.engine.events import Event, facts_of, kinds, name_of
from flask_idempotency.engine.model import TRANSITIONS, State
from flask_idempotency.engine.policy import Policy
from flask_idempotency.logs import LOGGER
from flask_idempotency.metrics import COUNTED, FAMILIES, GAUGES, Family
from flask_idempotency.settings.consumers import CONSUMER, ConsumerPolicy
from flask_idempotency.settings.options import DEPLOYMENT, POLICY
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.web.problem_types import PROBLEMS, ProblemType
from tests.tooling.weight import limits

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "flask_idempotency"
NOTICE = "<!-- from code, by docs/generate.py -->\n"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _shown(value: object) -> str:
    match value:
        case frozenset():
            return ", ".join(f"`{each}`" for each in sorted(value)) or "none"
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


# The tables of the configuration page: heading, guides, options. `_tables` fails if an option is in none of them.
POLICY_TOPICS: Sequence[tuple[str, str, Sequence[str]]] = (
    (
        "Key and request",
        "[Choose endpoints](../guides/endpoints.md), [forms](../guides/forms.md).",
        (
            "required",
            "mode",
            "profile",
            "header",
            "form_field",
            "max_key_length",
            "key_format",
            "methods",
            "scope",
            "max_request_body",
            "published",
            "void",
        ),
    ),
    (
        "The same request",
        "[What makes two requests the same](../guides/endpoints.md).",
        ("fingerprint", "ignore_fields", "fingerprint_headers"),
    ),
    (
        "Effects and failures",
        "[What is promised](../how-it-works/promises.md), [quarantine](../operate/quarantine.md).",
        ("effects", "on_abandoned", "on_error", "keep_statuses", "release_statuses", "decide", "on_store_down"),
    ),
    (
        "Durable steps",
        "[What is promised](../how-it-works/promises.md).",
        ("steps", "dropped_steps", "steps_in_any_order", "resume_within", "finish", "finish_headers"),
    ),
    ("Time", "[What is promised](../how-it-works/promises.md).", ("keep", "remember", "lease", "max_runtime")),
    ("Duplicates of a running request", "[Waiting](../guides/waiting.md).", ("in_flight", "wait")),
    (
        "Stored response",
        "[What a retry gets](../guides/endpoints.md).",
        ("max_body", "keep_headers", "replayed_header"),
    ),
)
DEPLOYMENT_TOPICS: Sequence[tuple[str, str, Sequence[str]]] = (
    (
        "Application",
        "[Choose endpoints](../guides/endpoints.md).",
        (
            "enabled",
            "guard",
            "namespace",
            "docs_url",
            "problem_pages",
            "status_url",
            "browser_module",
            "publish",
            "metrics",
            "opentelemetry",
            "activity",
        ),
    ),
    (
        "Store",
        "[Stores and URLs](api/stores.md), [SQL](../guides/sql.md), [Redis](../guides/redis.md).",
        ("store", "redis_url", "claim_strategy", "replicas", "tenant_shards", "max_waiters"),
    ),
    (
        "Loss of data in Redis",
        "[When a Redis loses data](../how-it-works/data-loss.md).",
        ("after_loss", "data_loss_grace", "store_id", "client_clock_skew"),
    ),
    (
        "Callers and secrets",
        "[Whose key it is](../guides/identity.md).",
        ("secret", "allow_anonymous", "credential_headers", "former_identity", "hash_identities"),
    ),
    (
        "Encryption",
        "[Encryption](../guides/encryption.md).",
        ("encryption", "key_ring", "compression", "allow_plaintext_transport"),
    ),
    (
        "Quotas",
        "[Quotas](../guides/tenants.md).",
        ("quota_records", "quota_bytes", "quota_in_flight", "quota_new_keys"),
    ),
    (
        "Janitor",
        "[Janitor](../guides/janitor.md).",
        (
            "reap_interval",
            "finish_interval",
            "relay_interval",
            "expire_interval",
            "expire_rate",
            "rotate_interval",
            "reconcile_interval",
            "heartbeat_interval",
            "broker_url",
        ),
    ),
    ("Timeouts that only `doctor` uses", "[Doctor](../operate/doctor.md).", ("worker_timeout", "proxy_timeout")),
)


def configuration() -> str:
    """Every setting, its default and its meaning, by topic."""
    plain = Policy()
    policy = {name: (f"`{name}`", _default(name, plain), field.doc) for name, field in POLICY.items()}
    deployment = {
        name: (
            f"`IDEMPOTENCY_{name.upper()}`",
            _shown_default(field.default),
            field.doc,
        )
        for name, field in DEPLOYMENT.items()
        if name not in policy
    }
    return (
        f"# Configuration\n\n{NOTICE}\n"
        "Each policy keyword and each setting, its default and its effect.\n\n"
        "| | where you write it | who decides |\n| --- | --- | --- |\n"
        "| [policy](#policy) | `Idempotency(…)`, `idempotency.configure(blueprint, …)`, `@idempotent(…)`, or "
        "`IDEMPOTENCY_<UPPER>` | the innermost: application, blueprint, nested blueprint, view, method of a view |\n"
        "| [messages](#messages) | `idempotency.inbox(name, …)`, `@idempotent_task(…)` | that call |\n"
        "| [deployment](#deployment) | `Idempotency(…)` or `IDEMPOTENCY_<UPPER>` | `Idempotency(…)` |\n\n"
        "A value that you write at any layer beats every value of a profile. Durations are seconds or a `timedelta`.\n\n"
        "## Faults\n\n"
        "- An unknown `IDEMPOTENCY_*` key is an error. The extension reports all faults together when you set it up.\n"
        "- A fault of the whole application stops it at its start. A fault of one view closes that endpoint: it answers 500 "
        "[`misconfigured`](../problems/misconfigured.md) and never runs unprotected. Other URLs work.\n"
        "- Your log and `flask idempotency doctor` list all faults of views.\n"
        "- In an application without `Idempotency(app)`, a view with `@idempotent` or `@claim_here`, or of a configured "
        "blueprint, answers 500.\n\n"
        "## Policy\n\n" + _tables("keyword", policy, POLICY_TOPICS) + "## Messages\n\n"
        "The keywords of `idempotency.inbox(name, …)`, `Inbox.standalone(…)` and `@idempotent_task(…)`. No setting, "
        "profile or policy of endpoints reaches a [message](../guides/messages.md).\n\n"
        + _table(("keyword", "default", "meaning"), _consumer_rows())
        + "\n"
        + "## Deployment\n\n"
        + _tables("key", deployment, DEPLOYMENT_TOPICS).rstrip("\n")
        + "\n"
    )


def _consumer_rows() -> list[tuple[str, ...]]:
    plain = ConsumerPolicy()
    read = {"keep": " (7 days)", "max_runtime": " (6 hours)", "max_result": " (256 KiB)"}
    defaults = {"in_flight": "`later`", "decide": "none", "resume_within": "`keep`"}
    return [
        (
            f"`{name}`",
            defaults.get(name) or _shown(getattr(plain, name)) + read.get(name, ""),
            field.doc,
        )
        for name, field in CONSUMER.items()
    ]


def _tables(first: str, rows: Mapping[str, tuple[str, ...]], topics: Sequence[tuple[str, str, Sequence[str]]]) -> str:
    placed = [name for _, _, names in topics for name in names]
    if sorted(placed) != sorted(rows):
        raise ValueError(f"each option belongs to one topic; look at {sorted({*placed} ^ {*rows})}")
    return "".join(
        f"### {heading}\n\n{guides}\n\n" + _table((first, "default", "meaning"), [rows[name] for name in names]) + "\n"
        for heading, guides, names in topics
    )


def _default(name: str, plain: Policy) -> str:
    if name == "replayed_header":
        return ", ".join(f"`{header}: {value}`" for header, value in plain.replayed_header)
    if name in ("decide", "form_field"):
        return "none"
    if name in ("remember", "resume_within"):
        return "`keep`"
    if name == "max_request_body":
        return "Flask's `MAX_CONTENT_LENGTH`"
    read = {"keep": " (24 hours)", "max_runtime": " (15 minutes)", "max_body": " (256 KiB)"}
    return _shown(getattr(plain, name)) + read.get(name, "")


def _shown_default(default: object) -> str:
    return str(default) if isinstance(default, str) and (" " in default or default == "none") else _shown(default)


OPERATORS: Mapping[str, str] = {
    "missing-key": "[`required`](../reference/configuration.md#key-and-request) makes the key mandatory.",
    "invalid-key": "[`key_format` and `max_key_length`](../reference/configuration.md#key-and-request) decide what is valid.",
    "unknown-operation": "[The status of a key](../guides/status.md) finds the operation by your URL map.",
    "truncated-body": "[Proxies](../guides/proxies.md) that cut uploads short are the usual cause.",
    "request-too-large": "[`max_request_body`](../reference/configuration.md#key-and-request) sets the limit.",
    "in-flight": "[Let duplicates wait](../guides/waiting.md) for the response instead.",
    "key-reused": "[Choose what is compared](../guides/endpoints.md), or ignore fields that change between attempts.",
    "key-voided": "[`void`](../reference/configuration.md#key-and-request) lets clients void keys. [Free a voided key]"
    "(../operate/records.md) by `flask idempotency release --force`.",
    "void-not-offered": "[`void`](../reference/configuration.md#key-and-request) lets clients void keys.",
    "outcome-unknown": "[Resolve the quarantined key](../operate/quarantine.md).",
    "store-unavailable": "[Handle a store outage](../operate/incidents.md).",
    "memory-lost": "[Acknowledge the loss of data](../how-it-works/data-loss.md).",
    "not-committed": "[Transactional views](../guides/transactional.md) commit rows and response together.",
    "commit-unknown": "[Transactional views](../guides/transactional.md) run without a key too; set `required=True`.",
    "transaction-conflict": "[Transactional views](../guides/transactional.md) release the key after a conflict.",
    "request-paused": "[Handle a store outage](../operate/incidents.md). The log names a step whose result was not rebuilt.",
    "response-not-kept": "[`max_body`](../reference/configuration.md#stored-response) sets the limit for a stored response.",
    "response-erased": "[Erase a tenant's responses](../guides/encryption.md).",
    "key-expired": "[`remember`](../guides/endpoints.md#refuse-a-key-whose-response-has-expired) says how long a key is known.",
    "quota-exceeded": "[Set quotas](../guides/tenants.md), and show what a tenant uses.",
    "replay-forbidden": "Your [`replay_guard`](api/application.md) refused the replay.",
    "principal-required": "[Name the caller](../guides/identity.md).",
    "misconfigured": "[Run the doctor](../operate/doctor.md): it lists all faults of policies.",
    "record-corrupt": "[Resolve the quarantined key](../operate/quarantine.md), and find out what damaged the record.",
}
"""For the operator who reads the page of a problem."""


def problems() -> str:
    """The list of all problems."""
    rows = [(f"[`{row.code}`]({row.code}.md)", _status(row), row.again) for row in PROBLEMS.values()]
    return (
        f"# Problems\n\n{NOTICE}\n"
        "Your client got a refusal with a `code`: its page shows what happened and what to send next.\n"
        "Each is an RFC 9457 problem document. Its `type` is `IDEMPOTENCY_DOCS_URL` followed by the code. "
        "While you set none, `Link` leads to a page that the application serves itself.\n\n"
        "The same request with the same key does not run twice while the service keeps the key (24 hours by default), with "
        "three exceptions: after `commit-unknown`, because it has no key; after `memory-lost`, once an operator accepts the "
        "risk; and after a response with `Idempotency-Status: unprotected`.\n\n"
        + _table(("code", "status", "send it again?"), rows)
        + "\nNo key, record, payload or principal appears in a problem. In debug mode only, `outcome-unknown` names the "
        "record by its id, and `misconfigured` names the fault.\n"
        "The profiles `stripe` and `playbook`, and a `problem_renderer` of yours, give problems another form.\n"
        + "\n```{toctree}\n:hidden:\n\n"
        + "\n".join(PROBLEMS)
        + "\n```\n"
    )


def _status(problem: ProblemType) -> str:
    if problem.status is None:
        return "that of the first response"
    # 500 if the application lacks a setting that names the caller: see `Guard`.
    own = "403 or 500" if problem.code == "principal-required" else str(problem.status)
    others = [
        f"`{profile.name}`: {profile.statuses[problem.code]}"
        for profile in PROFILES.values()
        if problem.code in profile.statuses
    ]
    return f"{own} ({', '.join(others)})" if others else own


def _problem_page(problem: ProblemType) -> str:
    """What happened, and what to do next."""
    operator = OPERATORS[problem.code].replace("(api/", "(../reference/api/")
    return (
        f"# {problem.title}\n\n{NOTICE}\n"
        f"Code `{problem.code}`, status {_status(problem)}.\n\n"
        f"{problem.happened}\n\n## What to do\n\n{problem.remedy}\n\n"
        f"## For operators\n\n{operator}\n"
    )


def signals() -> str:
    """How a receiver gets an event."""
    return (
        f"# Signals\n\n{NOTICE}\n"
        "Connect a receiver to a Blinker signal, to react when a key is claimed, replayed or quarantined.\n\n"
        "```python\nfrom flask_idempotency import signals\n\n\n"
        "def alert(application, event):\n"
        '    print(f"{event.operation}: {event.reason}")\n\n\n'
        "signals.quarantined.connect(alert)\n```\n\n"
        "A receiver gets the application as sender, and the event as `event`. It runs in the thread of the request, or in "
        "the lease thread, so keep it quick. The extension logs what a receiver raises, and goes on.\n"
        "[All events](events.md#the-log) have a signal: that of `claim-granted` is `signals.claim_granted`, with a "
        "`ClaimGranted`. [The API](api/event-classes.md) explains each event and its fields.\n"
    )


def _facts(kind: type[Event]) -> str:
    return _listed(facts_of(kind))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


def events() -> str:
    """Where each event appears: as a signal, in the log, and as a metric; and every metric."""
    rows = [(f"`{name_of(kind)}`", _levels(kind), kind.SENTENCE, _facts(kind), _counted(kind)) for kind in kinds()]
    counted = [
        (f"`{family.exposed}`", _kind(family), _labels(family.labels), family.help) for family in FAMILIES.values()
    ]
    gauges = [(f"`{name}`", _listed(labels), about) for name, (about, labels) in GAUGES.items()]
    return (
        f"# Events, logs and metrics\n\n{NOTICE}\n"
        "Each event, log line and metric by its name.\n\n"
        f"## The log\n\nEach event is a [signal](signals.md), a line on the logger `{LOGGER}`, and a "
        "[metric](../operate/metrics.md), with the same fields.\n"
        "The sentence of an event never varies, so you can count lines by it. Its facts are fields of the log record "
        "(`extra`): `event`, `app` (the namespace), `record` (a short keyed hash), `operation` (the endpoint or the task), and "
        "the fields of the event.\n"
        "No line contains a key, principal or body. A tenant appears only as its pseudonym, after an operator named it.\n\n"
        + _table(("`event`", "level", "sentence", "fields", "metrics"), rows)
        + "\n## The metrics\n\nEach also has the label `app`, the application's namespace.\n\n"
        + _table(("metric", "type", "labels", "what it counts"), counted)
        + "\n## The gauges\n\nThe extension reads them from the store at a scrape, at most once in ten seconds.\n\n"
        + _table(("gauge", "labels", "value"), gauges)
    )


def _levels(kind: type[Event]) -> str:
    return " or ".join(logging.getLevelName(level) for level in kind.LEVELS)


def _counted(kind: type[Event]) -> str:
    counted = COUNTED[kind]
    if isinstance(counted, str):
        return f"none: {counted}"
    return ", ".join(f"`{FAMILIES[counts.family].exposed}`" for counts in counted)


def _kind(family: Family) -> str:
    return "histogram" if family.buckets else "counter"


def _labels(labels: Mapping[str, tuple[str, ...]]) -> str:
    return (
        "; ".join(
            f"`{label}`: {', '.join(values) or 'the name that your code lists'}" for label, values in labels.items()
        )
        or "–"
    )


def states() -> str:
    """Every move that a record can make."""
    name: Mapping[State | None, str] = {None: "absent", **{state: state.name for state in State}}
    rows = [(name[before], verb, name[after], who) for (before, verb), (after, who) in TRANSITIONS.items()]
    return (
        f"# States of a record\n\n{NOTICE}\n"
        "Each key has at most one record, in one of three states. A key is *absent* if it has no record, or if its record has "
        "expired. The store may still hold an expired record for a while.\n\n"
        f"![The states of a record and their transitions, as in the table below.](../_static/diagrams/states.svg)\n\n"
        "These are all transitions. A store refuses every other call, and the record stays as it is.\n\n"
        + _table(("from", "transition", "to", "who may, and when"), rows)
        + "\n*Worker's token*: the store compares the token of the call with the token of the record. A worker whose key was "
        "taken over has an old token, so its calls change nothing.\n"
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
    if scripts:
        told = f"{scripts} scripts, one for each operation, and {libraries} libraries in lib/."
    elif modules := sorted(path.name for path in folder.glob("*.js")):
        told = f"The module for browsers, as it is served: {', '.join(modules)}."
    elif templates := list(folder.glob("*.html")):
        told = f"{len(templates)} templates of pages and their parts."
    else:
        told = _first(folder / "__init__.py")
    yield _described(f"{indent}{folder.name}/", told)
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


@cache
def _walks() -> str:
    """The walks of a fresh process, because loggers and caches of this one could add calls."""
    command = [sys.executable, "-m", "benchmarks.walk", "memory", "redis", "sqlite", "--markdown"]
    return subprocess.run(command, cwd=HERE.parent, check=True, capture_output=True, text=True).stdout


def walks() -> str:
    """Every function that one keyed POST crosses, where Redis is the store."""
    return (
        f"# The walk of a request\n\n{NOTICE}\n"
        "The functions of this package that one keyed POST enters, in call order, in a warm process "
        "([the steps](architecture.md)). `python3 run.py walk` prints the same for the other stores.\n\n" + _walks()
    )


PAGES: Mapping[str, Callable[[], str]] = {
    **{f"problems/{row.code}.md": partial(_problem_page, row) for row in PROBLEMS.values()},
    "problems/index.md": problems,
    "reference/cli.md": lambda: cli(NOTICE),
    "reference/configuration.md": configuration,
    "reference/events.md": events,
    "reference/names.md": lambda: public.page(NOTICE),
    "reference/signals.md": signals,
    "how-it-works/states.md": states,
    "contributing/walk.md": walks,
    # After the pages that it lists.
    "llms.txt": llms.page,
}


def weights() -> str:
    """The most that the package may weigh. It stands still while the code changes below it."""
    most = limits()
    lines = (f"{name:54} {number:6,}\n" for part in ("measures", "walk") for name, number in most[part].items())
    return "".join(["```text\n", *lines, "```\n"])


# The parts that a page written by hand may hold, by name.
PARTS: Mapping[str, Callable[[], str]] = {
    "layers": layers,
    "layout": layout,
    "weight": weights,
}
PART = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end of \1 -->)", re.DOTALL)


def with_parts(page: str) -> str:
    """Return the text of a page with its generated parts as they should be."""
    return PART.sub(lambda part: f"{part[1]}{part[2]}{PARTS[part[1]]()}", page)


def main() -> None:
    """Write every page, diagram and screenshot, and the generated parts of the other pages."""
    diagrams.write()
    screenshots.write()
    for page, render in PAGES.items():
        (HERE / page).parent.mkdir(exist_ok=True)
        (HERE / page).write_text(render(), encoding="utf-8")
    for path in sorted(HERE.rglob("*.md")):
        path.write_text(with_parts(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
