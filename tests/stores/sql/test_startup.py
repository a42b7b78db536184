"""From a setting to a working SQL store: which one is made, and what is said at start when it cannot work yet."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from flask import Blueprint, Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import MetaData, create_engine, inspect, text

from example_app.demo.servers import RedisServer
from flask_idempotency import ConfigurationError, Idempotency
from flask_idempotency.stores.memory import MemoryStore
from flask_idempotency.stores.sql.migrations.runner import upgrade
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.stores.tiered import TieredStore
from tests.lab.redis import connect
from tests.stores.cached import PATIENT
from tests.stores.sql.counting import sent
from tests.stores.sql.shops import SECRET, Shop, open_shop, paying


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'records.sqlite3'}"


made: list[Flask] = []


@pytest.fixture(autouse=True)
def put_away() -> Iterator[None]:
    """What `make_app` has made holds connections, whether or not it could do anything with them."""
    yield
    while made:
        hooks = made.pop().extensions["idempotency"].hooks
        hooks._guard.engine._deps.store.close()


def make_app(store: str, **config: object) -> Flask:
    app = Flask("shop")
    app.config |= {"IDEMPOTENCY_STORE": store, "IDEMPOTENCY_SECRET": SECRET, **config}
    Idempotency(app)
    made.append(app)
    app.add_url_rule("/", view_func=lambda: "done", methods=["POST"])
    return app


def post(app: Flask) -> str | None:
    answer = app.test_client(use_cookies=False).post("/", headers={"Idempotency-Key": "k"})
    assert 200 == answer.status_code
    return answer.headers.get("Idempotency-Replayed")


def test_a_database_by_its_url(url: str) -> None:
    """Records in a database of their own, for views whose effects are elsewhere."""
    engine = create_engine(url)
    upgrade(engine)
    engine.dispose()
    app = make_app(url)

    assert [None, "true"] == [post(app), post(app)]


def test_a_missing_schema_is_one_sentence_at_start(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """And the application starts: the command that makes the tables is one of its own."""
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        app = make_app(url)

    [line] = caplog.messages
    assert "`flask idempotency db upgrade`" in line

    result = app.test_cli_runner().invoke(args=["idempotency", "db", "upgrade"])

    assert 0 == result.exit_code
    assert [None, "true"] == [post(app), post(app)]


@pytest.mark.parametrize(
    ("command", "logged"),
    (("flask db upgrade", 0), ("flask idempotency db check", 0), ("flask idempotency doctor", 1), ("flask run", 1)),
)
def test_a_command_about_tables_does_not_log_that_they_are_missing(
    url: str, caplog: pytest.LogCaptureFixture, command: str, logged: int
) -> None:
    running: click.Context | None = None
    for name in command.split():
        running = click.Context(click.Group(name), parent=running, info_name=name)
    assert running is not None

    with running, caplog.at_level(logging.WARNING, "flask_idempotency"):
        make_app(url)

    assert logged == len(caplog.messages)


def test_missing_rights_are_named_at_start_and_by_the_command(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no outage: nobody has to wait for an answer, and somebody has to grant."""
    owner = create_engine(postgres_url)
    upgrade(owner)
    role = f"guest_{owner.url.database}"
    with owner.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        shop = open_shop(owner.url.set(username=role).render_as_string(), existing=True)

    result = shop.app.test_cli_runner().invoke(args=["idempotency", "db", "check"])

    shop.close()
    with owner.begin() as connection:
        connection.execute(text(f"DROP ROLE {role}"))
    owner.dispose()
    [line] = caplog.messages
    assert "grant it SELECT, INSERT, UPDATE and DELETE on idempotency_records, idempotency_meta, " in line
    assert (1, True) == (result.exit_code, line in result.output)


