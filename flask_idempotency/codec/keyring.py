"""Keys that wrap keys: what a key service must offer, and a ring that is read from the application's own configuration.

Nothing here says a key in an error, a log or a repr. The id of a key, its kid, is no secret.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from importlib import import_module
from importlib.util import find_spec
from inspect import getattr_static
from pathlib import Path
from typing import Final, Protocol, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from flask_idempotency.engine.errors import ConfigurationError, CorruptRecord

# A file with secrets in it: read only when nobody else can, and written so that nobody else ever could.
#
# The rules are those of ssh (`sshkey_perm_ok` for keys, and `StrictModes` for what leads to them): the file is a regular one,
# no link; it belongs to the user of this process or to root, and is open to its owner only; and no folder on the way to it
# belongs to another user or may be written to by one. A folder with the sticky bit (/tmp) may be: nobody can rename others'
# files there. Links among the folders are followed, and the folders that they are in are looked at too; ssh does not do that.

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


KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
KID: Final = re.compile(r"[A-Za-z0-9._-]{1,32}")

_WRAPPED: Final = 1
_HOW = "Make one with `flask idempotency keys generate`."
_TAKEN = {"env", "file"}
"""As the id of a key they would make one line of a ring pass for the place of another."""
_FACTORY = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)


class KeyProvider(Protocol):
    """Wraps data keys, so that a store can keep them. A key that wraps need never leave the service that has it.

    `wrap` and `unwrap` raise `StoreUnavailable` when the service does not answer. `context` is not secret; what was
    wrapped with one must not be unwrapped with another. Called from several threads at once.
    """

    @property
    def newest(self) -> str:
        """The id of the key that wraps from now on. Asked for every answer, so it must be at hand."""
        ...

    def kids(self) -> Sequence[str]:
        """The ids of all keys that unwrap, newest first. Each matches `KID`."""
        ...

    def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes: ...

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
        """Raises `CorruptRecord` when there is no such key, or when this is not what it once wrapped in this context."""
        ...


class KeyRing:
    """Implements `KeyProvider` with AES-256-GCM and keys that this process holds. Stateless once made.

    A wrapped key is a byte that says 1, a nonce of 12 bytes, and the key encrypted with its tag: 61 bytes for 32. Nonces
    are random, which is safe for 2³² wrapped keys under one key of the ring: a number that no one has tenants for.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        """The newest first. Raises `ConfigurationError`."""
        faults = [fault for kid, key in keys.items() for fault in _faults(kid, key)]
        if not keys:
            faults = [f"The key ring is empty. {_HOW}"]
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
            raise CorruptRecord(f"a data key under {kid!r} is wrapped in a way that is not known to this release")
        try:
            return cipher.decrypt(wrapped[1 : 1 + NONCE_BYTES], wrapped[1 + NONCE_BYTES :], context)
        except (InvalidTag, ValueError) as error:
            raise CorruptRecord(
                f"the key {kid!r} of the ring does not open a data key that names it: either the store was damaged, or "
                f"IDEMPOTENCY_KEY_RING has another key under this id here than where it was wrapped"
            ) from error

    def _cipher(self, kid: str) -> AESGCM:
        if kid not in self._ciphers:
            raise CorruptRecord(
                f"the key {kid!r} is not in the ring: put it back into IDEMPOTENCY_KEY_RING, after the newest"
            )
        return self._ciphers[kid]


def load_ring(source: object) -> KeyProvider:
    """The provider that this setting names. Raises `ConfigurationError`, which never says a key.

    A mapping of ids to keys in base64, newest first; the same as text, `id:key,id:key`; `env:NAME` of a variable that
    holds such a text; `file:/path` of a file that has one `id:key` on a line; `package.module:factory`, which is called
    and gives any of these; or a `KeyProvider`, which is used as it is.
    """
    if isinstance(source, Mapping):
        return _ring((str(kid), text) for kid, text in source.items())
    if isinstance(source, str):
        return _named(source.strip())
    missing = [name for name in ("newest", "kids", "wrap", "unwrap") if getattr_static(source, name, None) is None]
    if missing:
        raise ConfigurationError(
            f"A key provider needs newest, kids, wrap and unwrap; a {type(source).__name__} has no {', '.join(missing)}."
        )
    return cast("KeyProvider", source)


