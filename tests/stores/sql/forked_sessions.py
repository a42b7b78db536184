"""Run in a process of its own: an application uses its database, and then the process forks, once in each scenario."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import NullPool, select, text

from flask_idempotency import Idempotency
from flask_idempotency.engine.lease import LeaseRenewer
from tests.stores.sql.shops import SECRET, Account, Base, Payment, Shop, open_shop, paying

Fork = Callable[[], int]
_handles: list[object] = []


def fork_below_python() -> int:
    """As uWSGI does: no callback of `os.register_at_fork` runs in the child.

    The child waits for ever if another thread waited for the interpreter's lock at the fork: its mutex is copied as held.
    """
    assert threading.active_count() == 1, threading.enumerate()
    return int(ctypes.PyDLL(None).fork())


def in_child(shop: Shop, fork: Fork, work: Callable[[], None]) -> None:
    """Do this in a forked child, and fail here if it fails there."""
    child = fork()
    if child == 0:
        try:
            # Every request and task begins so. Below Python, that is where a fork is noticed.
            with shop.app.app_context():
                pass
            work()
        except BaseException:  # noqa: BLE001 - printed, and known to the parent by the exit code
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def server_session(connection: Any) -> int:
    """Which of PostgreSQL's processes serves this connection; on SQLite, which handle it is."""
    if connection.dialect.name == "sqlite":
        # Kept, or the next handle could have the same number.
        _handles.append(connection.connection.dbapi_connection)
        return id(_handles[-1])
    number: int = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    return number


def pays(shop: Shop, key: str) -> None:
    answer = shop.post(key=key)
    assert (answer.status_code, answer.data) == (201, b"paid"), answer.data


def idle(url: str, fork: Fork) -> None:
    """Connections wait in the pool. Neither child nor grandchild uses them, and the parent still does."""
    shop = open_shop(url)
    paying(shop)
    pays(shop, "warm")
    with shop.db_engine.connect() as connection:
        before = server_session(connection)

    def child() -> None:
        with shop.app.app_context():
            pool = shop.db.engine.pool
            mine = server_session(shop.db.session.connection())
        assert mine != before
        pays(shop, "child")

        def grandchild() -> None:
            pays(shop, "grandchild")
            with shop.app.app_context():
                assert shop.db.engine.pool is not pool
                assert server_session(shop.db.session.connection()) not in (before, mine)

        in_child(shop, fork, grandchild)
        pays(shop, "child-again")

    in_child(shop, fork, child)
    if not url.startswith("sqlite"):  # there an idle connection is closed before the fork
        with shop.db_engine.connect() as connection:
            assert server_session(connection) == before
    assert shop.payments() == 4


def held(url: str, fork: Fork) -> None:
    """The parent is in the middle of a transaction. No child ends it, whatever the child does with its copy."""
    shop = open_shop(url)
    paying(shop)
    with shop.app.app_context():
        shop.db.session.add(Payment(amount=7))
        shop.db.session.flush()

        def child() -> None:
            shop.db.session.rollback()
            assert shop.db.session.execute(select(Payment)).all() == []
            shop.db.session.remove()

        def impatient_child() -> None:
            shop.db.session.remove()

        def working_child() -> None:
            # Flask enters no context of its own inside one of the same application: this is the parent's session.
            assert shop.db.session.get(Account, 1) is not None
            shop.db.session.rollback()
            if shop.db.engine.dialect.name != "sqlite":  # SQLite has one writer, and that is the parent
                pays(shop, "child")

        for each in (child, impatient_child, working_child):
            in_child(shop, fork, each)
        shop.db.session.commit()
    assert shop.payments() == (1 if url.startswith("sqlite") else 2)


def garbage(url: str, fork: Fork) -> None:
    """What the parent holds becomes garbage in the child: SQLAlchemy would roll back the parent's transaction."""
    shop = open_shop(url)
    connections = [shop.db_engine.connect()]
    connections[0].execute(Payment.__table__.insert().values(amount=7))  # type: ignore[attr-defined]

    def child() -> None:
        with shop.app.app_context():
            connections.clear()
            gc.collect()

    in_child(shop, fork, child)
    connections[0].commit()
    connections[0].close()
    assert shop.payments() == 1


