"""The ledger: one SQLite file that keeps the key of each named intent, so that a restarted program sends the same key.

It holds name, key, a keyed digest of the request, state, status, counts and times. It holds no URL, header or body. The key of
the digests is in a second file: a copy of the ledger alone does not tell whether a guess at a body is right.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, fields, replace
from os import PathLike
from typing import Any, Final, Literal, TypeAlias, cast

from flask_idempotency.client.errors import LedgerError

__all__ = ["Begun", "Entry", "Ledger", "State"]

State: TypeAlias = Literal["new", "sent", "done", "refused", "voided"]
"""`new`: never sent. `sent`: no response has settled it. `done`: carried out. `refused`: not carried out, with this key.
`voided`: not carried out, and the name is over."""

FORMAT: Final = 1
WITH_VOIDED: Final = 2
"""The format of a file that has, or had, a voided name. An earlier version, which does not know that state, refuses it."""
SECRET_BYTES: Final = 32
_FORMER_BYTES: Final = 32
_MARK_BYTES: Final = 4
BUSY_SECONDS: Final = 30.0
"""How long a process waits for another one that writes. A write takes milliseconds."""

_CREATE = """
CREATE TABLE intents (
    name TEXT PRIMARY KEY,
    key TEXT NOT NULL,
    digest BLOB,
    state TEXT NOT NULL CHECK (state IN ('new', 'sent', 'done', 'refused')),
    status INTEGER,
    doubt INTEGER NOT NULL DEFAULT 0,
    deliveries INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    first_sent REAL,
    last_sent REAL,
    settled REAL
) WITHOUT ROWID
"""
_COUNT = "UPDATE intents SET attempts = attempts + :attempts WHERE name = :name AND key = :key"
_SETTLE = """
UPDATE intents SET state = :state, status = :status, doubt = 0,
    settled = CASE WHEN :state IN ('new', 'sent') THEN NULL ELSE :now END,
    first_sent = CASE :state WHEN 'new' THEN NULL ELSE first_sent END
WHERE name = :name AND key = :key AND state NOT IN ('done', 'voided')
    AND (:state IN ('done', 'voided') OR state = 'sent' AND (:certain OR deliveries = :deliveries))
