"""The database of one tour."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from example_app.demo.database import NoDatabase, tour_database


class TestTourDatabase:
    def test_sqlite(self, tmp_path: Path) -> None:
        """The tour uses a file in the folder of the demo."""
        for given in (None, ""):
            with tour_database(given, folder=tmp_path) as url:
                assert f"sqlite:///{tmp_path / 'shop.sqlite3'}" == url

    @pytest.mark.parametrize("spelled", ("postgres:", "postgresql:", "postgresql+psycopg:"))
    def test_schema_of_its_own(self, postgres_url: str, tmp_path: Path, spelled: str) -> None:
        """In a shared database the tour touches no other table, and leaves none."""
        engine = create_engine(postgres_url)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE payments (theirs integer)"))
        before = schemas(postgres_url)

        with tour_database(postgres_url.replace("postgresql+psycopg:", spelled), folder=tmp_path) as url:
            ours = create_engine(url)
            assert not inspect(ours).has_table("payments")
            with ours.begin() as connection:
                connection.execute(text("CREATE TABLE payments (ours integer)"))
            ours.dispose()
            assert 1 == len(schemas(postgres_url) - before)

        assert before == schemas(postgres_url)
        assert ["theirs"] == [column["name"] for column in inspect(engine).get_columns("payments")]
        engine.dispose()

    def test_options_are_kept(self, postgres_url: str, tmp_path: Path) -> None:
        """The tour keeps the other options of DATABASE_URL."""
        with tour_database(f"{postgres_url}?options=-cwork_mem%3D9MB", folder=tmp_path) as url:
            engine = create_engine(url)
            with engine.connect() as connection:
                assert "9MB" == connection.execute(text("SHOW work_mem")).scalar_one()
            engine.dispose()

    @pytest.mark.parametrize(
        ("given", "words"),
        (
            ("nonsense secret", "not the URL"),
            ("postgresql://u:secret@host:port/name", "not the URL"),
            ("sqlite:///file", "on PostgreSQL or"),
            ("postgresql://u:secret@127.0.0.1:1/name", "cannot create a schema.*refused"),
        ),
    )
    def test_refusals(self, tmp_path: Path, given: str, words: str) -> None:
        """The message is one line, without the password."""
        with pytest.raises(NoDatabase, match=words) as caught, tour_database(given, folder=tmp_path):
            pass

        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_role_without_the_right(self, postgres_url: str, tmp_path: Path) -> None:
        """The message says that the role may not create schemas. The tour writes into no other schema."""
        engine = create_engine(postgres_url)
        with engine.begin() as connection:
            connection.execute(text("DO $$BEGIN CREATE ROLE guest LOGIN; EXCEPTION WHEN duplicate_object THEN END$$"))
        engine.dispose()
        given = postgres_url.replace("postgres@", "guest@")

        with pytest.raises(NoDatabase, match="permission denied"), tour_database(given, folder=tmp_path):
            pass


def schemas(url: str) -> set[str]:
    engine = create_engine(url)
    names = set(inspect(engine).get_schema_names())
    engine.dispose()
    return names
