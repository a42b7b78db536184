"""Compute the fingerprint of a request: a keyed digest of its parts and its canonical body.

A false mismatch is annoying; a false match is a wrong charge. So a body in doubt is compared byte by byte.
"""

from __future__ import annotations

import hashlib
import json.encoder
import math
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import lru_cache
from json import JSONDecoder, JSONEncoder
from json.encoder import encode_basestring
from struct import Struct
from typing import Any, Final

from flask_idempotency.engine.keys import Identity, encode
from flask_idempotency.engine.values import valueclass

VERSION: Final = 1
"""First byte of every fingerprint. Raise it with any change that gives an old request a new digest."""

SIZE: Final = 17
"""One version byte and 128 bits of MAC. RFC 2104 section 5 allows half of the hash, and half is enough: without the
secret an attacker cannot compute a digest, and so cannot search for two payloads that share one."""

MAX_CANONICAL_BYTES: Final = 256 * 1024
"""Larger payloads are compared byte by byte: parsed JSON takes up to forty times its size in memory."""

MAX_DEPTH: Final = 64
"""Deeper payloads are compared byte by byte. Far below the interpreter's own limit, which moves with the caller's
stack: the same payload must have the same digest wherever it is taken."""

MAX_NUMBER_LENGTH: Final = 64
"""A payload with a longer number is compared byte by byte. Conversion takes time quadratic in the length, and no double
needs more: 17 digits, up to 21 places before the point, and `%.40f` still fits."""

_MAX_SAFE_INTEGER: Final = 2**53 - 1
_NO_HEADERS: Final = encode()
_SIX_PARTS: Final = (6).to_bytes(2, "big")
_LENGTH: Final = Struct(">I").pack
_VERSION: Final = bytes((VERSION,))


@valueclass(frozen=True, slots=True)
class FilePart:
    """One file of a multipart form, its content already hashed by `content_digest`."""

    name: str
    filename: str
    content_type: str
    content: bytes


def fingerprint(
    identity: Identity,
    *,
    method: str,
    path: bytes,
    query: bytes,
    media_type: str,
    headers: Sequence[tuple[str, str]] = (),
    body: bytes,
) -> bytes:
    """Return `SIZE` bytes that two requests share only if all arguments are equal. `body` is a body digest from below.

    `media_type` counts: the same JSON document sent as `application/json` and as `application/vnd.x+json` gives two
    different requests.
    """
    selected = _NO_HEADERS
    if headers:
        selected = encode(*(_utf8(text) for name, value in headers for text in (name.lower(), value)))
    # The same bytes as `encode` of these six parts.
    parts = (
        _SIX_PARTS,
        _sized(method),
        _LENGTH(len(path)),
        path,
        _LENGTH(len(query)),
        query,
        _sized(media_type),
        _LENGTH(len(selected)),
        selected,
        _LENGTH(len(body)),
        body,
    )
    return _VERSION + identity.fingerprint(b"".join(parts))[: SIZE - 1]


def path_fingerprint(identity: Identity, path: bytes) -> bytes:
    """Return `SIZE` bytes for a request that is compared by its path alone."""
    return _VERSION + identity.fingerprint(encode(b"path", path))[: SIZE - 1]


@lru_cache(maxsize=256)
def _sized(text: str) -> bytes:
    data = _utf8(text)
    return _LENGTH(len(data)) + data


# Each kind of body digest begins with another letter: the bytes `{}` sent raw are not the JSON document `{}`.


def raw_digest(chunks: Iterable[bytes]) -> bytes:
    """Digest the body byte by byte."""
    return b"R" + content_digest(chunks)


def json_digest(data: bytes, *, ignore: Sequence[str] = ()) -> bytes:
    """Digest a JSON document in canonical form; byte by byte if parsers disagree on its meaning."""
    canonical = canonical_json(data, ignore=ignore)
    return raw_digest((data,)) if canonical is None else b"J" + hashlib.sha256(canonical).digest()


def form_digest(fields: Iterable[tuple[str, str]]) -> bytes:
    """Digest the fields of a form: names in order of first appearance, the values of each name in order.

    The order between values of different names does not count. A form that an earlier hook parsed no longer has it, and
    must have the same digest as an untouched form.
    """
    return b"F" + _fields(fields)