"""
_UPGRADE = (
    "ALTER TABLE intents RENAME TO former",
    _CREATE.replace("'refused')", "'refused', 'voided')"),
    "INSERT INTO intents SELECT * FROM former",
    "DROP TABLE former",
    f"PRAGMA user_version = {WITH_VOIDED}",
)
"""From `FORMAT` to `WITH_VOIDED`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the ledger knows of one name. Times are seconds since 1970."""

    name: str
    key: str
    digest: bytes | None
    state: State
    status: int | None
    doubt: bool
    """Whether an attempt may have been carried out, as far as its sender knew. It is set before anything is sent."""
    deliveries: int
    """How many calls have sent this key."""
    attempts: int
    created: float
    first_sent: float | None
    last_sent: float | None
    settled: float | None


_COLUMNS: Final = ", ".join(column.name for column in fields(Entry))
_BY_NAME: Final = f"SELECT {_COLUMNS} FROM intents WHERE name = ?"  # noqa: S608
_UNSETTLED: Final = f"SELECT {_COLUMNS} FROM intents WHERE state = 'sent' AND doubt ORDER BY first_sent, name"  # noqa: S608
_WRITE: Final = f"INSERT OR REPLACE INTO intents ({_COLUMNS}) VALUES ({', '.join('?' for _ in fields(Entry))})"  # noqa: S608


@dataclass(frozen=True, slots=True)
class Begun:
    """A delivery that the ledger has noted."""

    entry: Entry
    """The entry as it is now."""
    before: Entry
    """The entry as it was before this delivery."""
    differs: bool = False
    """Whether the key was sent with other content before, as far as the ledger can tell."""
    seconds_kept: float = 0.0
    """For how long the service still keeps the key, at least."""

    @property
    def doubt(self) -> bool:
        """Whether an earlier delivery may have been carried out."""
        return self.before.doubt or self.before.state == "done"


class Ledger:
    """Keeps the key of each named intent, on disk before the first byte of the request leaves this machine.

    Without a path it lasts as long as this object. Threads and processes may share one file; a forked process opens its own
    connection. The same name has the same key until a service refused it.

    Raises `LedgerError` if the file cannot be used.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        keep: float = 86400.0,
        forget_after: float = 7776000.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Open or create the file, with mode 0600. Refuse a file that another user may change, or that is a link.

        `keep` is the number of seconds for which the service keeps a response; it must not be more than the service says.
        After `forget_after` seconds a settled name is deleted, and is a new name from then on.
        """
        if not 0 < keep <= forget_after:
            raise ValueError("keep must be positive, and forget_after must not be shorter.")
        # A relative path would name another file after a chdir.
        self._path = None if path is None else os.path.abspath(os.fspath(path))
        self._keep = keep
        self._forget_after = forget_after
        self._now = now
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._place: Place = ()
        """Which files are open. A child of a fork must find the same ledger, with files of its own beside it."""
        self._secret = secrets.token_bytes(SECRET_BYTES)
        """Replaced by that of the file when a ledger with a path is opened."""
        self._forked = False
        self.restarts = False
        """Whether a ledger without a path may be empty after a fork. It may, if no name has to be remembered."""
        self._closed = False
        _LEDGERS.add(self)
        self.tidy()

    @property
    def on_disk(self) -> bool:
        """Whether names outlive this process."""
        return self._path is not None

    def find(self, name: str) -> Entry | None:
        """Return what the ledger knows of this name, or None."""
        with self._reading() as connection:
            return _find(connection, name)

    def unsettled(self) -> list[Entry]:
        """Return all entries that may have been carried out and that no response has settled, oldest first."""
        with self._reading() as connection:
            return [_entry(row) for row in connection.execute(_UNSETTLED)]

    def forget(self, name: str) -> bool:
        """Delete this name, and return whether it was there. The next intent of this name gets a new key.

        Call it only if you know what became of the request: under a new key the service may carry it out again.
        """
        with self._writing() as connection:
            return connection.execute("DELETE FROM intents WHERE name = ?", (name,)).rowcount > 0

    def tidy(self) -> int:
        """Delete what was settled or prepared more than `forget_after` seconds ago. Return how many names that were.

        An unsettled name stays for ever. `Ledger` calls this when it opens the file.
        """
        with self._writing() as connection:
            return connection.execute(
                "DELETE FROM intents WHERE state <> 'sent' AND coalesce(settled, created) < ?",
                (self._now() - self._forget_after,),
            ).rowcount

    def close(self) -> None:
        """Close the file. A closed ledger raises `LedgerError`."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def __del__(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close()

    # What intents call.

    def expired(self, entry: Entry) -> bool:
        """Return whether this entry's request may have been carried out, and the service may have forgotten its key.

        A clock that was ahead at the first sending leaves a time in the future. The age is unknown then.
        """
        first = entry.first_sent
        old = first is not None and not first <= self._now() < first + self._keep
        return old and (entry.doubt or entry.state == "done")

    def begin(self, name: str, key: str, content: bytes | None) -> Begun:
        """Note that this name's key is about to be sent, with a digest of the request's content.

        The entry has the key to send. A name that the ledger does not know, or that was refused under another key, gets
        `key`. Every other name keeps its own: another process may have begun it. If its key may have been forgotten, or was
        sent with other content, nothing is written; the caller must not send.
        """
        now = self._now()
        with self._writing() as connection:
            before = _find(connection, name)
            if before is None or (before.state == "refused" and before.key != key):
                before = Entry(name, key, None, "new", None, False, 0, 0, now, None, None, None)
            # Opening the file has read the secret.
            digest, differs = _digest_and_difference(before, content, self._secret)
            if before.state == "voided" or self.expired(before) or differs:
                return Begun(before, before, differs)
            entry = replace(
                before,
                digest=digest,
                state="done" if before.state == "done" else "sent",
                doubt=True,
                deliveries=before.deliveries + 1,
                # A request that was surely not carried out did not begin the time for which the service keeps the key.
                first_sent=before.first_sent if before.doubt or before.state == "done" else now,
                last_sent=now,
            )
            connection.execute(_WRITE, astuple(entry))
        # Not from `now`: the wait for other processes and for the disk is part of the time for which the service keeps it.
        kept = (entry.first_sent or now) + self._keep - self._now()
        return Begun(entry, before, seconds_kept=max(0.0, kept))

    def settle(
        self, entry: Entry, state: State | None, *, status: int | None, attempts: int, certain: bool = False
    ) -> bool:
        """Note how a delivery ended, and return whether that stands. `entry` is the one that `begin` returned.

        Only a carried-out request and a voided key end the name whatever else happens. Any other end counts only if this was
        the latest delivery (or `certain`): a later one may have been carried out. `sent` says that this delivery was not
        carried out and that the key can still be used; None says that it may have been carried out.
        """
        new = {"state": state, "status": status, "attempts": attempts}
        facts = {**asdict(entry), **new, "certain": certain, "now": self._now()}
        with self._writing() as connection:
            if state == "voided" and connection.execute("PRAGMA user_version").fetchone() == (FORMAT,):
                for statement in _UPGRADE:
                    connection.execute(statement)
            connection.execute(_COUNT, facts)
            return state is None or connection.execute(_SETTLE, facts).rowcount > 0

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                connection = self._connected()
                self._refuse_another_file()
                yield connection
            except sqlite3.Error as error:
                # SQLite's text names no value: the statements have parameters.
                raise LedgerError(
                    f"The ledger cannot be used ({error}). Nothing was sent. Check the file, its folder and the free space."
                ) from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction that holds the file's write lock from its start, and is on disk when the block ends."""
        with self._reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
                # A file that was deleted in between takes the key with it, and the key is about to be sent.
                self._refuse_another_file()
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _connected(self) -> sqlite3.Connection:
        if self._closed:
            raise LedgerError("The ledger is closed. Nothing was sent. Make a new Ledger.")
        if self._forked and self._path is None and not self.restarts:
            raise LedgerError(
                "This process was forked, and a ledger without a path stays in the parent. Nothing was sent. Give the "
                "ledger a path, or make it after the fork."
            )
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        """Open the file, and read its secret. Raise `LedgerError` if this ledger had another file at this path before."""
        prepared = _prepare(self._path)
        if self._place and self._place[0] != prepared[0]:
            raise LedgerError(_REPLACED)
        connection = sqlite3.connect(
            self._path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            _use_write_ahead_log(connection)
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found == 0:
                if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
                    raise LedgerError("The file is a database, and no ledger. Nothing was sent. Give another path.")
                connection.execute(_CREATE)
                connection.execute(f"PRAGMA user_version = {FORMAT}")
            elif found not in (FORMAT, WITH_VOIDED):
                raise LedgerError(
                    f"The ledger has format {found}, and this version reads up to {WITH_VOIDED}. Nothing was sent. Upgrade "
                    "flask-idempotency in this program."
                )
            if self._path is not None:
                self._secret = _secret_beside(self._path)
            connection.execute("COMMIT")
            opened = _examine(self._path)
            if opened[:1] != prepared[:1]:
                raise LedgerError(_REPLACED)
        except BaseException:
            connection.close()
            raise
        self._place = opened
        return connection

    def _refuse_another_file(self) -> None:
        """Raise `LedgerError` unless the path is still the file that is open, and no other user can write to it."""
        if _examine(self._path) != self._place:
            raise LedgerError(_REPLACED)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        self._forked = True
        if self._connection is not None:
            # A connection that a fork copied may not be used. It stays referenced, because closing it is use too.
            _INHERITED.append(self._connection)
            self._connection = None


_INHERITED: Final[list[sqlite3.Connection]] = []
_LEDGERS: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _forget_connections() -> None:
    for ledger in list(_LEDGERS):
        ledger._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections)


