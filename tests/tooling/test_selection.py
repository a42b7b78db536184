"""The tests that a change can reach run, and the others take turns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.selection import SHARES, Tree, select, share_of

FILES = {
    "flask_idempotency/__init__.py": "",
    "flask_idempotency/engine.py": "",
    "flask_idempotency/stores/__init__.py": "",
    "flask_idempotency/stores/redis.py": "import flask_idempotency.engine",
    "flask_idempotency/stores/lua/claim.lua": "",
    "flask_idempotency/cli/__init__.py": 'from importlib import import_module\nimport_module(f"{__name__}.{topic}")',
    "flask_idempotency/cli/stats.py": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "",
    "tests/engine/__init__.py": "",
    "tests/engine/test_engine.py": "import flask_idempotency.engine",
    "tests/cli/__init__.py": "",
    "tests/cli/test_cli.py": "import flask_idempotency.cli",
    "tests/e2e/__init__.py": "",
    "tests/e2e/conftest.py": "import flask_idempotency.cli.stats",
    "tests/e2e/shop.py": "import flask_idempotency.stores.redis",
    "tests/e2e/test_kills.py": 'SHOP = "tests.e2e.shop:app"',
    "tests/docs/__init__.py": "",
    "tests/docs/test_pages.py": 'PAGE = "guide.md"',
}
ALL = {name for name in FILES if "/test_" in name}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    # grimp finds packages as Python does.
    monkeypatch.syspath_prepend(tmp_path)
    names = [name for name in sys.modules if name.partition(".")[0] in ("flask_idempotency", "tests")]
    ours = {name: sys.modules.pop(name) for name in names}
    yield tmp_path
    sys.modules.update(ours)


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("flask_idempotency/engine.py", {"tests/engine/test_engine.py", "tests/e2e/test_kills.py"}),
        ("tests/e2e/shop.py", {"tests/e2e/test_kills.py"}),
        ("tests/docs/test_pages.py", {"tests/docs/test_pages.py"}),
        # As a file of the package around it.
        ("flask_idempotency/stores/lua/claim.lua", {"tests/e2e/test_kills.py"}),
        # By the loader of commands, and by a conftest.
        ("flask_idempotency/cli/stats.py", {"tests/cli/test_cli.py", "tests/e2e/test_kills.py"}),
        # By its name.
        ("docs/guide.md", {"tests/docs/test_pages.py"}),
        ("docs/other.md", set()),
        ("requirements/test.txt", ALL),
        ("tests/conftest.py", ALL),
    ],
)
def test_a_change_reaches_the_tests_that_import_or_name_it(root: Path, changed: str, reached: set[str]) -> None:
    assert Tree(root).reached([changed]) == reached


def test_the_others_take_turns_by_the_commit(root: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    first = git("rev-parse", "HEAD")
    (root / "flask_idempotency" / "engine.py").write_text("changed = True")
    git("commit", "-qam", "second")
    turn = int(git("rev-parse", "HEAD"), 16) % SHARES

    selection = select(root, first)

    reached = {"tests/engine/test_engine.py", "tests/e2e/test_kills.py"}
    assert set(selection.not_in_turn) == {file for file in ALL if share_of(file) != turn}
    assert set(selection.left_out) == set(selection.not_in_turn) - reached
    assert {share_of(f"tests/test_{number}.py") for number in range(100)} == set(range(SHARES))
