"""Canonical JSON by orjson: the bytes of the engine's own way, or none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flask_idempotency.codec import canonical as subject
from flask_idempotency.codec.canonical import canonical_json, json_digest
from flask_idempotency.engine import fingerprint
from flask_idempotency.engine.fingerprint import MAX_CANONICAL_BYTES, MAX_DEPTH
from tests.long import unless_long


def spaced(text: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds("{}{}{}".format, SPACE, text, SPACE)


def units(character: str) -> list[int]:
    data = character.encode("utf-16-be")
    return [int.from_bytes(data[place : place + 2], "big") for place in range(0, len(data), 2)]


ODD_NUMBERS = """
-0 -0.0 1.0 1e400 -1e400 1E2 1e-3 15e-1 9007199254740991 9007199254740992 -9007199254740992 18446744073709551615
18446744073709551616 -9223372036854775809 9007199254740993.5 1234567890123456.7 5e-324 1e16 1e21 1e22 0.001 0.0001
0.00001 0.1234567 12345678.5 1234567.123456 -1234567.123456 NaN Infinity -Infinity 01 1. .5 +1 - 1e
"""

# Texts, and not documents: white space, escapes, order, repeated names and the spelling of numbers are what matters.
SPACE = st.sampled_from(("", "", "", " ", "\n", "\t", "\r\n", "  "))
CHARACTERS = st.sampled_from('ab/"\\ .,:eE-01[]{}\0\x1f\b\f\n\r\t\x7fé€\u2028\ud7ff\ue000\ufeff\uffff😀')
SHORT = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda character: SHORT.get(character) or (character if character >= " " else f"\\u{ord(character):04x}"),
    lambda character: "".join(f"\\u{unit:04X}" for unit in units(character)),
    lambda character: "".join(f"\\u{unit:04x}" for unit in units(character)),
    lambda character: character if character >= " " and character not in '"\\' else SHORT.get(character, "\\u0001"),
)
SPELLED = st.builds(lambda character, spell: spell(character), CHARACTERS, st.sampled_from(SPELLINGS))
STRINGS = st.builds(
    '"{}"'.format,
    st.sampled_from(
        ("", "a", "b", "\\u0061", "T07:00:00.000Z", ":1.5,", ",e,", "x1e5]", "\\ud800", "\\udc00", "\\x", "\n")
    )
    | st.lists(SPELLED, max_size=4).map("".join),
)
NUMBERS = (
    st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
    | st.integers(-(10**4), 10**4).map(str)
    | st.floats(allow_nan=False).map(repr)
    | st.sampled_from(ODD_NUMBERS.split())
)
TEXTS = st.recursive(
    STRINGS | NUMBERS | st.sampled_from(("true", "false", "null", "True", "")),
    lambda inner: (
        st.lists(spaced(inner), max_size=4).map(lambda items: f"[{','.join(items)}]")
        | st.lists(st.tuples(spaced(STRINGS), spaced(inner)), max_size=4).map(
            lambda members: f"{{{','.join(f'{name}:{value}' for name, value in members)}}}"
        )
    ),
    max_leaves=12,
)

JUNK = st.sampled_from(
    (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf", b"\0", b",", b"]", b"1")
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A text, and every third time with a fault: bytes put in, or in the place of others."""
    raw = draw(spaced(TEXTS)).encode()
    if draw(st.integers(0, 2)):
        return raw
    place = draw(st.integers(0, len(raw)))
    return raw[:place] + draw(JUNK | st.binary(max_size=3)) + raw[place + draw(st.integers(0, 2)) :]


def check(raw: bytes) -> None:
    expected = fingerprint.canonical_json(raw)

    assert canonical_json(raw) in (None, expected)
    assert json_digest(raw) == fingerprint.json_digest(raw)


@given(bodies() | st.binary())
@example(b"")
@example(b'["\\/\\/",18446744073709551616]')
@example(b'["\\u00e9\\u00e9",1e-3,1e-3,1e-3,1e-3]')
@example(b'{"a":1,"a":2,"b":[1e9,1e9]}')
@example(b'{"\\ud83d\\ude00":1e5,"\\ufb33":1E5,"x":1e5}')
def test_a_body_has_one_digest_with_and_without_orjson(raw: bytes) -> None:
    """Hosts with and without the package share a store: another digest would be a refused retry, or a wrong charge."""
    check(raw)


@pytest.mark.soak
@settings(deadline=None, max_examples=unless_long(300, long=20_000))
@given(bodies())
def test_a_long_search_finds_no_body_with_two_digests(raw: bytes) -> None:
    check(raw)