_REPLACED: Final = (
    "The ledger's file was deleted or replaced while it was open. Nothing was sent. Put the file back, and start the "
    "program again. If it is lost, look up what became of the last requests before you send them under new keys."
)


Place: TypeAlias = tuple[tuple[int, int] | None, ...]
"""The device and number of a ledger's file, and of the two that SQLite keeps beside it while it is open. None: no such file.
Nothing at all for a ledger without a path."""


def _examine(path: str | None) -> Place:
    """Return where the files of an open ledger are. Raise `LedgerError` if another user could change the keys in one."""
    return () if path is None else tuple(_identity(path + ending) for ending in ("", "-wal", "-shm"))


def _identity(path: str) -> tuple[int, int] | None:
    fault = None
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LedgerError(
            f"The ledger's file cannot be examined ({error.strerror}). Nothing was sent. Check its folder."
        ) from error
    if not stat.S_ISREG(found.st_mode):
        fault = "is a link" if stat.S_ISLNK(found.st_mode) else "is no regular file"
    elif found.st_nlink > 1:
        fault = f"has {found.st_nlink} names (hard links)"
    elif hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        fault = "belongs to another user"
    elif hasattr(os, "geteuid") and found.st_mode & 0o077:
        fault = f"has mode {stat.S_IMODE(found.st_mode):04o}"
    if fault is not None:
        raise LedgerError(
            f"The ledger's file {fault}. Nothing was sent. Another user could change the keys in it, and a request would be "
            "carried out twice. Give a path of your own, or check the file and then set its owner and mode 0600."
        )
    return found.st_dev, found.st_ino


