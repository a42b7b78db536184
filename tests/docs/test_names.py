"""Every name that the documentation mentions is there: commands and their options, settings, keywords, problems, Python."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import click

import flask_idempotency
import janitor
from docs.commands import subcommands
from docs.generate import PART
from flask_idempotency import Idempotency, UnknownOutcome, current_claim, otel
from flask_idempotency.cli import cli as group
from flask_idempotency.logs import LOGGER
from flask_idempotency.maintenance.janitor import Task
from flask_idempotency.metrics import FAMILIES, GAUGES
from flask_idempotency.settings.options import DEPLOYMENT, POLICY
from flask_idempotency.settings.profiles import PROFILES
from flask_idempotency.signals import SIGNALS
from flask_idempotency.web.problem_types import PROBLEMS
from tests.docs.test_pages import BLOCK, MARKDOWN, ROOT

PAGES = [*MARKDOWN, ROOT / "CHANGELOG.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"\bflask(?: --app \S+)? idempotency(?: +(.+))?")
ENDS = re.compile(r"\s(?:#|[|>&;]|→).*|[…)`].*")
SETTING = re.compile(r"\bIDEMPOTENCY_[A-Z][A-Z_]*[A-Z]\b(?!_?[*<…])")
PROBLEM = re.compile(r"\b[45]\d\d(?: problem)? \[?`([a-z]+(?:[-_][a-z]+)*)`")
KEYWORD = re.compile(r"^@?(?:idempotent|configure|Idempotency)\((.*)\)$")
DOTTED = re.compile(r"(?<![\w/-])(?:flask_idempotency|current_claim|idempotency|unknown)(?:\.[A-Za-z_]+)+")
SIGNAL = re.compile(r"signals? `([a-z_]+)`")

SETTINGS = {f"IDEMPOTENCY_{name.upper()}" for name in DEPLOYMENT}
OF_TESTS = {"IDEMPOTENCY_TEST_POINTS"}
"""Read by `flask_idempotency.testing` from the environment."""

KEYWORDS = {*POLICY}
OF_THE_EXTENSION = {*DEPLOYMENT, *inspect.signature(Idempotency.__init__).parameters}


def spans(page: Path) -> Iterator[str]:
    """What stands as code in the text of a page, and each line of its blocks of commands."""
    text = PART.sub("", page.read_text(encoding="utf-8"))  # the code itself, by its own words
    for language, block in FENCE.findall(text):
        if language != "python":
            yield from (line.removeprefix("$ ") for line in block.splitlines())
    yield from INLINE.findall(FENCE.sub("", text))


def commands() -> Iterator[tuple[str, str]]:
    """Yield the name of a page, and the words after `flask idempotency` of a command that it shows."""
    for page in PAGES:
        for span in spans(page):
            first, options, _ = span.partition(" --")
            found = COMMAND.search(span)
            if (found and found[1] and found[1][0] not in "…`") or (options and first.split()[0] in subcommands(group)):
                words = ENDS.sub("", ((found[1] or "") if found else span).replace('"…"', "something"))
                yield str(page.relative_to(ROOT)), words


def unknown_words(words: str) -> Iterator[str]:
    """Yield the words that are no command or option, and values that their option does not take."""
    command: click.Command = group
    rest = shlex.split(words)
    while isinstance(command, click.Group):
        if not rest or rest[0] not in subcommands(command):
            yield rest[0] if rest else "no command after a group"
            return
        command = subcommands(command)[rest.pop(0)]
    known = {name: option for option in command.params for name in option.opts}
    for word, value in zip_longest(rest, rest[1:], fillvalue=""):
        if word.startswith("--") and word not in known:
            yield word
        elif word.startswith("--") and isinstance(kind := known[word].type, click.Choice) and value.islower():
            yield from {value} - {*kind.choices}


def test_a_command_that_a_page_names_is_there() -> None:
    """With the options that it is shown with, and values that they take."""
    shown = list(commands())

    assert len(shown) > 200
    assert [f"{page}: {words}: {word}" for page, words in shown for word in unknown_words(words)] == []


def test_a_command_that_is_mistyped_is_found() -> None:
    mistyped = ("purgee --tenant a", "db", "purge --tennant a", "show --key k --format yml", "list --state loud")
    assert [list(unknown_words(words)) for words in mistyped] == [
        ["purgee"],
        ["no command after a group"],
        ["--tennant"],
        ["--format"],
        ["loud"],
    ]


def mentioned(pattern: re.Pattern[str]) -> Mapping[str, set[str]]:
    """Where each match of this pattern stands."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        for name in pattern.findall(PART.sub("", page.read_text(encoding="utf-8"))):
            found.setdefault(name, set()).add(page.name)
    return found


