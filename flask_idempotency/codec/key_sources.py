"""Where a key ring comes from: text, environment, file, factory, or a file with a passphrase.

`load_ring` reads the value of `IDEMPOTENCY_KEY_RING`. To support another source, such as Vault, add it there; a user can
also pass an object of their own that implements `KeyProvider`. No error shows a key or a passphrase.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from importlib import import_module
from importlib.util import find_spec
from inspect import getattr_static
from pathlib import Path
from typing import Final, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from flask_idempotency.codec.keyring import (
    KEY_BYTES,
    MAKE_KEY,
    NONCE_BYTES,
    KeyProvider,
    KeyRing,
    key_faults,
    read_private,
    shown_kid,
    write_private,
)
from flask_idempotency.engine.errors import ConfigurationError
from flask_idempotency.engine.keys import encode

__all__ = ["PassphraseKeyFile"]

SCHEMES: Final = ("aws-kms", "vault", "gcp-kms")
"""How the URLs of key services begin."""

_FACTORY = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)


def load_ring(source: object) -> KeyProvider:
    """Return the provider that `IDEMPOTENCY_KEY_RING` names. Raises `ConfigurationError`, which never shows a key.

    `source` is one of: a mapping of ids to keys in base64, newest first; the same as text, `id:key,id:key`; `env:NAME`, a
    variable that holds such a text; `file:/path`, a file with one `id:key` on a line; `package.module:factory`, a function
    that returns a mapping, such a text or a `KeyProvider`; the URL of a key service, see `key_services`; a `KeyProvider`; or
    a list of these, newest first.
    """
    if isinstance(source, list | tuple):
        return _Several([load_ring(each) for each in source])
    if isinstance(source, Mapping):
        return _from_pairs((str(kid), text) for kid, text in source.items())
    if isinstance(source, str):
        source = source.strip()
        if source.startswith("env:"):
            name = source.removeprefix("env:")
            if not os.environ.get(name, "").strip():
                raise ConfigurationError(
                    f"The key ring is configured as the environment variable {name}, which is not set."
                )
            return _from_lines(os.environ[name].split(","))
        if source.startswith("file:"):
            return _from_lines(read_private(Path(source.removeprefix("file:"))).splitlines())
        scheme, _, rest = source.partition(":")
        if scheme in SCHEMES and len(_decoded(rest) or b"") != KEY_BYTES:
            from flask_idempotency.codec.key_services import SERVICES  # only with such a service

            return SERVICES[scheme](rest)
        # Whole keys end in "=", and no name does.
        factory = _FACTORY.fullmatch(source)
        return _from_factory(factory[1], factory[2]) if factory is not None else _from_lines(source.split(","))
    missing = [name for name in ("newest", "kids", "wrap", "unwrap") if getattr_static(source, name, None) is None]
    if missing:
        raise ConfigurationError(
            f"A key provider needs newest, kids, wrap and unwrap; a {type(source).__name__} has no {', '.join(missing)}."
        )
    return cast("KeyProvider", source)


def generate(kid: str | None = None, *, today: date | None = None) -> str:
    """Return a new key as one line of a ring, `id:key`. Its id is the date and a random suffix, unless you give one.

    The date alone would name two keys that were made on one day, and the ring of one host would not open those of another.
    """
    kid = f"{(today or datetime.now(UTC).date()).isoformat()}-{os.urandom(3).hex()}" if kid is None else kid
    key = os.urandom(KEY_BYTES)
    if faults := key_faults(kid, key):
        raise ConfigurationError(*faults)
    return f"{kid}:{b64encode(key).decode('ascii')}"


def _from_factory(module: str, name: str) -> KeyProvider:
    # `name` may be what a shell has left of a key, and `module` a key, if id and key are swapped. So show neither, and do not
    # let Python quote them, unless there is such a package.
    try:
        is_package = find_spec(module.partition(".")[0]) is not None
    except ValueError:  # a module without a spec, such as __main__
        is_package = True
    if not is_package:
        raise ConfigurationError(
            "The key ring is read as the name of a function, package.module:function, and there is no such package. If you "
            f"meant a key: its id comes first, then a colon, then {KEY_BYTES} bytes in base64. {MAKE_KEY}"
        )
    try:
        factory = getattr(import_module(module), name, None)
    except ImportError as error:
        raise ConfigurationError(
            f"The key ring names the module {module}, which cannot be imported ({type(error).__name__}). "
            f"If {module} is the id of a key, that key is not {KEY_BYTES} bytes in base64. {MAKE_KEY}"
        ) from error
    if not callable(factory):
        raise ConfigurationError(
            f"The key ring names a function of the module {module}, and there is no such function."
        )
    made = factory()
    if isinstance(made, str):
        # Do not follow the name of another factory: two could call each other for ever.
        return _from_lines(made.split(","))
    return load_ring(made)


def _from_lines(lines: Iterable[str]) -> KeyRing:
    pairs: list[tuple[str, object]] = []
    faults = []
    for number, line in enumerate(lines, 1):
        if not (text := line.strip()) or text.startswith("#"):
            continue
        kid, separator, key = text.partition(":")
        if separator:
            pairs.append((kid.strip(), key.strip()))
        else:
            faults.append(f"Entry {number} of the key ring does not have the form id:key. {MAKE_KEY}")
    if faults:
        raise ConfigurationError(*faults)
    return _from_pairs(pairs)


def _from_pairs(pairs: Iterable[tuple[str, object]]) -> KeyRing:
    keys: dict[str, bytes] = {}
    faults = []
    for kid, text in pairs:
        key = _decoded(text)
        if kid in keys:
            faults.append(f"The key ring has two keys with the id {shown_kid(kid)}. Give the new one another id.")
        elif key is None:
            faults.append(f"The key {shown_kid(kid)} of the ring is not {KEY_BYTES} bytes in base64. {MAKE_KEY}")
        else:
            keys[kid] = key
            faults += key_faults(kid, key)
    if faults:
        raise ConfigurationError(*faults)
    return KeyRing(keys)


def _decoded(text: object) -> bytes | None:
    try:
        return b64decode(text.strip(), validate=True) if isinstance(text, str) else None
    except (NotBase64, ValueError):
        return None


class _Several:
    """A `KeyProvider` of several: new data keys are wrapped by the newest key of the first. For a move between sources."""

    def __init__(self, providers: Sequence[KeyProvider]) -> None:
        self._providers = providers
        kids = self.kids()
        if not kids:
            raise ConfigurationError(f"The key ring is empty. {MAKE_KEY}")
        if twice := {kid for kid in kids if kids.count(kid) > 1}:
            raise ConfigurationError(f"Two sources of the key ring have a key with the id {shown_kid(min(twice))}.")

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self.kids())})"

    @property
    def newest(self) -> str:
        return self._providers[0].newest

    def kids(self) -> list[str]:
        return [kid for provider in self._providers for kid in provider.kids()]

    def wrap(self, kid: str, key: bytes, *, context: bytes) -> bytes:
        return self._of(kid).wrap(kid, key, context=context)

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
        return self._of(kid).unwrap(kid, wrapped, context=context)

    def _of(self, kid: str) -> KeyProvider:
        """Return the provider that has this key. The first says why none has it."""
        return next((each for each in self._providers if kid in each.kids()), self._providers[0])


FORMAT: Final = 1
COST: Final = 2**17
"""The cost of scrypt that OWASP recommends: 128 MiB and a third of a second, once for each start."""
COSTS: Final = frozenset(2**exponent for exponent in range(14, 21))
"""A lower cost does not stop a guesser. A higher one takes over a gigabyte, and an attacker could write it into the file."""
MIN_PASSPHRASE: Final = 16
"""Characters. A thief of the file can guess without limit."""

_BLOCK: Final = 8
_SALT_BYTES: Final = 16
_LABEL: Final = b"flask_idempotency/wrapped-file/1"


class PassphraseKeyFile(KeyRing):
    """A `KeyProvider` for a file that is worth nothing without its passphrase.

    Set `IDEMPOTENCY_KEY_RING` to one. It reads the file once, so restart after you add a key. The file is JSON: how scrypt
    makes a key of the passphrase, and each key of the ring encrypted with that by AES-256-GCM, newest first. Each is bound
    to its id, its place and the number of keys, so moving lines cannot make an old key the newest again.
    """

    def __init__(self, path: str | Path, passphrase: str) -> None:
        """Read the file. Raises `ConfigurationError`, which shows neither a key nor the passphrase."""
        super().__init__(_read(Path(path), passphrase)[1])
        self._path = str(path)

    def __repr__(self) -> str:
        return f"PassphraseKeyFile({self._path!r}: {', '.join(self.kids())})"

    @classmethod
    def make(cls, path: str | Path, passphrase: str, kid: str, *, cost: int = COST) -> PassphraseKeyFile:
        """Write a new file with one key, which only its owner may read. `cost` is that of scrypt.

        Raises `ConfigurationError` if the file exists, or the passphrase has less than 16 characters.
        """
        if len(passphrase) < MIN_PASSPHRASE:
            raise ConfigurationError(f"The passphrase of a key file needs at least {MIN_PASSPHRASE} characters.")
        if cost not in COSTS:
            raise ConfigurationError(f"The cost of a key file is a power of two from {min(COSTS)} to {max(COSTS)}.")
        try:
            _write(Path(path), passphrase, {kid: os.urandom(KEY_BYTES)}, cost=cost, replace=False)
        except FileExistsError as error:
            raise ConfigurationError(f"The file {path} already exists: add a key to it, or name another.") from error
        return cls(path, passphrase)

    @classmethod
    def add(cls, path: str | Path, passphrase: str, kid: str, *, newest: bool = True) -> PassphraseKeyFile:
        """Add a key as the newest, or as the second, so that every process knows it before you use it.

        Raises `ConfigurationError` if the file has a key of this id, or does not open.
        """
        cost, keys = _read(Path(path), passphrase)
        if kid in keys:
            raise ConfigurationError(f"The key file has a key {kid!r} already. Give the new one another id.")
        pairs = list(keys.items())
        pairs.insert(0 if newest else 1, (kid, os.urandom(KEY_BYTES)))
        _write(Path(path), passphrase, dict(pairs), cost=cost, replace=True)
        return cls(path, passphrase)

    @classmethod
    def arrange(cls, path: str | Path, passphrase: str, kids: Sequence[str]) -> PassphraseKeyFile:
        """Keep these keys in this order, newest first. Delete all others for ever.

        Raises `ConfigurationError` if the file has no such key, or you name one twice or none.
        """
        cost, keys = _read(Path(path), passphrase)
        if not kids or len(set(kids)) != len(kids) or not set(kids) <= set(keys):
            raise ConfigurationError(
                f"The key file has the keys {', '.join(keys)}: name each that stays once, in order."
            )
        _write(Path(path), passphrase, {kid: keys[kid] for kid in kids}, cost=cost, replace=True)
        return cls(path, passphrase)


def _write(path: Path, passphrase: str, keys: Mapping[str, bytes], *, cost: int, replace: bool) -> None:
    KeyRing(keys)  # do not write what a reader would refuse
    salt = os.urandom(_SALT_BYTES)
    cipher = _cipher(passphrase, salt, cost)
    wrapped = []
    for place, (kid, key) in enumerate(keys.items()):
        nonce = os.urandom(NONCE_BYTES)
        sealed = nonce + cipher.encrypt(nonce, key, _bound(salt, cost, kid, place, len(keys)))
        wrapped.append({"kid": kid, "wrapped": b64encode(sealed).decode("ascii")})
    scrypt = {"salt": b64encode(salt).decode("ascii"), "n": cost, "r": _BLOCK, "p": 1}
    content = {"format": FORMAT, "scrypt": scrypt, "keys": wrapped}
    write_private(path, json.dumps(content, indent=2) + "\n", replace=replace)


def _read(path: Path, passphrase: str) -> tuple[int, dict[str, bytes]]:
    """Return the cost of scrypt and the keys, newest first."""
    text = read_private(path)
    try:
        content = json.loads(text)
        scrypt = content["scrypt"]
        salt, cost = b64decode(scrypt["salt"], validate=True), scrypt["n"]
        known = content["format"] == FORMAT and scrypt["r"] == _BLOCK and scrypt["p"] == 1
        if not known or type(cost) is not int or cost not in COSTS or len(salt) != _SALT_BYTES:
            raise ValueError("unknown format or cost")
        cipher = _cipher(passphrase, salt, cost)
        entries = [(str(entry["kid"]), b64decode(entry["wrapped"], validate=True)) for entry in content["keys"]]
        keys = {}
        for place, (kid, sealed) in enumerate(entries):
            bound = _bound(salt, cost, kid, place, len(entries))
            keys[kid] = cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], bound)
    except InvalidTag:
        raise ConfigurationError(
            f"The key file {path} does not open: the passphrase is wrong, or the file was changed."
        ) from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigurationError(
            f"The key file {path} cannot be read by this release ({type(error).__name__})."
        ) from None
    return cost, keys


def _cipher(passphrase: str, salt: bytes, cost: int) -> AESGCM:
    scrypt = Scrypt(salt=salt, length=KEY_BYTES, n=cost, r=_BLOCK, p=1)
    return AESGCM(scrypt.derive(passphrase.encode("utf-8", "surrogatepass")))


def _bound(salt: bytes, cost: int, kid: str, place: int, count: int) -> bytes:
    return encode(_LABEL, salt, b"%d" % cost, kid.encode(), b"%d" % place, b"%d" % count)