def generate(kid: str | None = None, *, today: date | None = None) -> str:
    """A new key as one line of a ring, `id:key`. Its id is the date unless one is given."""
    kid = (today or datetime.now(UTC).date()).isoformat() if kid is None else kid
    key = os.urandom(KEY_BYTES)
    if faults := _faults(kid, key):
        raise ConfigurationError(*faults)
    return f"{kid}:{b64encode(key).decode('ascii')}"


def _named(source: str) -> KeyProvider:
    if source.startswith("env:"):
        name = source.removeprefix("env:")
        if not os.environ.get(name, "").strip():
            raise ConfigurationError(f"The key ring is to be in the environment variable {name}, which is not set.")
        return _written(os.environ[name].split(","))
    if source.startswith("file:"):
        return _written(read_private(Path(source.removeprefix("file:"))).splitlines())
    # Whole keys end in "=", and no name does.
    factory = _FACTORY.fullmatch(source)
    return _made_by(factory[1], factory[2]) if factory is not None else _written(source.split(","))


def _made_by(module: str, name: str) -> KeyProvider:
    # `name` may be what somebody's shell has left of a key, and `module` a key that was written the wrong way round. Neither
    # is said, nor quoted by what Python would raise, unless there is such a package.
    if not _is_package(module.partition(".")[0]):
        raise ConfigurationError(
            "The key ring is read as the name of a function, package.module:function, and there is no such package. If it is "
            f"a key: its id comes first, then a colon, then {KEY_BYTES} bytes in base64. {_HOW}"
        )
    try:
        factory = getattr(import_module(module), name, None)
    except ImportError as error:
        raise ConfigurationError(
            f"The key ring is to come from the module {module}, which cannot be imported ({type(error).__name__}). "
            f"If {module} is the id of a key, that key is not {KEY_BYTES} bytes in base64. {_HOW}"
        ) from error
    if not callable(factory):
        raise ConfigurationError(f"The key ring is to come from a function in the module {module}, which is not there.")
    made = factory()
    if isinstance(made, str):
        # Not another factory's name: two of them could call each other for ever.
        return _written(made.split(","))
    return load_ring(made)


def _is_package(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # of what was loaded in another way, such as __main__
        return True


def _written(lines: Iterable[str]) -> KeyRing:
    pairs: list[tuple[str, object]] = []
    faults = []
    for number, line in enumerate(lines, 1):
        if not (text := line.strip()) or text.startswith("#"):
            continue
        kid, separator, key = text.partition(":")
        if separator:
            pairs.append((kid.strip(), key.strip()))
        else:
            faults.append(f"Entry {number} of the key ring is not of the form id:key. {_HOW}")
    if faults:
        raise ConfigurationError(*faults)
    return _ring(pairs)


def _ring(pairs: Iterable[tuple[str, object]]) -> KeyRing:
    keys: dict[str, bytes] = {}
    faults = []
    for kid, text in pairs:
        key = _decoded(text)
        if kid in keys:
            faults.append(f"The key ring has two keys with the id {_shown(kid)}. Give the new one an id of its own.")
        elif key is None:
            faults.append(f"The key {_shown(kid)} of the ring is not {KEY_BYTES} bytes in base64. {_HOW}")
        else:
            keys[kid] = key
            faults += _faults(kid, key)
    if faults:
        raise ConfigurationError(*faults)
    return KeyRing(keys)


def _decoded(text: object) -> bytes | None:
    try:
        return b64decode(text.strip(), validate=True) if isinstance(text, str) else None
    except (NotBase64, ValueError):
        return None


def _faults(kid: str, key: bytes) -> list[str]:
    faults = []
    if not KID.fullmatch(kid) or kid in _TAKEN:
        faults.append(
            f"The id of a key is 1 to 32 letters, digits, dots, hyphens or underscores, and not env or file; "
            f"{_shown(kid)} will not do."
        )
    if len(key) != KEY_BYTES:
        faults.append(f"The key {_shown(kid)} of the ring has not {KEY_BYTES} bytes. {_HOW}")
    elif not any(key):
        faults.append(f"The key {_shown(kid)} of the ring is all zeros. {_HOW}")
    return faults


def _shown(kid: str) -> str:
    """The id, if it is one: what stands in its place may be the key, written the wrong way round."""
    return repr(kid) if KID.fullmatch(kid) else "(not shown)"
