"""The MariaDB servers that tests start for themselves."""

from __future__ import annotations

import sqlalchemy as sa

from tests.lab.mariadb import StartMariaDb


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
