"""Tab in bash, zsh and fish: what is offered, and that nothing is printed or asked of a store."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from flask import Flask

from flask_idempotency import Idempotency
from flask_idempotency.stores.sql.admin import schema_check

ROOT = Path(__file__).resolve().parents[2]
APPLICATION = """
    import sys
    from flask import Flask
    from flask_idempotency import Idempotency

    print("loading")
    print("a complaint", file=sys.stderr)
    app = Flask("shop")
    Idempotency(app, secret="s-9f2c47d1e8b35a60", store="sqlite:///no-such-folder/records.db", effects="deduplicated")
    app.post("/pay", endpoint="pay")(lambda: "paid")
    app.post("/refund", endpoint="refund")(lambda: "refunded")
    app.get("/payments", endpoint="payments")(lambda: "all of them")
"""


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment with an application, `flask` on the path, and this package installed as a plug-in of it."""
    (tmp_path / "shop.py").write_text(dedent(APPLICATION), encoding="utf-8")
    (tmp_path / "broken.py").write_text("raise RuntimeError('it does not start')", encoding="utf-8")
    installed = tmp_path / "flask_idempotency-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flask-idempotency\nVersion: 0\n", encoding="utf-8"
    )
    (installed / "entry_points.txt").write_text("[flask.commands]\nidempotency = flask_idempotency.cli:cli\n", "utf-8")
    flask = tmp_path / "bin" / "flask"
    flask.parent.mkdir()
    flask.write_text(f"#!{sys.executable}\nfrom flask.cli import main\nmain()\n", encoding="utf-8")
    flask.chmod(0o755)
    return {
        "PATH": f"{flask.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "FLASK_APP": "shop",
        "HOME": str(tmp_path),
    }


def run(shell: dict[str, str], *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**shell, **variables}, cwd=shell["HOME"], capture_output=True, text=True, timeout=60
    )


def bash(shell: dict[str, str], *words: str, **variables: str) -> list[str]:
    """Press Tab behind these words in a real bash, and return what it offers."""
    typed = " ".join(f"'{word}'" for word in words)
    script = (
        '. <(_FLASK_COMPLETE=bash_source flask); [[ "$(complete -p flask)" == *_flask_completion* ]] || exit 9; '
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _flask_completion flask; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = run(shell, "bash", "--noprofile", "--norc", "-c", script, **variables)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
class TestBash:
    def test_it_completes_commands_of_the_group(self, shell: dict[str, str]) -> None:
        assert ["reap", "reconcile", "redis", "relay", "release", "report", "resolve"] == sorted(
            bash(shell, "flask", "idempotency", "re")
        )

    def test_it_completes_commands_of_a_subgroup(self, shell: dict[str, str]) -> None:
        assert ["upgrade"] == bash(shell, "flask", "idempotency", "db", "up")

    def test_it_completes_options_and_states(self, shell: dict[str, str]) -> None:
        assert "--older-than" in bash(shell, "flask", "idempotency", "list", "--ol")
        assert ["quarantined"] == bash(shell, "flask", "idempotency", "list", "--state", "qu")

    @pytest.mark.parametrize("words", (("list", "--endpoint"), ("show", "--endpoint"), ("policy",)), ids=" ".join)
    def test_it_completes_endpoints_in_scope(self, shell: dict[str, str], words: tuple[str, ...]) -> None:
        """Not those that are only read. What the application prints while it loads goes nowhere."""
        assert ["pay", "refund"] == sorted(bash(shell, "flask", "idempotency", *words, ""))

    @pytest.mark.parametrize("app", ("broken", "missing"))
    def test_without_an_application_no_endpoint_is_offered_and_nothing_is_printed(
        self, shell: dict[str, str], app: str
    ) -> None:
        assert [] == bash(shell, "flask", "idempotency", "policy", "", FLASK_APP=app)
        assert ["doctor"] == bash(shell, "flask", "idempotency", "doc", FLASK_APP=app)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "registers", "syntax"),
    (("zsh", "compdef _flask_completion flask", "-n"), ("fish", "complete --no-files --command flask", "--no-execute")),
)
def test_the_script_of_another_shell_registers_itself(
    shell: dict[str, str], name: str, registers: str, syntax: str, tmp_path: Path
) -> None:
    """Where that shell is installed, it also reads the script without a complaint."""
    done = run(shell, "flask", _FLASK_COMPLETE=f"{name}_source")

    assert (0, "", True) == (done.returncode, done.stderr, registers in done.stdout)
    if shutil.which(name) is not None:
        (tmp_path / "script").write_text(done.stdout, encoding="utf-8")
        assert (0, "") == ((read := run(shell, name, syntax, "script")).returncode, read.stderr)


@pytest.mark.slow
def test_the_protocol_of_another_shell_gets_endpoints(shell: dict[str, str]) -> None:
    typed = {"COMP_WORDS": "flask idempotency policy p", "COMP_CWORD": "p"}
    done = run(shell, "flask", _FLASK_COMPLETE="fish_complete", **typed)

    assert (0, "") == (done.returncode, done.stderr)
    assert "pay" in done.stdout.replace(",", "\n").split()
    assert "refund" not in done.stdout


@pytest.mark.parametrize("completing", (True, False))
def test_an_application_that_loads_for_a_completion_leaves_its_store_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, completing: bool
) -> None:
    """At every other start it looks at its tables, and warns of a weak secret."""
    looked: list[bool] = []

    def faults(self: object) -> list[str]:
        looked.append(True)
        return []

    monkeypatch.setattr(schema_check.SqlSchema, "faults", faults)
    monkeypatch.setattr(schema_check.SqlSchema, "advice", faults)
    if completing:
        monkeypatch.setenv("_FLASK_COMPLETE", "bash_complete")

    app = Flask("shop")
    app.secret_key = "s-9f2c47d1e8b35a60c1d47be2a5583f09"
    Idempotency(app, store=f"sqlite:///{tmp_path / 'records.db'}", effects="deduplicated")

    assert completing is (looked == [])
    assert completing is (caplog.records == [])
