"""Send the statements of the request path through the cursor of the driver: psycopg 3, PyMySQL and sqlite3.

SQLAlchemy compiles each statement once, pools the connections and classifies the errors. What its own `Connection` adds to
every statement (an execution context, a description of each column, a result, rows, a rollback at the end) takes longer than
these statements themselves. Other drivers, and engines whose statements an application listens to, use SQLAlchemy's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

from sqlalchemy import Connection, Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.exc import DBAPIError, MultipleResultsFound, NoResultFound
from sqlalchemy.sql.compiler import SQLCompiler

from flask_idempotency.stores.sql.naming import NamedConnection

DRIVERS: Final = ("psycopg", "pymysql", "pysqlite")
"""SQLAlchemy's names of the drivers whose cursors this module uses."""

_NOTHING: Final[Mapping[str, Any]] = {}


class Rows(list[Any]):
    """The rows of a statement, with the methods of SQLAlchemy's `Result` that the request path needs."""

    __slots__ = ("lastrowid", "rowcount")

    rowcount: int
    lastrowid: int | None

    def all(self) -> list[Any]:
        return self

    def one_or_none(self) -> Any | None:
        if len(self) > 1:
            raise MultipleResultsFound("a statement about one record returned several rows")
        return self[0] if self else None

    def one(self) -> Any:
        if len(self) != 1:
            raise NoResultFound(f"a statement that returns one row returned {len(self)}")
        return self[0]

    def scalar_one_or_none(self) -> Any | None:
        if len(self) > 1:
            raise MultipleResultsFound("a statement about one record returned several rows")
        return self[0][0] if self else None

    def scalar_one(self) -> Any:
        if len(self) != 1:
            raise NoResultFound(f"a statement that returns one row returned {len(self)}")
        return self[0][0]


class Text(NamedTuple):
    """A compiled statement."""

    sql: str = ""
    row: Callable[[Any], Any] | None = None
    """Makes a row of what the cursor returns. None: it returns nothing."""
    defaults: Mapping[str, Any] = _NOTHING
    """The parameters that it sets itself."""
    names: tuple[str, ...] | None = None
    """The parameters that it takes, if the driver must not get others."""
    several: Any | None = None
    """A `Write`, which sends its statements itself."""


class Driver:
    """The driver of an engine, and the statements that were compiled for it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.dialect: EngineDialect = engine.dialect
        self._schema: str | None = None
        self.texts: dict[Any, Text] = {}
        """By statement. Each is made once (see `made`), so this does not grow."""

    def name(self, schema: str | None) -> None:
        """Name this schema in each statement from now on. None: name none."""
        if schema != self._schema:
            # A thread that compiles without the name keeps the former texts.
            self._schema, self.texts = schema, {}

    @property
    def base_error(self) -> Any:
        return self.dialect.loaded_dbapi.Error

    def compile(self, statement: Any) -> Text:
        """Compile a statement at its first use."""
        # The first two threads may both do this: both compile the same. In this order: see `name`.
        texts, dialect = self.texts, self.dialect
        if hasattr(statement, "tries"):
            text = texts[statement] = Text(several=statement)
            return text
        named: dict[str, Any] = {}
        if self._schema is not None:
            named = {"schema_translate_map": {None: self._schema}, "render_schema_translate": True}
        compiled = statement.compile(dialect=dialect, **named)
        assert isinstance(compiled, SQLCompiler)  # noqa: S101 - no statement of ours is DDL
        assert compiled.positiontup is None  # noqa: S101 - each driver takes parameters by name
        assert not compiled.post_compile_params  # noqa: S101 - no statement of the request path has a list
        defaults = {name: bind.value for name, bind in compiled.binds.items() if not bind.required}
        columns = tuple(statement.exported_columns.keys())
        row: Any = namedtuple("Row", columns)  # type: ignore[misc]
        # PyMySQL escapes all that it gets.
        names = tuple(compiled.binds) if dialect.driver == "pymysql" else None
        text = texts[statement] = Text(compiled.string, row._make if columns else None, defaults, names)
        return text

    def wrapped(self, error: Exception, sql: str | None, *, disconnected: bool) -> BaseException:
        """Return SQLAlchemy's error for this error of the driver."""
        return DBAPIError.instance(
            sql,
            None,
            error,
            self.base_error,
            hide_parameters=True,
            connection_invalidated=disconnected,
            dialect=self.dialect,
        )


