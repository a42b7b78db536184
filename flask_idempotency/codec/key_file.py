"""A file with secrets in it: read only when nobody else can, and written so that nobody else ever could.

The rules are those of ssh (`sshkey_perm_ok` for keys, and `StrictModes` for what leads to them): the file is a regular one,
no link; it belongs to the user of this process or to root, and is open to its owner only; and no folder on the way to it
belongs to another user or may be written to by one. A folder with the sticky bit (/tmp) may be: nobody can rename others'
files there. Links among the folders are followed, and the folders that they are in are looked at too; ssh does not do that.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flask_idempotency.engine.errors import ConfigurationError

MAX_BYTES: Final = 64 * 1024
"""A ring of a thousand keys. What is larger is not a ring, and need not be read to the end to know that."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# ELOOP on Linux and macOS, and what the BSDs say.
_IS_LINK = frozenset({errno.ELOOP, errno.EMLINK})
_WRITERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40
"""As many as Linux follows."""


def read_private(path: Path) -> str:
    """Return the text of this file. Raise `ConfigurationError` if another user could have read, changed or replaced it."""
    try:
        # Not to wait for whoever opens the other end of a pipe; and not to follow whoever may turn a link.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _IS_LINK:
            raise ConfigurationError(
                f"The key file {path} is a symbolic link. Who can change the link chooses the keys. Name the file itself; "
                "or pass the ring as an environment variable (env:NAME), where a platform mounts secrets as links."
            ) from None
        raise ConfigurationError(f"The key file {path} cannot be read ({type(error).__name__}).") from error
    try:
        # Asked of what is open, not of the name, which may stand for something else by now.
        _refuse_shared(path, os.fstat(descriptor))
        _refuse_shared_folders(path)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"The key file {path} cannot be read ({type(error).__name__}).") from error
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
    user = os.geteuid()
    if status.st_uid not in (0, user):
        raise ConfigurationError(
            f"The key file {path} belongs to user {status.st_uid}, and this process runs as user {user}. "
            f"Run: chown {user} {path}"
        )
    if status.st_mode & _OTHERS:
        raise ConfigurationError(
            f"The key file {path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}). Run: chmod 600 {path}"
        )


def _refuse_shared_folders(path: Path) -> None:
    """Look at every folder on the way to the file: another user who may rename something there can put an old key file in its
    place, or turn a link to one."""
    user = os.geteuid()
    for folder in dict.fromkeys(_way_to(path, user)):
        status = os.stat(folder)
        if status.st_uid not in (0, user):
            raise ConfigurationError(
                f"The folder {folder} of the key file {path} belongs to user {status.st_uid}, and this process runs as user "
                f"{user}. Keep the file in a folder of user {user} or of root."
            )
        if status.st_mode & _WRITERS and not status.st_mode & stat.S_ISVTX:
            raise ConfigurationError(
                f"The folder {folder} of the key file {path} may be written to by others "
                f"(mode {stat.S_IMODE(status.st_mode):04o}). Run: chmod go-w {folder}"
            )


def _way_to(path: Path, user: int) -> Iterator[Path]:
    """Yield each folder that the kernel goes through, those that links are in and lead through included."""
    here, rest, links = Path(os.sep), [*reversed((Path.cwd() / path).parent.parts[1:])], 0
    yield here
    while rest:
        step = here / rest[-1]
        if rest.pop() == os.pardir:
            here = here.parent
            continue
        status = os.lstat(step)
        if not stat.S_ISLNK(status.st_mode):
            here = step
            yield here
            continue
        links += 1
        # A folder with the sticky bit may hold links of other users.
        if status.st_uid not in (0, user) or links > _MOST_LINKS:
            raise ConfigurationError(
                f"The link {step} on the way to the key file {path} belongs to user {status.st_uid}, or follows too many "
                "others. Name the file itself."
            )
        target = Path(os.readlink(step))
        here = Path(os.sep) if target.is_absolute() else here
        rest.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))


def _make_durable(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
