"""Run in a process of its own, which forks as gunicorn does after it has preloaded an application."""

from __future__ import annotations

import os
import sys
import threading

from sqlalchemy import text

from flask_idempotency.engine.model import Grant
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.dialects import MYSQL, SQLITE
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.contract.support import KEEP, LEASE, PAYLOAD, a_key, a_request, a_token

CHILDREN = 3
ROUNDS = 10


def work(store: SqlStore) -> None:
    for _ in range(ROUNDS):
        key, token = a_key(), a_token()
        assert isinstance(store.claim(a_request(key), token=token, lease=LEASE), Grant)
        store.complete(key, token, PAYLOAD, keep=KEEP)
        record = store.read(key)
        assert record is not None
        assert (token, PAYLOAD) == (record.token, record.payload)


def server_session(database: Database) -> int:
    if database.dialect.name == SQLITE:
        return 0
    asked = "SELECT connection_id()" if database.dialect.name == MYSQL else "SELECT pg_backend_pid()"
    number: int = database.run(lambda connection: connection.execute(text(asked)).scalar_one())
    return number


def main(url: str) -> None:
    database = Database(url)
    store = SqlStore(database)
    work(store)
    pool, session = database.engine.pool, server_session(database)
    # As a thread does that opens the database at the moment of the fork, and is not there to give the lock back.
    database._lock.acquire()
    children = []
    for _ in range(CHILDREN):
        child = os.fork()
        if child == 0:
            assert database.engine.pool is not pool
            assert database._lock.acquire(timeout=60)
            work(store)
            store.close()
            sys.exit(0)
        children.append(child)
    database._lock.release()
    busy = threading.Thread(target=work, args=(store,))
    busy.start()
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    busy.join()
    # A child that closed what it inherited would have told the server good-bye in our name.
    # On SQLite idle connections are closed before the fork.
    assert session == server_session(database)
    assert (database.engine.pool is pool) is (database.dialect.name != SQLITE)
    work(store)
    with database.engine.connect() as connection:
        completed = connection.execute(text("SELECT count(*) FROM idempotency_records")).scalar_one()
    store.close()
    assert [0] * CHILDREN == ended
    assert (CHILDREN + 3) * ROUNDS == completed


if __name__ == "__main__":
    main(sys.argv[1])
