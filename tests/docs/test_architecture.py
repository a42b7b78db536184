"""docs/contributing/architecture.md names only files that exist. Its generated parts are held by test_pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import PACKAGE, PARTS, layers, layout, protocol
from flask_idempotency.engine.store import Store

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(
    set(re.findall(r"`((?:flask_idempotency|janitor|tests|docs|engine|web|cli|operations|maintenance)/[\w./]*)`", PAGE))
)


@pytest.mark.parametrize("name", NAMED)
def test_a_named_file_exists(name: str) -> None:
    assert (ROOT / name).exists() or (PACKAGE / name).exists()


def test_the_page_holds_every_part() -> None:
    assert set(PARTS) == set(re.findall(r"<!-- generated: (\w+) -->", PAGE))


def test_the_layout_names_every_module() -> None:
    text = layout()
    modules = [path for top in (PACKAGE, ROOT / "janitor") for path in top.rglob("*.py") if path.name != "__init__.py"]

    assert len(modules) > 100
    assert [path.name for path in modules if path.name not in text] == []


def test_every_module_says_what_it_is_for() -> None:
    """The page shows the first sentence of each module's docstring."""
    assert [line for line in layout().splitlines()[1:-1] if len(line.split()) < 4] == []


def test_every_layer_and_method_is_shown() -> None:
    assert all(
        f"`{path.stem}`" in layers() for path in PACKAGE.iterdir() if path.suffix == ".py" and path.stem != "__init__"
    )
    assert all(f"`{name}(" in protocol() for name in vars(Store) if not name.startswith("_"))
