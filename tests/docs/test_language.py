"""What a person reads keeps to the language guide: no word of a short list that only makes a sentence harder.

Each has a plain replacement that names the actor: client, request, worker, view, engine, store, janitor, operator, or you.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

import click

from docs.commands import subcommands
from flask_idempotency.cli import cli
from flask_idempotency.engine.events import kinds
from flask_idempotency.settings.consumers import CONSUMER
from flask_idempotency.settings.options import DEPLOYMENT, POLICY
from flask_idempotency.web.problem_types import PROBLEMS
from tests.docs.test_pages import MARKDOWN, ROOT

# Only words that are wrong wherever they stand.
AVOIDED = re.compile(
    r"\b(?:nobody|who(?:so)?ever|whomever|somebody|anybody|anew|afresh|meanwhile|once more|besides|chores?|"
    r"(?:is|are|was|were|be|been|being) told|those who|looks? after|hears? of|heard of)\b",
    re.IGNORECASE,
)
CODE = re.compile(r"^( *)(```|~~~).*?^\1\2|<!--.*?-->|`[^`\n]*`", re.MULTILINE | re.DOTALL)

PAGES = sorted({*MARKDOWN, ROOT / "CHANGELOG.md"})


def blanked(text: str) -> str:
    """Return the text without its code, and with all its lines."""
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def faults(name: str, text: str) -> list[str]:
    return [
        f"{name}:{number}: {found[0]}"
        for number, line in enumerate(blanked(text).splitlines(), start=1)
        for found in AVOIDED.finditer(line)
    ]


def test_each_page_keeps_to_the_guide() -> None:
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    assert list(chain.from_iterable(faults(name, text) for name, text in texts.items())) == []


def test_an_entry_of_the_changelog_is_one_line_and_short() -> None:
    """A merge that takes both sides brings entries back that were rewritten."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = [re.sub(r"\]\([^)]*\)", "]", line) for line in text.splitlines() if line.startswith("- ")]

    assert len(entries) > 60
    assert [line for line in entries if len(line.split()) > 36] == []
    assert len(set(entries)) == len(entries)


def commands(group: click.Group, path: str) -> Iterator[tuple[str, str]]:
    for name, command in subcommands(group).items():
        yield f"{path} {name}", command.help or ""
        for option in command.params:
            yield f"{path} {name} {option.name}", getattr(option, "help", None) or ""
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


def texts() -> Iterator[tuple[str, str]]:
    """Yield each text that no page holds, or that a page is generated from."""
    yield from commands(cli, "flask idempotency")
    for row in PROBLEMS.values():
        yield f"problem {row.code}", "\n".join((row.title, row.detail, row.happened, row.remedy, row.again))
    for options in (POLICY, DEPLOYMENT, CONSUMER):
        for name, option in options.items():
            yield f"option {name}", option.doc
    for kind in kinds():
        yield f"event {kind.__name__}", f"{kind.SENTENCE}\n{kind.__doc__}"


def test_the_texts_of_commands_problems_options_and_events_keep_to_the_guide() -> None:
    assert list(chain.from_iterable(faults(name, text) for name, text in texts())) == []


def test_code_is_no_text_and_keeps_its_lines() -> None:
    page = "# A\n\n```python\nnobody = 1\n```\n\nIt is `nobody`.\nThen nobody came.\n"

    assert faults("page", page) == ["page:8: nobody"]