def test_a_late_database_is_checked_at_the_first_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Flask-SQLAlchemy may be set up after us: nobody knows the database before."""
    app = Flask("shop")
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path / 'later.sqlite3'}",
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
        "IDEMPOTENCY_SECRET": SECRET,
    }
    Idempotency(app)
    db = SQLAlchemy(app)

    app.test_client().get("/")
    app.test_client().get("/")

    [line] = [record.getMessage() for record in caplog.records if record.name == "flask_idempotency"]
    assert "`flask idempotency db upgrade`" in line
    with app.app_context():
        db.engine.dispose()


@pytest.mark.parametrize("first", (True, False))
@pytest.mark.parametrize("schema", (None, "main"))
def test_create_all_makes_a_working_store(tmp_path: Path, first: bool, schema: str | None) -> None:
    """Whichever is set up first, and wherever the application's own tables are. Other binds have none of ours."""
    app, db = Flask("shop"), SQLAlchemy(metadata=MetaData(schema=schema))
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path / 'shop.sqlite3'}",
        "SQLALCHEMY_BINDS": {"audit": f"sqlite:///{tmp_path / 'audit.sqlite3'}"},
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
        "IDEMPOTENCY_SECRET": SECRET,
        "TESTING": True,
    }
    if first:
        Idempotency(app)
    db.init_app(app)
    if not first:
        Idempotency(app)
    made.append(app)
    app.add_url_rule("/", view_func=lambda: "done", methods=["POST"])

    with app.app_context():
        db.create_all()

    assert [None, "true"] == [post(app), post(app)]
    with app.app_context():
        assert [] == inspect(db.engines["audit"]).get_table_names()
        for engine in db.engines.values():
            engine.dispose()


def test_two_applications_share_the_tables_of_one_metadata(tmp_path: Path) -> None:
    """An application factory runs once for every test; each application is told when its context is there."""
    db = SQLAlchemy()
    apps = []
    for name in ("one", "two"):
        app = Flask(name)
        app.config |= {
            "SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path / name}.sqlite3",
            "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
            "IDEMPOTENCY_SECRET": SECRET,
        }
        Idempotency(app)
        apps.append(app)
    assert set() == set(db.metadata.tables)
    for app in apps:
        db.init_app(app)
        with app.app_context():
            assert "idempotency_records" in db.metadata.tables
            db.engine.dispose()


def test_a_request_without_a_schema_is_refused_with_the_same_remedy(url: str) -> None:
    """Never run: nobody could tell its retry."""
    app = make_app(url, TESTING=True)

    with pytest.raises(ConfigurationError, match="flask idempotency db upgrade"):
        post(app)


