"""The keys that wrap data keys: the `KeyProvider` protocol, the `KeyRing` in memory, and files that only their owner reads.

No error, log entry or repr shows a key. The id of a key, its kid, is not secret.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord

__all__ = ["KeyProvider", "KeyRing"]

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
KID: Final = re.compile(r"[A-Za-z0-9._-]{1,32}")
MAKE_KEY: Final = "Make one with `flask idempotency keys generate`."
MAX_BYTES: Final = 64 * 1024
"""A ring of a thousand keys. We do not read a larger file to its end."""

_WRAPPED: Final = 1
_RESERVED_KIDS = {"env", "file"}
"""With one of these as its id, a line of a ring would look like a place where a ring is."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_IS_LINK = frozenset({errno.ELOOP, errno.EMLINK})
"""ELOOP on Linux and macOS, EMLINK on the BSDs."""
_WRITERS = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40
"""As many as Linux follows."""


class KeyProvider(Protocol):
    """Wraps data keys, so that a store can keep them. The wrapping key may stay in your key service.

    `wrap` and `unwrap` raise `StoreUnavailable` if the service does not respond. `context` is not secret; refuse to
    unwrap with another one. Several threads call these methods at the same time.
    """

    @property
    def newest(self) -> str:
        """Return the id of the key that wraps from now on. We read it for every response, so it must be fast."""
        ...

    def kids(self) -> Sequence[str]:
        """Return the ids of all keys that unwrap, newest first. An id has 1 to 32 letters, digits, `.`, `-` or `_`."""
        ...

    def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes:
        """Return this data key, encrypted."""
        ...

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
        """Return the data key. Raises `CorruptRecord` if the key is unknown, or did not wrap this in this context."""
        ...


class KeyRing:
    """A `KeyProvider` that wraps with AES-256-GCM under keys that this process holds. It never changes.

    A wrapped key is a byte 1, a nonce of 12 bytes, and the encrypted key with its tag: 61 bytes for 32. Nonces are random,
    which is safe for 2³² wrapped keys under one key of the ring.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        """Take the keys, newest first. Raises `ConfigurationError`."""
        faults = [fault for kid, key in keys.items() for fault in key_faults(kid, key)]
        if not keys:
            faults = [f"The key ring is empty. {MAKE_KEY}"]
        if faults:
            raise ConfigurationError(*faults)
        self._ciphers = {kid: AESGCM(key) for kid, key in keys.items()}
        self._kids = tuple(keys)

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self._kids)})"

    @property
    def newest(self) -> str:
        return self._kids[0]

    def kids(self) -> Sequence[str]:
        return self._kids

    def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return bytes((_WRAPPED,)) + nonce + self._cipher(kid).encrypt(nonce, key, context)

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
        cipher = self._cipher(kid)
        if wrapped[:1] != bytes((_WRAPPED,)):
            raise CorruptRecord(f"a data key under {kid!r} is wrapped in a format that this release does not know")
        try:
            return cipher.decrypt(wrapped[1 : 1 + NONCE_BYTES], wrapped[1 + NONCE_BYTES :], context)
        except (InvalidTag, ValueError) as error:
            raise CorruptRecord(
                f"the key {kid!r} of the ring does not open a data key that names it: either the store was damaged, or "
                "IDEMPOTENCY_KEY_RING has another key under this id here than where it was wrapped"
            ) from error

    def _cipher(self, kid: str) -> AESGCM:
        if kid not in self._ciphers:
            raise CorruptRecord(not_in_ring(kid))
        return self._ciphers[kid]


def not_in_ring(kid: str) -> str:
    """Return the fault of a data key that a key wraps which is not here."""
    return f"the key {kid!r} is not in the ring: put it back into IDEMPOTENCY_KEY_RING, after the newest"


def key_faults(kid: str, key: bytes) -> list[str]:
    """Return one sentence for each fault of this entry of a ring."""
    faults = []
    if not KID.fullmatch(kid) or kid in _RESERVED_KIDS:
        faults.append(
            f"The id of a key is 1 to 32 letters, digits, dots, hyphens or underscores, and not env or file; "
            f"{shown_kid(kid)} is none."
        )
    if len(key) != KEY_BYTES:
        faults.append(f"The key {shown_kid(kid)} of the ring does not have {KEY_BYTES} bytes. {MAKE_KEY}")
    elif not any(key):
        faults.append(f"The key {shown_kid(kid)} of the ring is all zeros. {MAKE_KEY}")
    return faults


def shown_kid(kid: str) -> str:
    """Return the id for a text. Hide anything that is no id: it may be the key, if id and key are swapped."""
    return repr(kid) if KID.fullmatch(kid) else "(not shown)"


def read_private(path: Path) -> str:
    """Return the text of this file. Raise `ConfigurationError` if another user could have read, changed or replaced it.

    The rules are those of ssh (`sshkey_perm_ok`, `StrictModes`). The file is a regular one and no link. It belongs to this
    user or to root, and only its owner may open it. No folder on the way belongs to another user or may be written to by
    one, unless it has the sticky bit: in /tmp, users cannot rename the files of others. Unlike ssh, we also check the folders
    that links lead through.
    """
    try:
        # Do not block on a pipe, and do not follow a link: another user may change where it leads.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _IS_LINK:
            raise ConfigurationError(
                f"The key file {path} is a symbolic link. Who can change the link chooses the keys. Name the file itself; "
                "or pass the ring as an environment variable (env:NAME), where a platform mounts secrets as links."
            ) from None
        raise ConfigurationError(f"The key file {path} cannot be read ({type(error).__name__}).") from error
    try:
        # Check the open file: the name may refer to another one by now.
        status, user = os.fstat(descriptor), os.geteuid()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"The key file {path} is not a file.")
        if status.st_uid not in (0, user):
            raise ConfigurationError(
                f"The key file {path} belongs to user {status.st_uid}, and this process runs as user {user}. "
                f"Run: chown {user} {path}"
            )
        if status.st_mode & _OTHERS:
            raise ConfigurationError(
                f"The key file {path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}). Run: chmod 600 {path}"
            )
        _refuse_shared_folders(path)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"The key file {path} cannot be read ({type(error).__name__}).") from error
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise ConfigurationError(f"The key file {path} is larger than {MAX_BYTES} bytes: a key file is smaller.")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        # Not chained: that error carries the bytes.
        raise ConfigurationError(f"The key file {path} is not plain text.") from None


def write_private(path: Path, text: str, *, replace: bool) -> None:
    """Write the whole text to a file that only its owner may read, or leave the file as it was.

    Raises `FileExistsError` if there is a file, unless you `replace` it.
    """
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
            os.link(draft, path)  # unlike a rename, it fails if there is a file
    finally:
        draft.unlink(missing_ok=True)
    # Make the name of the file durable too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _refuse_shared_folders(path: Path) -> None:
    """Check every folder on the way to the file.

    A user who may rename something in one of them can put an old key file in the place of this one.
    """
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
    """Yield each folder that the kernel visits on the way, including those that links are in and lead through."""
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
        if status.st_uid not in (0, user) or links > _MAX_LINKS:
            raise ConfigurationError(
                f"The link {step} on the way to the key file {path} belongs to user {status.st_uid}, or follows too many "
                "others. Name the file itself."
            )
        target = Path(os.readlink(step))
        here = Path(os.sep) if target.is_absolute() else here
        rest.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
