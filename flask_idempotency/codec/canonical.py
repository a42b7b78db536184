"""Digest a JSON body with the optional package orjson, in a third of the engine's time and to the same bytes.

Hosts with and without orjson may share a store, so `canonical_json` here returns what the engine's function of that name
returns, or None for "ask the engine". orjson sorts and prints in native code, but it does not refuse what the engine
refuses, and prints some numbers in another way than RFC 8785. Why the result is safe:

1. *Each value is valid for both.* orjson refuses text that is not JSON or UTF-8, NaN and lone surrogates. With
   OPT_STRICT_INTEGER it refuses integers that a double cannot count to.
2. *Output is no longer than input, token by token, white space aside.* A string shrinks, or consists of characters that stand
   for themselves and of escapes that JSON demands, in their only short form. An integer is itself, or loses the sign of -0.
   A decimal may grow: point 5.
3. *So equal lengths mean equal tokens.* A member that was named twice is gone from the output, with five bytes at least. An
   escape such as `\\u00e9` or `\\/` shrinks, so the engine takes such a document.
4. *The order of names is that of RFC 8785.* UTF-8 and UTF-16 sort alike up to U+FFFF. A character beyond begins with a byte
   from 0xF0, or is an escape, which point 3 excludes.
5. *Decimals are short.* In the output they have up to seven digits, a point and up to six more, and are at least 0.001. There
   orjson and RFC 8785 print alike. In the input no number has an exponent, so none grows. Two such texts of at most fifteen
   digits are one double only if they are equal (C's DBL_DIG). An integer that overflows orjson gets an exponent or `.0`.
6. *The depth is at most that of the engine*, by the indentation of a second output. A string contains no newline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from typing import Any, Final

from flask_idempotency.engine import fingerprint
from flask_idempotency.engine.fingerprint import MAX_CANONICAL_BYTES, MAX_DEPTH

_WHITE_SPACE: Final = b" \t\n\r"
_BEYOND_BMP: Final = bytes(range(0xF0, 0x100))
_TOO_DEEP: Final = b"\n" + b"  " * MAX_DEPTH
"""How a member of the last container begins that may not contain another one, at two spaces a level."""

# Without digits and signs, and with a comma for each character that a number may stand between, a decimal is ",.,". If it
# has an exponent, it is ",e," or ",.e,". A string may look so too, and is then taken for a number: the safe direction.
_COMMAS: Final = bytes.maketrans(b":[]}E", b",,,,e")
_DIGITS: Final = b"0123456789+-"

_UNSURE: Final = re.compile(rb"\.(?:0|000[0-9]+|[0-9]{7,}|(?<=[0-9]{8}\.)[0-9]+)[,}\]]")
"""A decimal that point 5 does not describe. It begins with a literal byte, which makes the search fast."""


@cache
def _orjson() -> Any:
    """Return the package, or None. The guard loads it when it is made, because few programs that import this module need it."""
    try:
        import orjson
    except ImportError:
        return None
    return orjson


@cache
def fastest_json_digest() -> Callable[..., bytes]:
    """Return the `json_digest` of this module, or of `fingerprint` if this host has no orjson."""
    return fingerprint.json_digest if _orjson() is None else json_digest


def json_digest(data: bytes, *, ignore: Sequence[str] = ()) -> bytes:
    """Return `fingerprint.json_digest` of this document, nearly always sooner."""
    if ignore or (canonical := canonical_json(data)) is None:
        return fingerprint.json_digest(data, ignore=ignore)
    return b"J" + sha256(canonical).digest()


def canonical_json(raw: bytes) -> bytes | None:
    """Return `fingerprint.canonical_json` of this document; None if only that function can tell. It needs orjson."""
    if len(raw) > MAX_CANONICAL_BYTES:
        return None
    orjson = _orjson()
    try:
        document = orjson.loads(raw)
        text: bytes = orjson.dumps(document, option=orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER)
        indented: bytes = orjson.dumps(document, option=orjson.OPT_INDENT_2)
    except (ValueError, TypeError):
        return None
    if text[0] not in b"{[" or _TOO_DEEP in indented:
        return None
    if len(text) != len(raw) and len(text) - text.count(b" ") != len(raw.translate(None, _WHITE_SPACE)):
        return None
    if not raw.isascii() and len(raw.translate(None, _BEYOND_BMP)) != len(raw):
        return None
    numbers = text.translate(_COMMAS, _DIGITS)
    if b",.," in numbers:
        sent = raw.translate(_COMMAS, _DIGITS + _WHITE_SPACE)
        if b",e," in sent or b",.e," in sent or _UNSURE.search(text):
            return None
    return None if b",e," in numbers or b",.e," in numbers else text
