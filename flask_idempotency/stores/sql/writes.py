"""Return the rows that a write has changed, and write or replace a row, in the form that each database has.

PostgreSQL and SQLite do both in one statement. MySQL has no RETURNING, MariaDB has none for UPDATE, and neither can attach a
condition to the replacement of a row. There a `Write` stands for the statement: it sends two or three, as one transaction.
Where a caller only asks whether a row was changed, it sends one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from flask_idempotency.stores.sql.database import transaction
from flask_idempotency.stores.sql.dialects import POSTGRESQL, Dialect, commits_each_statement
from flask_idempotency.stores.sql.driver import DriverConnection, DriverCursor, Rows
from flask_idempotency.stores.sql.errors import is_duplicate

_CHANGED: Final = (1,)
"""The row of a write whose caller only asks whether it has changed one."""

_CHOSEN: Final = "my_chosen"

_NO_PARAMETERS: Final[Sequence[Mapping[str, Any]]] = ({},)

_EXCLUDED: Final = re.compile(r"excluded\.(\w+)")

_BYTES: Final = sa.LargeBinary

_LAST_NUMBER: Final = sa.select(sa.func.last_insert_id().label("number"))

_ONE: Final[sa.ColumnElement[int]] = sa.literal_column("1", sa.BigInteger)


class Written(Rows):
    """What a `Write` returns, with the attributes of SQLAlchemy's result that callers use."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.rowcount: int = 0

    def scalar(self) -> Any | None:
        return self[0][0] if self else None


@dataclass(eq=False, repr=False)
class Write:
    """A write of several statements. Send it as any statement, on a connection of SQLAlchemy's."""

    tries: Sequence[Any]
    """Sent in turn until one changes a row. An insert that meets a row of its key changes none."""
    read: sa.Select[Any] | None = None
    """Then return these rows. Without it, return one row if something was changed."""
    before: sa.Select[Any] | None = None
    """First lock the rows that this selects. The keys are the parameter `my_chosen` of the others."""
    unless: sa.Select[Any] | None = None
    """Write nothing if this selects a row."""
    numbers: bool = False
    """Return the number that the statement has passed to LAST_INSERT_ID."""

    def __post_init__(self) -> None:
        self._several = len(self.tries) > 1 or self.read is not None or self.before is not None

    def _execute_on_connection(self, connection: sa.Connection, parameters: Any, options: Any) -> Written:
        """Be executed: SQLAlchemy calls this for each of its statements."""
        written = Written()
        send = partial(connection.execute, execution_options=options)
        alone = self._several and not connection.in_nested_transaction() and commits_each_statement(connection)
        with transaction(connection, joins=True) if alone else nullcontext():
            for given in parameters or _NO_PARAMETERS:
                self._write(send, given, written)
        return written

    def send_on(self, cursor: DriverCursor, parameters: Mapping[str, Any]) -> Written:
        """Be executed on a cursor of the driver. Only a connection for records is not in a transaction already."""
        written = Written()
        alone = self._several and isinstance(cursor, DriverConnection)
        with transaction(cursor, joins=True) if alone else nullcontext():  # type: ignore[arg-type]
            self._write(cursor.change, parameters, written)
        return written

    def _write(self, send: Callable[..., Any], given: Mapping[str, Any], written: Written) -> None:
        if self.unless is not None and send(self.unless, given).all():
            return
        if self.before is not None:
            keys: list[Any] = [key[0] if len(key) == 1 else tuple(key) for key in send(self.before, given)]
            if not keys:
                return
            given = {**given, _CHOSEN: keys}
        # What is deleted can only be read before.
        first = self.read is not None and isinstance(self.tries[0], sa.Delete)
        found = send(self.read, given).all() if first else ()
        for statement in self.tries:
            done = _sent(send, statement, given)
            if done is not None and done.rowcount:
                written.rowcount += done.rowcount
                if self.numbers:
                    # SQLAlchemy passes it on from most drivers, and not from MariaDB's own.
                    written.append((done.lastrowid or send(_LAST_NUMBER, given).scalar_one(),))
                else:
                    written += found if first else (_CHANGED,) if self.read is None else send(self.read, given).all()
                return


def _sent(send: Callable[..., Any], statement: Any, given: Mapping[str, Any]) -> Any | None:
    """Return the result of this statement. None: an insert has met a row of its key."""
    try:
        return send(statement, given)
    except IntegrityError as error:
        if not (isinstance(statement, sa.Insert) and is_duplicate(error)):
            raise
        return None


def proven(dialect: Dialect, statement: Any, *columns: sa.ColumnElement[Any]) -> Any:
    """Return a row if this writes one. It has these columns if the database can return them."""
    return statement.returning(*columns) if dialect.returns else Write([statement])


def returned(dialect: Dialect, statement: Any, key: sa.ColumnElement[bool], *columns: sa.ColumnElement[Any]) -> Any:
    """Return these columns of what this writes: at most one row, which `key` matches by its primary key."""
    if dialect.returns:
        return statement.returning(*columns)
    return Write([statement], read=sa.select(*columns).where(key))


