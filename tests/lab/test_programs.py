"""A green run in CI means that everything was run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import galera, mariadb, pgbouncer, postgres, rabbitmq
from tests.lab.programs import missing

NOWHERE = Path("/nowhere")
SERVICES = {
    "clock tower": (lambda: missing("clock tower", remedy="Build one."), None, ""),
    "PostgreSQL": (postgres.postgres_installation, postgres, "installation"),
    "MariaDB": (mariadb.require_mariadb, mariadb, "installation"),
    "Galera": (galera.require_galera, galera, "library"),
    "PgBouncer": (pgbouncer.require_pgbouncer, pgbouncer, "PROGRAM"),
    "RabbitMQ": (rabbitmq.require_rabbitmq, rabbitmq, "PROGRAM"),
}
"""What a test calls that needs the service, and the name in the module that finds it on this machine."""


@pytest.mark.parametrize("variable", ("CI", "REQUIRE_SERVICES", None))
@pytest.mark.parametrize(("service", "needs"), SERVICES.items(), ids=SERVICES)
def test_a_missing_service_skips_on_a_laptop_and_fails_where_everything_must_run(
    monkeypatch: pytest.MonkeyPatch,
    service: str,
    needs: tuple[Callable[[], object], object, str],
    variable: str | None,
) -> None:
    """You can try a change without every server. In CI a skipped test would never run anywhere."""
    require, module, name = needs
    if module is not None:
        monkeypatch.setattr(module, name, NOWHERE if name == "PROGRAM" else lambda: None)
    for each in ("CI", "REQUIRE_SERVICES"):
        monkeypatch.delenv(each, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")

    with pytest.raises(pytest.fail.Exception if variable else pytest.skip.Exception, match=rf"{service}\. \w+"):
        require()