def test_such_a_request_gets_a_problem_and_the_log_the_remedy(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where no developer looks on. It never runs, even if the policy lets requests run while the store is away."""
    app = make_app(url, IDEMPOTENCY_ON_STORE_DOWN="allow")
    app.view_functions["index"] = lambda: pytest.fail("it ran")
    caplog.clear()

    answers = [app.test_client().post("/", headers={"Idempotency-Key": "one"}) for _ in range(2)]

    for answer in answers:
        assert (503, "application/problem+json") == (answer.status_code, answer.mimetype)
        assert ("store-unavailable", "2") == (answer.get_json()["code"], answer.headers["Retry-After"])
    [line] = caplog.messages
    assert "was refused with 503" in line
    assert "run `flask idempotency db upgrade`" in line


def test_an_application_starts_without_its_database(caplog: pytest.LogCaptureFixture) -> None:
    """What is down may come back. The password is in no line of the log."""
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        make_app("postgresql+psycopg://shop:canary@127.0.0.1:1/shop")

    assert any("Keyed requests are refused until it responds" in line for line in caplog.messages)
    assert "canary" not in caplog.text


def test_no_part_of_a_password_that_breaks_its_url_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Everything behind its first @ is taken for host and database. The log says what to write instead."""
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        make_app("postgresql+psycopg://shop:can@127.0.0.1:1/canary@db/shop")

    [line] = caplog.messages
    assert "write @ in it as %40" in line
    assert (False, False) == ("canary" in caplog.text, "127.0.0.1" in caplog.text)


def test_a_strategy_that_the_database_lacks_is_refused(url: str) -> None:
    """SQLite would silently drop the words that make the lock."""
    with pytest.raises(ConfigurationError, match="row_lock"):
        make_app(url, IDEMPOTENCY_CLAIM_STRATEGY="row_lock")


def test_a_strategy_beside_a_store_that_is_made_already_is_refused() -> None:
    """It would be ignored, and pass for a promise."""
    app = Flask("shop")
    app.config |= {"IDEMPOTENCY_STORE": MemoryStore(), "IDEMPOTENCY_SECRET": SECRET}
    app.config["IDEMPOTENCY_CLAIM_STRATEGY"] = "advisory"

    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_CLAIM_STRATEGY: the store is an object"):
        Idempotency(app)


def test_transactional_effects_need_the_sessions_database(url: str) -> None:
    with pytest.raises(ConfigurationError, match="flask-sqlalchemy://"):
        make_app(url, IDEMPOTENCY_EFFECTS="transactional")


def test_a_blueprint_that_needs_it_is_refused_at_start_too() -> None:
    idempotency = Idempotency()
    idempotency.configure(Blueprint("payments", __name__), effects="transactional")
    app = Flask("shop")
    app.config |= {"IDEMPOTENCY_STORE": "memory://", "TESTING": True}

    with pytest.raises(ConfigurationError, match=r"configure\('payments'\): effects=.*needs a SQL store"):
        idempotency.init_app(app)


def test_a_database_that_may_lose_commits_is_refused(postgres_url: str) -> None:
    """Not only warned of: a lost claim is a second payment."""
    engine = create_engine(postgres_url)
    upgrade(engine)
    with engine.begin() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        connection.execute(text(f'ALTER DATABASE "{name}" SET synchronous_commit = off'))
    engine.dispose()
    with pytest.raises(ConfigurationError, match="synchronous_commit is off"):
        post(make_app(postgres_url, TESTING=True))


@pytest.fixture
def tiered(url: str, redis_server: RedisServer) -> Iterator[Shop]:
    shop = open_shop(url, IDEMPOTENCY_REDIS_URL=redis_server.url + PATIENT)
    yield shop
    shop.close()


def test_a_redis_url_puts_a_cache_in_front(tiered: Shop) -> None:
    """Of the SQL store that there would be without it."""
    assert isinstance(tiered.store, TieredStore)
    assert isinstance(tiered.store._system, SqlStore)


def test_a_committed_response_is_cached_and_replayed_without_the_database(
    tiered: Shop, redis_server: RedisServer
) -> None:
    """As soon as the commit has returned: the first replay already asks Redis alone."""

    @tiered.view()
    def pay() -> str:
        tiered.pay()
        with connect(redis_server.url) as redis:
            assert [] == redis.keys()
        return "paid"

    tiered.post()
    tiered.store._system.claim = lambda *_, **__: pytest.fail("the database was asked")

    assert "true" == tiered.post().headers["Idempotency-Replayed"]


def test_an_uncommitted_response_is_never_cached(tiered: Shop, redis_server: RedisServer) -> None:
    """A deferred constraint refuses the commit: the answer that was ready is nowhere."""

    @tiered.view()
    def pay() -> str:
        tiered.pay(account=404)
        return "paid"

    assert 500 == tiered.post().status_code
    with connect(redis_server.url) as redis:
        assert [] == redis.keys()


@pytest.mark.parametrize("made_by", ("create_all", "upgrade"))
def test_two_databases_may_share_a_redis(tmp_path: Path, redis_server: RedisServer, made_by: str) -> None:
    """Of one application with one secret, such as one for each region: neither replays what the other has done."""
    shops = []
    for name in ("north", "south"):
        url = f"sqlite:///{tmp_path / name}.sqlite3"
        if made_by == "upgrade":
            engine = create_engine(url)
            upgrade(engine)
            engine.dispose()
        shops.append(open_shop(url, IDEMPOTENCY_REDIS_URL=redis_server.url + PATIENT))
        paying(shops[-1])

    answers = [shop.post() for _ in range(2) for shop in shops]

    assert [None, None, "true", "true"] == [answer.headers.get("Idempotency-Replayed") for answer in answers]
    assert [1, 1] == [shop.payments() for shop in shops]
    for shop in shops:
        shop.close()


def test_a_hot_replay_is_not_one_statement(tiered: Shop, url: str, redis_server: RedisServer) -> None:
    """Neither in the process that gave the answer nor, after its first request, in any other."""
    other = open_shop(url, existing=True, IDEMPOTENCY_REDIS_URL=redis_server.url + PATIENT)
    for shop in (tiered, other):
        paying(shop)
        shop.post()
        with sent(shop.store._system) as statements:
            assert "true" == shop.post().headers["Idempotency-Replayed"]
        assert [] == statements
    other.close()


def test_a_database_without_a_number_is_served_without_the_cache(
    tiered: Shop, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says what to do, once. When it is done, the next answer is cached.

    Where nothing was ever cached, the store chooses a number by itself.
    """
    with tiered.db_engine.begin() as connection:
        connection.execute(text("UPDATE idempotency_meta SET name = 'cached_since' WHERE name = 'store'"))
    paying(tiered)

    answers = [tiered.post().headers.get("Idempotency-Replayed") for _ in range(2)]

    assert ([None, "true"], 1) == (answers, tiered.payments())
    with connect(redis_server.url) as redis:
        assert [] == redis.keys()
    assert 1 == caplog.text.count("run `flask idempotency db upgrade` to choose another")

    upgrade(tiered.db_engine)
    tiered.post()

    with connect(redis_server.url) as redis:
        assert 1 == len(redis.keys())
