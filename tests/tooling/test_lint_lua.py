"""luacheck on the scripts with their includes in place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from flask_idempotency.stores.redis import scripts
from tests import lint_lua
from tests.lab.programs import missing

SCRIPT = "local now = ARGV[1]\n-- @include lib/number\nreturn decimal(now)\n"


@pytest.fixture(name="script")
def script_in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if shutil.which("luacheck") is None:
        missing("luacheck", remedy="Install the Debian package lua-check.")
    folder = tmp_path / "lua"
    shutil.copytree(lint_lua.LUA / "lib", folder / "lib")
    monkeypatch.setattr(lint_lua, "LUA", folder)
    monkeypatch.setattr(scripts, "read", lambda name: (folder / f"{name}.lua").read_text())
    return folder / "clean.lua"


def test_a_function_of_a_library_may_be_unused(script: Path) -> None:
    script.write_text(SCRIPT)

    assert lint_lua.main() == 0


@pytest.mark.parametrize(
    "line",
    (
        "return nwo",
        "now = KEYS[1] x = 1",
        "local unused = now",
        "local decimal = now return decimal",
        "return cjson.null",
    ),
)
def test_a_name_that_is_wrong_fails(script: Path, line: str) -> None:
    script.write_text(SCRIPT.replace("return decimal(now)", f"if now then\n  {line}\nend\nreturn decimal(now)"))

    assert lint_lua.main() == 1


def test_a_library_that_reads_a_local_of_its_includer_fails(script: Path) -> None:
    number = script.parent / "lib" / "number.lua"
    number.write_text(number.read_text().replace("'%.0f', n)", "'%.0f', now)"))
    script.write_text(SCRIPT)

    assert lint_lua.main() == 1


@pytest.mark.parametrize(("ci", "code"), (("", 0), ("1", 1)))
def test_without_luacheck_it_fails_in_ci_alone(
    ci: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setenv("CI", ci)

    assert code == lint_lua.main()
    assert "lua-check" in capsys.readouterr().err