CHARGE = {"amount": 1299, "currency": "EUR", "items": [{"sku": "A-1", "gift": False}, {"sku": "B-2", "gift": None}]}
USUAL = (
    json.dumps(CHARGE),
    json.dumps(CHARGE, separators=(",", ":")),
    json.dumps(CHARGE, indent=4),
    '{"b":1,"a":{"d":2,"c":[true,null]}}',
    '{"amount":19.99,"tax":-0.19,"rate":1.123456,"most":1234567.123456}',
    '{"at":"2026-11-23T07:00:00.000Z","id":"3e5f8a10-7b1e-4c0d-9e77-12ab34cd56ef"}',
    '{"name":"François","city":"Zürich","price":"10 €","\ufb33":1}',
    '{"text":"\\"a\\"\\n\\tb\\\\c\\u0000\\u001F"}',
    "[9007199254740991,-9007199254740991,0,-1]",
    "[]",
    " {} ",
    "[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1),
)


def test_usual_bodies_take_the_short_way() -> None:
    """Else the package would gain nothing, and the tests here would compare nothing."""
    for body in USUAL:
        assert canonical_json(body.encode()) is not None, body
        check(body.encode())


DOUBTFUL = {
    "a name twice": b'{"a":1,"a":1}',
    "a name twice, once escaped": b'{"a":1,"\\u0061":1}',
    "an escape that is not needed": b'{"\\u00e9":1}',
    "a short escape that is not needed": b'["\\/"]',
    "names beyond the BMP": '{"😀":1,"\ufb33":2}'.encode(),
    "names beyond the BMP, escaped": b'{"\\ud83d\\ude00":1,"\\ufb33":2}',
    "minus zero": b"[-0]",
    "a decimal that is an integer": b"[1.0]",
    "a decimal with a zero at its end": b"[1.50]",
    "an exponent": b"[1E2]",
    "an exponent of the same length": b"[1e-2]",
    "an exponent that orjson prints so": b"[1e22]",
    "a small decimal": b"[0.0001]",
    "a long decimal before the point": b"[12345678.5]",
    "a long decimal after the point": b"[0.1234567]",
    "a decimal between two doubles": b"[9007199254740993.5]",
    "an integer that a double cannot count to": b"[9007199254740992]",
    "an integer that overflows": b"[18446744073709551616]",
    "an integer that grows where a string shrinks": b'["\\/",18446744073709551616]',
    "an integer that grows where a string shrinks twice": b'["\\/\\/",18446744073709551616]',
    "a decimal that grows where a string shrinks": b'[0.001,1e-3,"\\/"]',
    "an infinite number": b"[1e400]",
    "NaN": b"[NaN]",
    "half a pair": b'["\\ud800"]',
    "not UTF-8": b'["\xff"]',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "nothing": b"",
    "two documents": b"{} {}",
    "a number alone": b"12",
    "a decimal alone": b"1.5",
    "too deep": b"[" * MAX_DEPTH + b"[]" + b"]" * MAX_DEPTH,
    "objects too deep": b'{"a":' * MAX_DEPTH + b"{}" + b"}" * MAX_DEPTH,
    "far too deep": b"[" * 100_000 + b"]" * 100_000,
    "too long": b" " * (MAX_CANONICAL_BYTES - 1) + b"{}",
}


def test_doubtful_bodies_are_left_to_the_engine() -> None:
    assert [] == [name for name, body in DOUBTFUL.items() if canonical_json(body) is not None]
    for body in DOUBTFUL.values():
        check(body)


def test_ignored_fields_are_left_to_the_engine() -> None:
    """The whole document has a digest of its own, and an ignored part must not count."""
    first, second = (b'{"amount":1299,"sent_at":%d}' % moment for moment in (1, 2))

    assert json_digest(first, ignore=("/sent_at",)) == fingerprint.json_digest(first, ignore=("/sent_at",))
    assert json_digest(first, ignore=("/sent_at",)) == json_digest(second, ignore=("/sent_at",))
    assert json_digest(first) != json_digest(second)


@pytest.mark.parametrize("missing", (False, True))
def test_a_host_takes_the_fastest_way_that_it_has(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is a matter of speed, and not of configuration. orjson also fails to load in a second interpreter."""
    if missing:
        monkeypatch.setitem(sys.modules, "orjson", None)
    monkeypatch.setattr(subject, "_orjson", subject._orjson.__wrapped__)

    assert subject.fastest_json_digest.__wrapped__() is (fingerprint.json_digest if missing else json_digest)