def multipart_digest(fields: Iterable[tuple[str, str]], files: Iterable[FilePart]) -> bytes:
    """Digest the parts of a form in `form_digest`'s order. Ignores the boundary, which differs in each attempt."""
    digest = hashlib.sha256(_fields(fields))
    for part in _by_name((file.name, file) for file in files):
        digest.update(encode(*map(_utf8, (part.name, part.filename, part.content_type)), part.content))
    return b"M" + digest.digest()


def unread_digest() -> bytes:
    """Return a digest for a body that cannot be read. It equals no other digest: a length alone proves no match."""
    return b"U" + secrets.token_bytes(32)


def content_digest(chunks: Iterable[bytes]) -> bytes:
    """Return the SHA-256 of these chunks together."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


def _fields(fields: Iterable[tuple[str, str]]) -> bytes:
    digest = hashlib.sha256()
    for name, value in _by_name((name, (name, value)) for name, value in fields):
        digest.update(encode(_utf8(name), _utf8(value)))
    return digest.digest()


def _by_name(items: Iterable[tuple[str, Any]]) -> Iterable[Any]:
    groups: dict[str, list[Any]] = {}
    for name, item in items:
        groups.setdefault(name, []).append(item)
    return (item for group in groups.values() for item in group)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def check_pointer(pointer: str) -> None:
    """Check a JSON Pointer (RFC 6901) to a part of a document. Raises `ValueError` with the reason."""
    if not isinstance(pointer, str):
        raise ValueError(f"a JSON Pointer is a string, not {type(pointer).__name__}")
    if pointer == "":
        raise ValueError('the JSON Pointer "" is the whole document: every payload would count as the same')
    if not pointer.startswith("/"):
        raise ValueError(f'the JSON Pointer {pointer!r} must start with "/", such as "/{pointer.lstrip("#/")}"')
    if re.search(r"~(?![01])", pointer):
        raise ValueError(f'"~" in the JSON Pointer {pointer!r} must be written "~0" (and "/" in a name "~1")')


def canonical_json(raw: bytes, *, ignore: Sequence[str] = ()) -> bytes | None:
    """The RFC 8785 form of this document without the parts that `ignore` points to; None when it has no safe one.

    None for anything that two readers may understand differently: a member named twice, a number that is not exactly
    what its double prints or an integer that a double cannot count to, NaN and infinities, lone surrogates, text that
    is not UTF-8 or not JSON, and what is larger, deeper or longer than the limits above. Never raises.
    """
    if len(raw) > MAX_CANONICAL_BYTES:
        return None
    try:
        text = raw.decode("utf-8").strip(" \t\n\r")
        # Unlike `decode`, it takes no regular expressions to skip white space.
        document, end = _DECODER.raw_decode(text)
        if end != len(text):
            return None
        if ignore and raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and _depth(document) > MAX_DEPTH:
            # Also in an ignored part: how deep the decoder can go depends on the caller's stack.
            return None
        for tokens in map(_tokens, ignore):
            _remove(document, tokens)
        return (_plain_text(raw, document) or _text(document, MAX_DEPTH)).encode("utf-8")
    except (ValueError, ArithmeticError, RecursionError):
        return None


class _Refused:
    """Marks a value that parsers may read differently. The document has no canonical form, unless the value is ignored."""


class _Removed:
    """Replaces an ignored array element, so that the indices of the next pointer stay valid."""


_REFUSED = _Refused()
_REMOVED = _Removed()


def _object(members: list[tuple[str, Any]]) -> dict[str, Any] | _Refused:
    document = dict(members)
    return document if len(document) == len(members) else _REFUSED


def _integer(literal: str) -> int | _Refused:
    # By length first: int() takes quadratic time.
    if len(literal) > 17:
        return _REFUSED
    number = int(literal)
    return number if -_MAX_SAFE_INTEGER <= number <= _MAX_SAFE_INTEGER else _REFUSED


def _float(literal: str) -> int | float | bytes | _Refused:
    """Return a number that Python prints as ECMAScript does; else its canonical text, as bytes to tell it from a string."""
    if len(literal) > MAX_NUMBER_LENGTH:
        return _REFUSED
    number = float(literal)
    # No two decimals of so few digits share a double (C's DBL_DIG), so this one is what its double prints.
    if len(literal) <= sys.float_info.dig and 1e-300 < abs(number) < 1e300:
        if number.is_integer() and abs(number) <= _MAX_SAFE_INTEGER:
            return int(number)
        if 1e-4 <= abs(number) < 1e16:
            return number
    shortest = repr(number)
    if shortest == literal and "e" not in literal and not literal.endswith(".0"):
        return number
    if math.isinf(number):
        return _REFUSED
    if not number:
        # What is below the smallest double becomes 0 too.
        return _REFUSED if re.match(r"-?[0.]*[1-9]", literal) else b"0"
    # A `Decimal` is made and compared exactly.
    return _ecmascript(Decimal(shortest)).encode() if Decimal(literal) == Decimal(shortest) else _REFUSED


def _ecmascript(number: Decimal) -> str:
    """Print the shortest digits of a double as ECMAScript's Number::toString (RFC 8785 section 3.2.2.3)."""
    negative, digits, _ = number.as_tuple()
    point = number.adjusted() + 1
    figures = "".join(map(str, digits)).rstrip("0")
    if len(figures) <= point <= 21:
        text = figures.ljust(point, "0")
    elif 0 < point <= 21:
        text = f"{figures[:point]}.{figures[point:]}"
    elif -6 < point <= 0:
        text = "0." + "0" * -point + figures
    else:
        text = figures[0] + ("." + figures[1:] if figures[1:] else "") + f"e{point - 1:+d}"
    return "-" + text if negative else text