def _prepare(path: str | None) -> Place:
    """Create the file if there is none, and return where its files are. Raise `LedgerError` if another user could change it."""
    if path is None:
        return ()
    # SQLite would create the file with the umask's mode. A file that exists is never opened here: closing any descriptor
    # of it would drop all locks that this process has on it (POSIX).
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise LedgerError(
            f"The ledger's file cannot be created ({error.strerror}). Nothing was sent. Give a path in a folder that "
            "exists and that this process may write to."
        ) from error
    folder = os.stat(os.path.dirname(path) or ".")
    if hasattr(os, "geteuid") and folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        raise LedgerError(
            "Every user may write to the ledger's folder, and could take the ledger away. Nothing was sent. Run chmod o-w on "
            "the folder, or give a path in another one."
        )
    # SQLite takes what another user put beside it for the newest pages of the file.
    _identity(path + "-journal")
    return _examine(path)


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Set the mode of the file. While another process sets it, SQLite refuses without waiting: try for `BUSY_SECONDS`."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _secret_beside(path: str) -> bytes:
    """Return the secret of this ledger's digests, and make it if there is none. The caller holds the file's write lock."""
    place = path + ".secret"
    try:
        if _identity(place) is not None:
            with open(place, "rb") as file:
                found = file.read()
            if len(found) == SECRET_BYTES:
                return found
        with suppress(FileNotFoundError):
            os.unlink(place + "-new")
        secret = secrets.token_bytes(SECRET_BYTES)
        with os.fdopen(os.open(place + "-new", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        os.replace(place + "-new", place)
    except OSError as error:
        raise LedgerError(
            f"The secret beside the ledger's file cannot be read or created ({error.strerror}). Nothing was sent. Give a path "
            "in a folder that this process may write to."
        ) from error
    return secret


def _find(connection: sqlite3.Connection, name: str) -> Entry | None:
    row = connection.execute(_BY_NAME, (name,)).fetchone()
    return None if row is None else _entry(row)


def _entry(row: tuple[object, ...]) -> Entry:
    name, key, digest, state, status, doubt, *rest = cast("Any", row)
    return Entry(name, key, digest, state, status, bool(doubt), *rest)


def _digest_and_difference(entry: Entry, content: bytes | None, secret: bytes) -> tuple[bytes | None, bool]:
    """Return the digest that an entry has after its key was sent with this content, and whether it was sent with other.

    Equal contents of two names have different digests. A digest begins with a mark of its secret, because digests under two
    secrets cannot be compared. Earlier versions wrote one without a mark, whose key was the name.
    """
    kept = None if entry.state == "new" else entry.digest
    if content is None:
        return kept, False
    name = entry.name.encode()
    mark = hashlib.blake2b(b"mark", key=secret, digest_size=_MARK_BYTES).digest()
    key = hashlib.blake2b(name, key=secret, digest_size=32).digest()
    digest = mark + hashlib.blake2b(content, key=key, digest_size=32).digest()
    if kept is None:
        return digest, False
    if len(kept) == _FORMER_BYTES:
        former = hashlib.sha256(name).digest()
        return digest, kept != hashlib.blake2b(content, key=former, digest_size=_FORMER_BYTES).digest()
    # Under a secret that was lost, it tells nothing. The service compares in any case.
    return digest, kept != digest and kept[:_MARK_BYTES] == mark
