"""The API pages show every public name once, and no other; each one has a docstring."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.generate import HERE, PAGES
from docs.public import AT_MOST, MODULES, module, names
from flask_idempotency import current_claim, current_step
from flask_idempotency.codec.keyring import KeyProvider
from flask_idempotency.engine.store import Store

API = HERE / "reference" / "api"
DIRECTIVE = re.compile(
    r"^\.\. (?:auto(?:class|function|exception|data)|py:data):: (\S+?)(?:\(\))?$((?:\n   .*)*)", re.MULTILINE
)
PROMISED = Path(__file__).with_name("public_names.txt")
IMPORTED = re.compile(r"^\s*from (flask_idempotency[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def public() -> dict[int, tuple[str, Any]]:
    """Return every public object by its identity, because two modules may export one object.

    `current_claim` and `current_step` are shown as the classes of these instances.
    """
    found: dict[int, tuple[str, Any]] = {}
    for name, exported in names():
        each = getattr(module(name), exported)
        each = type(each) if each is current_claim or each is current_step else each
        found.setdefault(id(each), (f"{name}.{exported}", each))
    return found


def test_no_public_name_comes_or_goes_unnoticed() -> None:
    """public_names.txt is written by hand: a new name is a promise for years, and one that goes breaks applications.

    Add a name there with its line in CHANGELOG.md. Take one out only as the page of public names says.
    """
    promised = PROMISED.read_text(encoding="utf-8").split()

    assert [f"{where}.{name}" for where, name in names()] == promised
    assert len(promised) <= AT_MOST
    assert [name for name in promised if name.rpartition(".")[2].startswith("_")] == []


def test_every_promised_name_can_be_imported_as_written() -> None:
    assert [f"{where}.{name}" for where, name in names() if not hasattr(module(where), name)] == []


def test_the_page_of_public_names_has_each_one() -> None:
    page = PAGES["reference/names.md"]()

    sections = {each: page.partition(f"\n## `{each}`\n")[2].partition("\n## ")[0] for each in MODULES}
    assert [f"{where}.{name}" for where, name in names() if f"`{name}`" not in sections[where]] == []


def shown() -> Iterator[tuple[str, Any]]:
    for page in API.glob("*.md"):
        for path, options in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            where, _, name = path.rpartition(".")
            named = re.search(r":module: (\S+)", options)
            yield path, getattr(module(named[1] if named else where), name)


def test_every_public_name_is_shown_once_and_no_other() -> None:
    names = public()
    times = Counter(id(each) for _, each in shown())

    assert len(names) > 100
    assert [path for path, each in shown() if id(each) not in names] == []
    assert [name for key, (name, _) in names.items() if times[key] != 1] == []


def test_a_page_imports_only_public_names() -> None:
    missing = [
        f"{page.relative_to(HERE)}: {where}.{name}"
        for page in HERE.rglob("*.md")
        for where, names in IMPORTED.findall(page.read_text(encoding="utf-8"))
        for name in names.split(", ")
        if f"{where}.{name}" not in MODULES and (where not in MODULES or name not in module(where).__all__)
    ]

    assert missing == []


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that this class defines, and that no protocol describes."""
    described = {*vars(Store), *vars(KeyProvider), "void"} if kind not in (Store, KeyProvider) else set()
    for name, member in vars(kind).items():
        if not name.startswith("_") and name not in described:
            plain = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            if inspect.isfunction(plain) or isinstance(plain, property):
                yield name, getattr(kind, name)


def test_a_public_class_function_method_or_property_has_a_docstring() -> None:
    missing = []
    for name, each in public().values():
        if (inspect.isclass(each) or inspect.isfunction(each)) and not each.__doc__:
            missing.append(name)
        # A dataclass without a docstring gets its signature as one.
        if inspect.isclass(each) and (each.__doc__ or "").startswith(f"{each.__name__}("):
            missing.append(name)
        if inspect.isclass(each) and "testing.contract" not in name and not issubclass(each, tuple):
            missing += [f"{name}.{member}" for member, plain in members(each) if not inspect.getdoc(plain)]

    assert missing == []