def binds(url: str, fork: Fork) -> None:
    """The session writes to other databases too: their pools are replaced, but for one that lives in memory."""
    with tempfile.TemporaryDirectory() as folder:
        other = f"sqlite:///{folder}/other.sqlite"
        config: dict[str, Any] = {"SQLALCHEMY_BINDS": {"other": other, "memory": "sqlite://"}}
        shop = open_shop(url, **config)
        paying(shop)
        engines: dict[str, Any] = {}
        with shop.app.app_context():
            engines = {name: shop.db.engines[name] for name in ("other", "memory")}
        for engine in engines.values():
            with engine.begin() as connection:
                connection.execute(text("CREATE TABLE notes (note INTEGER)"))
        pools = {name: engine.pool for name, engine in engines.items()}

        def child() -> None:
            pays(shop, "child")
            assert engines["other"].pool is not pools["other"]
            assert engines["memory"].pool is pools["memory"]
            with engines["memory"].connect() as connection:
                assert connection.execute(text("SELECT count(*) FROM notes")).scalar_one() == 0

        in_child(shop, fork, child)
        assert engines["memory"].pool is pools["memory"]


def late(url: str, fork: Fork) -> None:
    """The extension was set up before the database, and the parent has used the database only."""
    open_shop(url).close()
    app = Flask("shop")
    app.config |= {
        "SQLALCHEMY_DATABASE_URI": url,
        "IDEMPOTENCY_STORE": "flask-sqlalchemy://",
        "IDEMPOTENCY_SECRET": SECRET,
        "IDEMPOTENCY_EFFECTS": "transactional",
    }
    idempotency = Idempotency(app)
    db = SQLAlchemy(model_class=Base)
    db.init_app(app)
    shop = Shop(app, db, idempotency)
    paying(shop)
    with shop.db_engine.connect() as connection:
        before = server_session(connection)

    def child() -> None:
        with app.app_context():
            assert server_session(db.session.connection()) != before
        pays(shop, "child")

    in_child(shop, fork, child)
    assert shop.payments() == 1


def unpooled(url: str, fork: Fork) -> None:
    """There is no connection to share, and one that is open at the fork is the parent's."""
    shop = open_shop(url, SQLALCHEMY_ENGINE_OPTIONS={"poolclass": NullPool})
    paying(shop)
    with shop.app.app_context():
        shop.db.session.add(Payment(amount=7))
        shop.db.session.flush()
        in_child(shop, fork, lambda: shop.db.session.remove())
        shop.db.session.commit()
    in_child(shop, fork, lambda: pays(shop, "child"))
    assert shop.payments() == 2


def outlived(url: str, fork: Fork) -> None:
    """The parent closes its connections, and another process comes and goes, while the child works.

    The last process that closes a SQLite file removes its write-ahead log. A child whose locks are copies of its parent's
    holds none of them for others, and goes on to commit into a file that is gone.
    """
    shop = open_shop(url)
    paying(shop)
    pays(shop, "warm")
    with shop.app.app_context():
        shop.db.session.execute(select(Account))
        shop.db.session.remove()
    to_child, to_parent = os.pipe(), os.pipe()
    child = fork()
    if child == 0:
        try:
            pays(shop, "child")
            os.write(to_parent[1], b"x")
            os.read(to_child[0], 1)
            pays(shop, "child-again")
        except BaseException:  # noqa: BLE001 - printed, and known to the parent by the exit code
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.read(to_parent[0], 1)
    shop.close()
    program = "import sqlalchemy as s, sys; e = s.create_engine(sys.argv[1]); c = e.connect(); "
    program += "c.execute(s.text('UPDATE accounts SET balance = 1')); c.commit(); c.close(); e.dispose()"
    subprocess.run([sys.executable, "-c", program, url], check=True)
    os.write(to_child[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shop.payments() == 3
    shop.close()


def main(scenario: str, how: str, url: str) -> None:
    scenarios = {each.__name__: each for each in (idle, held, garbage, binds, late, unpooled, outlived)}
    if how != "python":
        # Leases are longer than a scenario. See `fork_below_python`.
        LeaseRenewer._start = lambda self: None  # type: ignore[method-assign]
    scenarios[scenario](url, os.fork if how == "python" else fork_below_python)


if __name__ == "__main__":
    main(*sys.argv[1:])
