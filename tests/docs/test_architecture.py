"""docs/contributing/architecture.md names only files that exist. Its generated parts are held by test_pages."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generate import PACKAGE, PART, PARTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
PARTS_SHOWN = {found[1]: found[0] for found in PART.finditer(PAGE)}


def test_each_named_file_exists() -> None:
    named = re.findall(
        r"`((?:flask_idempotency|janitor|tests|docs|engine|web|cli|operations|maintenance)/[\w./]*)`", PAGE
    )

    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists()] == []


def test_the_page_holds_every_part() -> None:
    assert set(PARTS) == set(PARTS_SHOWN)


def test_the_layout_names_every_module_and_what_it_is_for() -> None:
    """The page shows the first sentence of each module's docstring."""
    lines = PARTS_SHOWN["layout"].splitlines()[2:-1]
    modules = {path.name for top in (PACKAGE, ROOT / "janitor") for path in top.rglob("*.py")} - {"__init__.py"}

    assert len(lines) > len(modules) > 100
    assert modules - {line.split()[0] for line in lines} == set()
    assert [line for line in lines if len(line.split()) < 4] == []


def test_every_layer_is_shown() -> None:
    modules = [path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" and path.stem != "__init__"]

    assert [name for name in modules if f"`{name}`" not in PARTS_SHOWN["layers"]] == []
