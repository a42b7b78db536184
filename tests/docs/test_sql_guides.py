"""What the guides on SQL, providers and deployment say in numbers is what the code has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from sqlalchemy import select

from flask_idempotency import Idempotency, current_claim, idempotent
from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.policy import Policy
from flask_idempotency.operations.doctor import LEAST_LEASE_SECONDS
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.redis.replay_cache import FIRST_PAUSE_SECONDS, LARGEST_BYTES, LAST_PAUSE_SECONDS
from flask_idempotency.stores.sql.claiming import STRATEGIES
from flask_idempotency.stores.sql.database import TRIES
from flask_idempotency.stores.sql.dialects import LOCK_TIMEOUT_MS
from flask_idempotency.stores.sql.engines import BUSY_MS, CONNECT_SECONDS, READ_TIMEOUT_SECONDS
from flask_idempotency.stores.sql.migrations.runner import LOCK_MS
from flask_idempotency.stores.sql.quota import MARGIN
from flask_idempotency.stores.sql.statements import RELEASED_KEEP
from flask_idempotency.web.doctor import run_checks
from tests.docs.test_claims import page
from tests.docs.test_pages import BLOCK
from tests.stores.sql.conftest import lent_url

database_url = pytest.fixture(name="database_url")(lent_url)


def test_limits_of_the_sql_store() -> None:
    text = page("sql")

    assert {int(number) for number in re.findall(r"^\| .+ \| (\d) seconds \|$", text, re.MULTILINE)} == {2, 3, 5}
    assert (3, 5.0) == (CONNECT_SECONDS, READ_TIMEOUT_SECONDS)
    assert (2000, 5000, 2000) == (LOCK_TIMEOUT_MS, BUSY_MS, LOCK_MS)
    assert "it gives up after two seconds" in text
    assert (5, "up to five times" in text) == (TRIES, True)
    assert (86_400_000_000, "a released one for a day" in text) == (RELEASED_KEEP, True)
    assert 3 == text.count(str(MARGIN))
    assert set(re.findall(r"^\| `(\w+)`[^|]*\| PostgreSQL", text, re.MULTILINE)) == set(STRATEGIES)


def test_limits_of_the_cache() -> None:
    text = page("tiered")

    assert (1 << 20, "above 1 MiB" in text) == (LARGEST_BYTES, True)
    assert (1.0, 30.0) == (FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS)
    assert "for one second, then for up to half a minute" in text


def test_a_downstream_key_has_the_length_that_the_page_says() -> None:
    """Providers limit it."""
    app = Flask("shop")
    app.config["TESTING"] = True
    Idempotency(app, secret="s-9f2c47d1e8b35a60", store=MemoryStore())

    @app.post("/pay")
    @idempotent(required=True, effects="deduplicated")
    def pay() -> str:
        return current_claim.downstream_key("charge")

    answer = app.test_client().post("/pay", headers={"Idempotency-Key": "k"})

    assert f"has {len(answer.text)} characters" in page("external-effects")


@pytest.mark.parametrize("effects", ("plain", "marked"))
def test_doctor_has_no_fault_with_the_timeouts_of_the_deploy_page(effects: str) -> None:
    text, plain = page("deploy"), Policy()
    app = Flask("shop")
    (block,) = BLOCK.findall(text)
    exec(block, {"app": app})  # noqa: S102 - our own page
    Idempotency(app, secret="s-9f2c47d1e8b35a60", store=MemoryStore(), effects=effects, in_flight="wait")
    app.post("/pay", endpoint="pay")(lambda: "paid")

    with app.app_context():
        found = {each.check: each.verdict for each in run_checks(app, environ={}).findings}

    assert {found[name] for name in ("worker-timeout", "proxy-timeout", "lease")} == {Verdict.FINE}
    assert (900, 30, 6) == (plain.max_runtime, plain.lease, LEAST_LEASE_SECONDS)
    assert "`max_runtime` (15 minutes)" in text
    assert "| `lease` (30 seconds) | at least 6 seconds" in text


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ("sqlite", "postgresql"), indirect=True)
def test_the_recipes_for_tests_that_roll_back_pass(database_url: str, tmp_path: Path) -> None:
    """The one for pytest and the one for unittest of `testing.md`, with both of the tests that each contains."""
    recipes = [each for each in BLOCK.findall(page("testing")) if "TEST_DATABASE_URL" in each]
    assert ["import pytest\n" in each for each in recipes] == ["import unittest\n" not in each for each in recipes]
    for number, recipe in enumerate(recipes):
        (tmp_path / f"test_recipe_{number}.py").write_text(recipe, encoding="utf-8")

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "."],
        cwd=tmp_path,
        # The plugins of this environment take two seconds to load.
        env={**os.environ, "TEST_DATABASE_URL": database_url, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_the_recipe_for_the_other_extension_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application of the page, and its test, which leaves nothing behind."""
    monkeypatch.setattr(Flask, "auto_find_instance_path", lambda app: str(tmp_path))
    names: dict[str, Any] = {}
    exec(compile(BLOCK.findall(page("sql"))[1], "sql.md", "exec", dont_inherit=True), names)  # noqa: S102 - our own page

    with names["app"].app_context():
        assert [] == names["db"].session.scalars(select(names["Payment"])).all()
        names["db"].engine.dispose()
