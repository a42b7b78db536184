"""The MariaDB servers that tests start for themselves."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from tests.lab import mariadb
from tests.lab.mariadb import MariaDbServer, StartMariaDb


def test_each_database_is_empty_and_gone_at_the_end(mariadb_server: MariaDbServer) -> None:
    with mariadb_server.database() as name:
        engine = sa.create_engine(mariadb_server.url(name))
        assert sa.inspect(engine).get_table_names() == []
        engine.dispose()

    admin = sa.create_engine(mariadb_server.url("mysql"))
    assert name not in sa.inspect(admin).get_schema_names()
    admin.dispose()


def test_a_killed_server_comes_back_with_what_was_committed(start_mariadb: StartMariaDb) -> None:
    server = start_mariadb()
    server.create_database("kept")
    server.execute("CREATE TABLE kept.t (n INT)")
    server.execute("INSERT INTO kept.t VALUES (1)")
    server.kill()
    server.restart()

    engine = sa.create_engine(server.url("kept"))
    with engine.connect() as connection:
        assert 1 == connection.scalar(sa.text("SELECT n FROM t"))
    engine.dispose()


def test_without_a_server_a_test_is_skipped_and_fails_where_all_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mariadb, "installation", lambda: None)
    for name in ("CI", "REQUIRE_SERVICES"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(pytest.skip.Exception, match=r"MariaDB\. Install"):
        mariadb.require_mariadb()
    monkeypatch.setenv("REQUIRE_SERVICES", "1")
    with pytest.raises(pytest.fail.Exception, match=r"MariaDB\. Install"):
        mariadb.require_mariadb()