def of_chosen(
    dialect: Dialect,
    some: sa.Select[Any],
    make: Callable[[Any], Any],
    *columns: sa.ColumnElement[Any],
    waits: bool = False,
) -> Any:
    """Make a write to the rows whose keys `some` selects, and skip locked ones. With `columns`, it returns these.

    Pass `waits` if no other transaction may hold a lock of these rows. Then PostgreSQL locks and skips none.
    """
    keys: Any = sa.tuple_(*some.selected_columns) if len(some.selected_columns) > 1 else some.selected_columns[0]
    if not dialect.returns:
        # In one statement, MariaDB would compare each row of the table with what the subquery selects.
        these = keys.in_(sa.bindparam(_CHOSEN, expanding=True))
        read = sa.select(*columns).where(these) if columns else None
        return Write([make(these)], read=read, before=some.with_for_update(skip_locked=not waits))
    if waits:
        which: Any = some
    elif dialect.name == POSTGRESQL:
        # As a CTE it runs once. A subquery with a limit may run for each compared row, and choose other rows each time.
        which = sa.select(*some.with_for_update(skip_locked=True).cte("chosen").c)
    else:
        # sqlite3 counts changed rows only if the statement does not start with WITH.
        which = sa.select(*some.subquery("chosen").c)
    statement = make(keys.in_(which))
    return statement.returning(*columns) if columns else statement


def upserted(
    dialect: Dialect,
    table: sa.Table,
    values: Mapping[str, sa.ColumnElement[Any]],
    keys: Sequence[str] = (),
    sets: Mapping[str, str] | Sequence[str] = (),
    *,
    where: str = "",
    binds: Sequence[sa.BindParameter[Any]] = (),
    source: sa.Select[Any] | None = None,
    proof: Sequence[sa.ColumnElement[Any]] = (),
    key: sa.ColumnElement[bool] | None = None,
    inserts_first: bool = False,
) -> Any:
    """Insert a row, or change the row that has the same keys.

    * `sets`: the new values, as text, or the names of columns that take theirs from `excluded`, the row that was not inserted.
      Without `sets` the present row stays.
    * `where`: change the row only if this holds. MySQL assigns in order, so put what `where` and others read last.
    * `binds`: the parameters in these texts.
    * `source`: select the values like this, not without a table.
    * `proof`: return a row if one was written, with these columns if the database can return them, or if `key` matches it.
    * `inserts_first`: on MySQL, insert before the change. At REPEATABLE READ, a change that meets no row locks a gap, so two
      transactions of an application could not insert there.
    """
    if source is None:
        # SQLite's parser needs some WHERE before ON CONFLICT.
        source = sa.select(*values.values()).where(_ONE == _ONE)
    insert = sa.insert(table)
    sets = sets if isinstance(sets, Mapping) else {name: f"excluded.{name}" for name in sets}
    if dialect.returns:
        met = f"ON CONFLICT ({', '.join(keys)})" if keys else "ON CONFLICT"
        does = f"DO UPDATE SET {', '.join(f'{name} = {new}' for name, new in sets.items())}" if sets else "DO NOTHING"
        suffix = sa.text(f"{met} {does} WHERE {where}" if where else f"{met} {does}").bindparams(*binds)
        # A suffix, because SQLAlchemy 2.0 does not cache compiled statements that have its own ON CONFLICT.
        inserted = insert.from_select(list(values), source.suffix_with(suffix))
        return inserted.returning(*proof) if proof else inserted
    read = None if key is None else sa.select(*proof).where(key)
    tries: list[Any] = [insert.from_select(list(values), source)]
    if where:
        missing = {name: sa.null() for name in sets if name not in values}
        # Some drivers send bytes as a bare string, which is text here.
        kept = {name: sa.cast(new, _BYTES) if isinstance(new.type, _BYTES) else new for name, new in values.items()}
        excluded = sa.select(*(new.label(name) for name, new in {**kept, **missing}.items())).subquery("excluded")
        same = [table.c[name] == excluded.c[name] for name in keys]
        change = sa.update(table).where(*same, _text(f"({where})", binds))
        change = change.ordered_values(*((table.c[name], _text(new, binds)) for name, new in sets.items()))
        tries = [*tries, change] if inserts_first else [change, *tries, change]
    elif sets or not proof:
        # Without new values, assign one that changes nothing.
        first = next(iter(values))
        new_values = sets or {first: f"{table.name}.{first}"}
        text = ", ".join([f"{name} = " + _EXCLUDED.sub(r"VALUES(\1)", new) for name, new in new_values.items()])
        tries = [insert.from_select(list(values), source.suffix_with(f"ON DUPLICATE KEY UPDATE {text}"))]
    return Write(tries, read=read) if proof or where else tries[0]


def _text(text: str, binds: Sequence[sa.BindParameter[Any]]) -> sa.TextClause:
    return sa.text(text).bindparams(*(each for each in binds if f":{each.key}" in text))
