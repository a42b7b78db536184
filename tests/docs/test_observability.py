"""The pages of doctor, metrics and events leave nothing out."""

from __future__ import annotations

import ast
import re

from docs.generate import HERE
from flask_idempotency.engine.events import kinds, name_of
from flask_idempotency.engine.model import State
from flask_idempotency.metrics import FAMILIES, GAUGES

PACKAGE = HERE.parent / "flask_idempotency"
ENTRY = re.compile(r"^\| `([a-z-]+)` \| [^|\n]*\w[^|\n]* \| [^|\n]*\w[^|\n]* \|$", re.MULTILINE)
"""A row with three filled cells: the check, what it looks at, and what to do."""
EXPOSED = re.compile(r"idempotency_[a-z_]+")
SUFFIXES = ("_bucket", "_count", "_sum")


def checks() -> set[str]:
    """The name of every finding and check that is made anywhere, where it is written out."""
    return {
        str(node.args[0].value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("Finding", "check", "cannot")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }


def test_every_check_has_its_entry() -> None:
    """What it looks at, what it means, what to do; and no entry is of a check that has gone."""
    page = (HERE / "operate" / "doctor.md").read_text(encoding="utf-8")
    entries = ENTRY.findall(page)
    sources = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))

    assert len(entries) == len(set(entries))
    assert checks() - set(entries) == set()
    assert [] == [entry for entry in entries if f'"{entry}"' not in sources]


def test_every_event_and_every_metric_is_in_the_reference() -> None:
    page = (HERE / "reference" / "events.md").read_text(encoding="utf-8")

    assert [] == [kind.__name__ for kind in kinds() if f"`{name_of(kind)}`" not in page]
    assert [] == [family.exposed for family in FAMILIES.values() if f"`{family.exposed}`" not in page]
    assert [] == [gauge for gauge in GAUGES if f"`{gauge}`" not in page]


def test_a_metric_that_the_guide_names_is_there() -> None:
    """An alert on a name that is mistyped never comes."""
    named = set(EXPOSED.findall((HERE / "operate" / "metrics.md").read_text(encoding="utf-8")))
    exposed = {family.exposed for family in FAMILIES.values()}
    known = {*exposed, *GAUGES, *(name + suffix for name in exposed for suffix in SUFFIXES)}

    assert len(named) > 8
    assert named - known == set()


SELECTED = re.compile(r"(idempotency_[a-z_]+)\{([a-z]+)=\"([^\"]+)\"\}")


def test_a_label_that_the_guide_selects_has_that_value() -> None:
    """An alert on a value that no code sets never comes either."""
    page = (HERE / "operate" / "metrics.md").read_text(encoding="utf-8")
    labels = {family.exposed: family.labels for family in FAMILIES.values()}
    labels |= {gauge: dict.fromkeys(names, ()) for gauge, (_, names) in GAUGES.items()}
    selected = [
        (re.sub(r"_(bucket|count|sum)$", "", name), label, value) for name, label, value in SELECTED.findall(page)
    ]

    assert len(selected) > 5
    assert [] == [(name, label) for name, label, _ in selected if label not in labels[name]]
    assert [] == [
        (name, value)
        for name, label, value in selected
        if value not in (labels[name][label] or (*(state.value for state in State), "waiting", "dead"))
    ]