def test_a_setting_that_a_page_names_is_there() -> None:
    found = mentioned(SETTING)

    assert len(found) > 30
    assert {name: pages for name, pages in found.items() if name not in SETTINGS | OF_TESTS} == {}


def test_a_problem_that_a_page_names_is_there() -> None:
    codes = {
        code for row in PROBLEMS.values() for code in (row.code, row.stripe_type, row.stripe_code, row.playbook_code)
    }
    found = mentioned(PROBLEM)

    assert len(found) > 10
    assert {name: pages for name, pages in found.items() if name not in codes} == {}


def test_a_signal_that_a_page_names_is_there() -> None:
    names = {signal.name.removeprefix("idempotency-").replace("-", "_") for signal in SIGNALS.values()}
    found = mentioned(SIGNAL)

    assert len(found) > 2
    assert {name: pages for name, pages in found.items() if name not in names} == {}


def called(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each keyword with the name of what it is given to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield from ((name, keyword.arg) for keyword in node.keywords if keyword.arg)


def test_a_keyword_that_a_page_gives_to_a_policy_is_there() -> None:
    """In blocks, and in code that stands in the text: `@idempotent(required=True)`, `on_error="release"`."""
    taken = {"idempotent": KEYWORDS, "configure": KEYWORDS, "Idempotency": KEYWORDS | OF_THE_EXTENSION}
    found: set[tuple[str, str]] = set()
    for page in PAGES:
        text = PART.sub("", page.read_text(encoding="utf-8"))
        for block in BLOCK.findall(text):
            found.update(called(ast.parse(block)))
        for span in INLINE.findall(FENCE.sub("", text)):
            if KEYWORD.match(span) and "…" not in span:
                found.update(called(ast.parse(span.removeprefix("@"))))

    asked = {(name, keyword) for name, keyword in found if name in taken}
    assert len(asked) > 10
    assert {(name, keyword) for name, keyword in asked if keyword not in taken[name]} == set()


def test_what_a_page_names_in_python_is_there() -> None:
    """Or is the name of a logger, of a task of Celery's, or of an attribute or metric of OpenTelemetry."""
    others = {LOGGER, *(f"flask_idempotency.{task}" for task in get_args(Task))}
    others |= {otel.OUTCOME, otel.ATTEMPT, otel.FENCE, otel.ENDING, otel.MET_AS}
    others |= {f"idempotency.{name.removesuffix('_bytes').removesuffix('_seconds')}" for name in FAMILIES}
    others |= {name.replace("_", ".", 1) for name in GAUGES}
    roots = {"flask_idempotency": flask_idempotency, "current_claim": type(current_claim), "idempotency": Idempotency}
    missing = {}
    for name, pages in mentioned(DOTTED).items():
        root, *rest = name.split(".")
        if root == "unknown":
            if not (rest[0] in UnknownOutcome.__dataclass_fields__ or there(UnknownOutcome, root, rest)):
                missing[name] = pages
        elif rest[0] == "janitor":
            # Installed under this name. In a checkout it is a folder of its own.
            if not there(janitor, "janitor", rest[1:]):
                missing[name] = pages
        elif name not in others and not there(roots[root], root, rest):
            missing[name] = pages

    assert missing == {}


def there(found: Any, path: str, rest: list[str]) -> bool:
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
        else:
            found = getattr(found, part)
    return True


def test_the_profiles_that_pages_name_are_there() -> None:
    named = mentioned(re.compile(r"`?profile=\\?\"([a-z-]+)"))

    assert named
    assert named.keys() <= PROFILES.keys()


def test_an_extra_that_a_page_names_is_there() -> None:
    extras = set(re.findall(r'^    "(\w+)": \[', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)) | {
        "all"
    }
    named = {extra for found in mentioned(re.compile(r"flask-idempotency\[([\w,]+)\]")) for extra in found.split(",")}

    assert {"sql", "redis", "postgresql"} <= named
    assert named - extras == set()
