"""A file with secrets in it: read only when nobody else can, and written so that nobody else ever could."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from flask_idempotency.engine.errors import ConfigurationError

MAX_BYTES: Final = 64 * 1024
"""A ring of a thousand keys. What is larger is not a ring, and need not be read to the end to know that."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_private(path: Path) -> str:
    """The text of this file. Raises `ConfigurationError` when anybody but its owner could have read or changed it."""
    try:
        # Not to wait for whoever opens the other end of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The key file {path} cannot be read ({type(error).__name__}).") from error
    try:
        # Asked of what is open, not of the name, which may stand for something else by now.
        _refuse_shared(path, os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise ConfigurationError(f"The key file {path} is larger than {MAX_BYTES} bytes: it is no key file.")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        # Not chained: that error carries the bytes.
        raise ConfigurationError(f"The key file {path} is not plain text.") from None


def write_private(path: Path, text: str, *, replace: bool) -> None:
    """The file holds this, readable by its owner only, or is as it was. Raises `FileExistsError` rather than replace."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        if replace:
            os.replace(draft, path)
        else:
            os.link(draft, path)  # unlike a rename, it fails where there is a file
    finally:
        draft.unlink(missing_ok=True)
    _make_durable(path.parent)


def _refuse_shared(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"The key file {path} is not a file.")
    if status.st_mode & _OTHERS:
        raise ConfigurationError(
            f"The key file {path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}). Run: chmod 600 {path}"
        )
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(
            f"The key file {path} is a link that another user made and may turn elsewhere. Name the file itself."
        )


def _make_durable(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
