"""The pages of doctor, metrics and events leave nothing out."""

from __future__ import annotations

import ast
import re

from docs.generate import HERE
from flask_idempotency.engine.events import kinds, name_of
from flask_idempotency.metrics import FAMILIES, GAUGES

PACKAGE = HERE.parent / "flask_idempotency"
ENTRY = re.compile(r"^### `([a-z-]+)`\n\n\S", re.MULTILINE)
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
    page = (HERE / "doctor.md").read_text(encoding="utf-8")
    entries = ENTRY.findall(page)

    assert len(entries) == len(set(entries))
    assert checks() - set(entries) == set()
    assert [] == [entry for entry in entries if f'"{entry}"' not in sources()]


def sources() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))


def test_every_event_and_every_metric_is_in_the_reference() -> None:
    page = (HERE / "events.md").read_text(encoding="utf-8")

    assert [] == [kind.__name__ for kind in kinds() if f"`{name_of(kind)}`" not in page]
    assert [] == [family.exposed for family in FAMILIES.values() if f"`{family.exposed}`" not in page]
    assert [] == [gauge for gauge in GAUGES if f"`{gauge}`" not in page]


def test_a_metric_that_the_guide_names_is_there() -> None:
    """An alert on a name that is mistyped never comes."""
    named = set(EXPOSED.findall((HERE / "metrics.md").read_text(encoding="utf-8")))
    exposed = {family.exposed for family in FAMILIES.values()}
    known = {*exposed, *GAUGES, *(name + suffix for name in exposed for suffix in SUFFIXES)}

    assert len(named) > 8
    assert named - known == set()