_DECODER = JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=lambda _: _REFUSED, strict=True
)


_ENCODER = JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":"))
_in_c: Any = getattr(json.encoder, "c_make_encoder", None)
# The one that `encode` makes for each document. Some interpreters have none.
_chunks: Callable[[Any, int], Iterable[str]] = (
    _in_c(None, _ENCODER.default, encode_basestring, None, ":", ",", True, False, True)
    if _in_c
    else lambda document, _: _ENCODER.iterencode(document)
)


def _depth(document: Any) -> int:
    """Return how deep lists and objects are nested."""
    depth, level = 0, [document]
    while level := [each for each in level if isinstance(each, list | dict)]:
        depth += 1
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
    return depth


def _plain_text(raw: bytes, document: Any) -> str | None:
    """Return what `_text` returns, at half the cost, for most clients' documents; None for all others."""
    if not raw.isascii() or b"\\u" in raw or raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:
        return None
    try:
        return "".join(_chunks(document, 0))
    except TypeError:
        return None


def _text(value: Any, depth: int) -> str:
    kind = type(value)
    if kind is str:
        return encode_basestring(value)
    if kind is int or kind is float:
        return repr(value)
    if kind is bytes:
        return str(value, "ascii")
    if kind is bool:
        return "true" if value else "false"
    if value is None:
        return "null"
    if depth == 0 or value is _REFUSED:
        raise ValueError("this document has no safe canonical form")
    if kind is dict:
        # By UTF-16 code units, which differs from Python's order beyond U+FFFF.
        order = None if "".join(value).isascii() else lambda name: name.encode("utf-16-be")
        members = [f"{encode_basestring(name)}:{_text(value[name], depth - 1)}" for name in sorted(value, key=order)]
        return "{" + ",".join(members) + "}"
    return "[" + ",".join([_text(item, depth - 1) for item in value if item is not _REMOVED]) + "]"


@lru_cache(maxsize=1024)
def _tokens(pointer: str) -> tuple[str, ...]:
    check_pointer(pointer)
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in pointer[1:].split("/"))


def _remove(document: Any, tokens: tuple[str, ...]) -> None:
    *parents, last = tokens
    for token in parents:
        document = _child(document, token)
    if isinstance(document, dict):
        document.pop(last, None)
    elif isinstance(document, list) and _index(document, last) is not None:
        document[int(last)] = _REMOVED


def _child(document: Any, token: str) -> Any:
    if isinstance(document, dict):
        return document.get(token)
    if isinstance(document, list) and (index := _index(document, token)) is not None:
        return document[index]
    return None


def _index(array: list[Any], token: str) -> int | None:
    # Nine digits count further than any document here, and int() never meets a long one.
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", token):
        return None
    return int(token) if int(token) < len(array) else None
