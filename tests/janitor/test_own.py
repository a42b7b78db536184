"""The ready-made Celery application: `celery -A flask_idempotency.janitor`, and in a checkout `celery -A janitor`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import current_app
from flask import Flask

from flask_idempotency.engine.errors import ConfigurationError
from janitor.app import find_flask_app, make_celery
from tests.janitor.apps import a_flask, ours

ROOT = Path(__file__).resolve().parents[2]

# Three ways to write an application, each of which `flask` finds.
MODULE = """
from flask import Flask
from flask_idempotency import Idempotency
app = Flask("a-module")
app.config.update(IDEMPOTENCY_SECRET="s-9f2c47d1e8b35a60", IDEMPOTENCY_STORE="memory://", IDEMPOTENCY_BROKER_URL="redis://nowhere/0")
Idempotency(app)
"""
FACTORY = "def create_app():" + MODULE.replace("a-module", "a-factory").replace("\n", "\n    ") + "return app\n"


@pytest.mark.parametrize(
    ("file", "text", "flask_app", "found"),
    (
        ("wsgi.py", MODULE, None, "a-module"),
        ("app.py", FACTORY, None, "a-factory"),
        ("elsewhere.py", MODULE, "elsewhere", "a-module"),
        ("elsewhere.py", FACTORY, "elsewhere:create_app()", "a-factory"),
    ),
)
def test_it_finds_the_application_that_flask_finds(
    file: str, text: str, flask_app: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).write_text(text)
    in_folder(tmp_path, monkeypatch)
    if flask_app is not None:
        monkeypatch.setenv("FLASK_APP", flask_app)

    assert found == find_flask_app().name


def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in the application's folder, which is on the path as `celery` puts it there."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("FLASK_APP", raising=False)
    for name in ("wsgi", "app", "elsewhere", "janitor.celery"):
        # Both, so that the end of the test removes what it has imported.
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)


NO_BROKER = MODULE.replace('IDEMPOTENCY_BROKER_URL="redis://nowhere/0"', "")


@pytest.mark.parametrize(
    ("text", "says"),
    (
        (NO_BROKER, "Set IDEMPOTENCY_BROKER_URL"),
        ("from flask import Flask\napp = Flask('bare')\n", "Check that FLASK_APP names the right one."),
        (None, "Could not locate a Flask application."),
    ),
    ids=("no broker", "no extension", "no application"),
)
def test_a_worker_that_cannot_start_ends_with_the_remedy(
    text: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "app.py").write_text(text)
    in_folder(tmp_path, monkeypatch)

    with pytest.raises(SystemExit, match=r"The janitor cannot start\. ") as ended:
        import_module("janitor.celery")

    assert says in str(ended.value)


def test_an_env_file_is_read_as_flask_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr("janitor.app.load_dotenv", lambda: read.append("env"))
    monkeypatch.setenv("FLASK_APP", "tests.janitor.apps:a_flask")
    monkeypatch.delenv("FLASK_SKIP_DOTENV", raising=False)
    assert "shop" == find_flask_app().name
    monkeypatch.setenv("FLASK_SKIP_DOTENV", "1")
    assert "shop" == find_flask_app().name

    assert ["env"] == read


def test_it_is_set_up_for_nothing_but_tasks() -> None:
    celery_app = make_celery(a_flask(broker_url="redis://nowhere/0"))
    conf: Any = celery_app.conf

    assert ("redis://nowhere/0", "idempotency", "UTC", True) == (
        conf.broker_url,
        conf.task_default_queue,
        conf.timezone,
        conf.enable_utc,
    )
    assert (True, 1, True) == (
        conf.task_ignore_result,
        conf.worker_prefetch_multiplier,
        conf.broker_connection_retry_on_startup,
    )
    assert {"visibility_timeout": 7200} == conf.broker_transport_options
    assert ours(celery_app) == set(conf.beat_schedule)


def test_it_is_nobody_elses_current_application() -> None:
    """A shared task of the Flask application's own must not end up in our queue."""
    celery_app = make_celery(a_flask(broker_url="redis://nowhere/0"))

    assert celery_app.main != current_app.main


def test_an_application_without_the_extension_is_told_apart() -> None:
    with pytest.raises(ConfigurationError, match="FLASK_APP names the right one"):
        make_celery(Flask("another"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ("janitor", "flask_idempotency.janitor"))
def test_celery_finds_it_by_the_packages_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "wsgi.py").write_text(MODULE)
    path = str(ROOT)
    if name != "janitor":
        path = str(tmp_path / "installed")
        installed = tmp_path / "installed" / "flask_idempotency"
        installed.mkdir(parents=True)
        for part in (ROOT / "flask_idempotency").iterdir():
            (installed / part.name).symlink_to(part)
        (installed / "janitor").symlink_to(ROOT / "janitor")
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("FLASK_APP", None)
    command = [sys.executable, "-m", "celery", "-A", name, "report"]

    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    (tmp_path / "wsgi.py").write_text(NO_BROKER)
    lost = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert "flask_idempotency.reap" in found.stdout, found.stdout + found.stderr
    assert (1, "") == (lost.returncode, lost.stdout)
    assert "\nThe janitor cannot start. " in lost.stderr
    assert "Set IDEMPOTENCY_BROKER_URL to a Redis" in lost.stderr
    assert "Traceback" not in lost.stderr