class DriverCursor(ABC):
    """A cursor of the driver that sends our statements as SQLAlchemy's `Connection` does. Raise the errors of SQLAlchemy."""

    __slots__ = ("_cursor", "_driver")

    _cursor: Any
    _driver: Driver

    def execute(self, statement: Any, parameters: Mapping[str, Any] = _NOTHING) -> Rows:
        """Send a statement, and return all its rows."""
        text = self._driver.texts.get(statement) or self._driver.compile(statement)
        row = text.row
        if text.several is not None:
            return text.several.send_on(self, parameters)  # type: ignore[no-any-return]
        try:
            given = {**text.defaults, **parameters} if text.defaults else parameters
            self._cursor.execute(text.sql, given if text.names is None else {name: given[name] for name in text.names})
            # Fetch all: SQLite keeps a read transaction open until a statement has returned its last row.
            return Rows() if row is None else Rows(map(row, self._cursor.fetchall()))
        except BaseException as error:  # noqa: BLE001 - `_fail` raises it
            self._fail(error, text.sql)

    def change(self, statement: Any, parameters: Mapping[str, Any]) -> Rows:
        """Send a statement, and return its rows with the number of changed ones and what it passed to LAST_INSERT_ID."""
        rows = self.execute(statement, parameters)
        rows.rowcount, rows.lastrowid = self._cursor.rowcount, self._cursor.lastrowid
        return rows

    @abstractmethod
    def _fail(self, error: BaseException, sql: str) -> NoReturn:
        """Raise this error as SQLAlchemy would."""


class DriverConnection(DriverCursor):
    """A connection of the pool, with the methods of SQLAlchemy's `Connection` that the request path needs.

    Close `held` at the end; no transaction may be open then.
    """

    __slots__ = ("_raw", "dialect", "held", "open")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.dialect: EngineDialect = driver.dialect
        self.open: bool = False
        """True while `transaction` has begun one here."""
        self.held: Any = None
        self._raw: Any = None
        try:
            self.held = driver.engine.raw_connection()
            self._raw = self.held.dbapi_connection
            self._cursor = self._raw.cursor()
        except driver.base_error as error:
            disconnected = driver.dialect.is_disconnect(error, self._raw, None)
            if self.held is not None:
                # The driver knows that this connection is gone.
                driver.engine.pool._invalidate(self.held, error)
                self.held.close()
            raise driver.wrapped(error, None, disconnected=disconnected) from error

    @property
    def info(self) -> Any:
        return self.held.info

    def command(self, sql: str) -> None:
        """Send SQL without parameters and rows, such as BEGIN."""
        try:
            self._cursor.execute(sql)
        except BaseException as error:  # noqa: BLE001 - `_fail` raises it
            self._fail(error, sql)

    def undo(self) -> None:
        """Roll back. If that fails, drop the connection, so that the server rolls back."""
        try:
            self._raw.rollback()
        except Exception as error:  # noqa: BLE001 - after any error the connection is unusable
            self._drop(error)

    def _drop(self, error: BaseException) -> None:
        if self.held.is_valid:
            self.held.invalidate(error)

    def _fail(self, error: BaseException, sql: str) -> NoReturn:
        driver = self._driver
        if not isinstance(error, Exception):
            # The worker was interrupted while the server answers, so the next statement would read that answer.
            self._drop(error)
            raise error
        ours: Any = error
        disconnected = driver.dialect.is_disconnect(ours, self._raw, self._cursor)
        if disconnected:
            # Like SQLAlchemy: the pool's other connections are as stale.
            driver.engine.pool._invalidate(self.held, error)
        else:
            # A cursor that failed in the middle of its rows holds SQLite's lock while a traceback keeps it.
            self._cursor.close()
            self._cursor = self._raw.cursor()
        if not isinstance(error, driver.base_error):
            raise error
        raise driver.wrapped(error, sql, disconnected=disconnected) from error


class SessionCursor(DriverCursor):
    """A new cursor of the driver on the connection of the application's session, in the transaction of that session."""

    __slots__ = ("_connection", "dialect")

    def __init__(self, driver: Driver, connection: Connection) -> None:
        self._driver = driver
        self._connection = connection
        self.dialect: EngineDialect = connection.dialect
        self._cursor = None
        raw: Any = connection.connection.dbapi_connection
        try:
            self._cursor = raw.cursor()
        except Exception as error:  # noqa: BLE001 - `_fail` raises it
            self._fail(error, "")

    def _fail(self, error: BaseException, sql: str) -> NoReturn:
        connection = self._connection
        # Without a statement, SQLAlchemy raises what is no error of the driver as it is.
        told = sql if isinstance(error, self._driver.base_error) else None
        # Its session must learn of a lost connection, as it does from the application's own statements.
        connection._handle_dbapi_exception(error, told, None, self._cursor, None)


RecordConnection: TypeAlias = Connection | DriverConnection
"""What sends the statements of the request path."""

SessionConnection: TypeAlias = RecordConnection | SessionCursor | NamedConnection
"""What completes a record: the same, or what sends statements in the transaction of the application's session."""
