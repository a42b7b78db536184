"""Which requests are the same, and which must never be taken for the same."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flask_idempotency.engine import fingerprint as subject
from flask_idempotency.engine.fingerprint import (
    MAX_CANONICAL_BYTES,
    MAX_DEPTH,
    MAX_NUMBER_LENGTH,
    FilePart,
    canonical_json,
    check_pointer,
    fingerprint,
    form_digest,
    json_digest,
    multipart_digest,
    raw_digest,
    unread_digest,
)
from flask_idempotency.engine.keys import Identity

IDENTITY = Identity(b"secret")
TEXT = st.text(st.characters(codec="utf-8"))
NUMBERS = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
DOCUMENTS: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)

# https://github.com/cyberphone/json-canonicalization/tree/master/testdata#es6-numbers, which RFC 8785 appendix B points to.
# They hold the numbers of the appendix itself.
SIGN = 1 << 63
ES6_NEGATIVE = """
c46696695dbd1cc3 c43211ede4974a35 c3fce97ca0f21056 c3c7213080c1a6ac c39280f39a348556 c35d9b1f5d20d557 c327af4c4a80aaac
c2f2f2a36ecd5556 c2be51057e155558 c28840d131aaaaac c253670dc1555557 c21f0b4935555557 c1e8d5d42aaaaaac c1b3de4355555556
c17fca0555555556 c1496e6aaaaaaaab c114585555555555 c0e046aaaaaaaaab c0aa0aaaaaaaaaaa c074d55555555555 c040aaaaaaaaaaab
c00aaaaaaaaaaaab bfd5555555555555 bfa1111111111111 bf6b4e81b4e81b4f bf35d867c3ece2a5 bf0179ec9cbd821e becbf647612f3696
be965e9f80f29212 be61e54c672874db be2ca213d840baf8 bdf6e80fe033c8c6 bdc2533fe68fd3d2 bd8d51ffd74c861c bd5774ccac3d3817
bd22c3d6f030f9ac bcee0624b3818f79 bcb804ea293472c7 bc833721ba905bd3 bc4ebe9c5db3c61e bc18987d17c304e5 bbe3ad30dfcf371d
bbaf7b816618582f bb792f9ab81379bf bb442615600f9499 bb101e77800c76e1 bad9ca58cce0be35 baa4a1e0a3e6fe90 ba708180831f320d
ba3a68cd9e985016
"""
ES6_EDGES = """
4024000000000000 4014000000000000 3fe0000000000000 3fa999999999999a 3f747ae147ae147b 3f40624dd2f1a9fc 3f0a36e2eb1c432d
3ed4f8b588e368f1 3ea0c6f7a0b5ed8d 3e6ad7f29abcaf48 3e35798ee2308c3a 3ed539223589fa95 3ed4ff26cd5a7781 3ed4f95a762283ff
3ed4f8c60703520c 3ed4f8b72f19cd0d 3ed4f8b5b31c0c8d 3ed4f8b58d1c461a 3ed4f8b5894f7f0e 3ed4f8b588ee37f3 3ed4f8b588e47da4
3ed4f8b588e3849c 3ed4f8b588e36bb5 3ed4f8b588e36937 3ed4f8b588e368f8 3ed4f8b588e368f1 3ff0000000000000 bff0000000000000
bfeffffffffffffa bfeffffffffffffb 3feffffffffffffa 3feffffffffffffb 3feffffffffffffc 3feffffffffffffe bfefffffffffffff
bfefffffffffffff 3fefffffffffffff 3fefffffffffffff 3fd3333333333332 3fd3333333333333 3fd3333333333334 0010000000000000
000ffffffffffffd 000fffffffffffff 7fefffffffffffff ffefffffffffffff 4340000000000000 c340000000000000 4430000000000000
44b52d02c7e14af5 44b52d02c7e14af6 44b52d02c7e14af7 444b1ae4d6e2ef4e 444b1ae4d6e2ef4f 444b1ae4d6e2ef50 3eb0c6f7a0b5ed8c
3eb0c6f7a0b5ed8d 41b3de4355555553 41b3de4355555554 41b3de4355555555 41b3de4355555556 41b3de4355555557 becbf647612f3696
43143ff3c1cb0959
"""
ES6_CHECKSUMS = {
    1_000: "be18b62b6f69cdab33a7e0dae0d9cfa869fda80ddc712221570f9f40a5878687",
    10_000: "b9f7a8e75ef22a835685a52ccba7f7d6bdc99e34b010992cbc5864cd12be6892",
}

# RFC 8785 section 3.2.3.
SORTING = rb"""{
  "\u20ac": "Euro Sign",
  "\r": "Carriage Return",
  "\ufb33": "Hebrew Letter Dalet With Dagesh",
  "1": "One",
  "\ud83d\ude00": "Emoji: Grinning Face",
  "\u0080": "Control",
  "\u00f6": "Latin Small Letter O With Diaeresis"
}"""
SORTED = [
    "Carriage Return",
    "One",
    "Control",
    "Latin Small Letter O With Diaeresis",
    "Euro Sign",
    "Emoji: Grinning Face",
    "Hebrew Letter Dalet With Dagesh",
]

# RFC 8785 section 3.2.2, where the first number has one digit more than a double: refused here, so without it.
SAMPLE = rb"""{
  "numbers": [333333333.3333333, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
  "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
  "literals": [null, true, false]
}"""
SAMPLE_CANONICAL = (
    '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
    '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
)


def es6_numbers(count: int) -> Iterator[float]:
    """The first numbers of the file that RFC 8785 appendix B points to, by its published algorithm: chosen ones, those
    around the smallest normal double, and then whatever SHA-256 makes of its own output."""
    negative = [int(bits, 16) for bits in ES6_NEGATIVE.split()]
    zeros = [0, SIGN, 1, SIGN | 1]
    chosen = zeros + negative + [bits ^ SIGN for bits in negative] + [int(bits, 16) for bits in ES6_EDGES.split()]
    chosen += [0x0010000000000000 + number for number in range(2000)]
    numbers = [struct.unpack("<d", bits.to_bytes(8, "little"))[0] for bits in chosen]
    yield from numbers[:count]
    made, block = len(numbers), bytes(32)
    while made < count:
        block = hashlib.sha256(block).digest()
        found = [number for number in struct.unpack("<4d", block) if number != 0 and math.isfinite(number)]
        yield from found[: count - made]
        made += len(found)


@pytest.mark.parametrize(("count", "published"), ES6_CHECKSUMS.items())
def test_numbers_print_as_in_the_published_file_of_es6_numbers(count: int, published: str) -> None:
    """Make its lines here, with our serialisation in them: one wrong digit changes the published checksum."""
    digest = hashlib.sha256()
    for number in es6_numbers(count):
        (bits,) = struct.unpack("<Q", struct.pack("<d", number))
        digest.update(b"%x,%b\n" % (bits, canonical_json(repr(number).encode()) or b"none"))

    assert published == digest.hexdigest()


LONG_NUMBERS = (
    b"0." + b"1" * 200_000,
    b"1" * 200_000 + b".5",
    b"[1e" + b"1" * 200_000 + b"]",
    b"1e-" + b"0" * 200_000,
    b"-" + b"9" * 200_000,
    b"[0." + b"3" * 5000 + b",1.5]",
)


def test_no_long_number_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion between bases takes quadratic time, so its input is bounded first."""
    converted: list[str] = []
    for kind in (int, float):

        def convert(text: str, kind: type[Any] = kind) -> Any:
            converted.append(text)
            return kind(text)

        monkeypatch.setattr(subject, kind.__name__, convert, raising=False)

    assert [None] * len(LONG_NUMBERS) == [canonical_json(raw) for raw in LONG_NUMBERS]
    assert all(len(text) <= MAX_NUMBER_LENGTH for text in converted)


LONGEST = "0." + "1".rjust(MAX_NUMBER_LENGTH - 2, "0")


def test_length_limit_of_a_number_is_exact() -> None:
    assert [b"1e-62", None] == [canonical_json(literal.encode()) for literal in (LONGEST, LONGEST.replace(".", ".0"))]


ITEMS = (b"1e5", b"-0", b"0.1234567890123456", b'"\\n\\u00e9"', b"[[]]", b'{"\\u00e9":1}', b"0.1" * 21)


def test_twice_as_much_json_takes_twice_as_many_steps() -> None:
    """Counted in calls: nothing is looked at again for each thing that follows it."""

    def steps(item: bytes, count: int) -> int:
        raw, calls = b"[" + b",".join([item] * count) + b"]", 0

        def count_call(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        # A collection would run destructors of what earlier tests left, and count their calls.
        gc.disable()
        sys.setprofile(count_call)
        try:
            canonical_json(raw)
        finally:
            sys.setprofile(None)
            gc.enable()
        return calls

    for item in ITEMS:
        few, many = steps(item, 250), steps(item, 500)
        assert many <= 2 * few, item
        assert many <= 40 * 500, item


def test_names_sort_by_utf_16_code_units() -> None:
    """The published sorting example: an emoji comes before U+FB33, unlike in Python's order."""
    canonical = canonical_json(SORTING)

    assert canonical is not None
    assert SORTED == list(json.loads(canonical).values())


def test_published_sample_has_its_published_form() -> None:
    assert SAMPLE_CANONICAL.encode() == canonical_json(SAMPLE)


@given(DOCUMENTS, st.randoms(use_true_random=False), st.sampled_from((None, 1)), st.booleans())
def test_equal_documents_have_one_form(document: Any, random: Any, indent: int | None, ascii_only: bool) -> None:
    """Order of names, white space and escapes do not matter (P-34, P-40)."""

    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shuffled(value[name]) for name in random.sample(list(value), len(value))}
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    one = json.dumps(document).encode()
    other = json.dumps(shuffled(document), indent=indent, ensure_ascii=ascii_only).encode()

    assert canonical_json(one) == canonical_json(other)


@given(DOCUMENTS, DOCUMENTS)
@example({"a": 1, "A": 2}, {"a": 2, "A": 1})
@example([0], [False])
@example([1], ["1"])
@example([None], [])
@example({"a": None}, {})
@example("", None)
def test_different_documents_have_different_forms(left: Any, right: Any) -> None:
    def typed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: typed(item) for name, item in value.items()}
        if isinstance(value, list):
            return [typed(item) for item in value]
        return (isinstance(value, bool), value)

    one, other = canonical_json(json.dumps(left).encode()), canonical_json(json.dumps(right).encode())

    assert (typed(left) == typed(right)) == (one == other) or one is other is None


@given(DOCUMENTS)
def test_form_is_its_own_form(document: Any) -> None:
    canonical = canonical_json(json.dumps(document).encode())

    # Doubles that print as integers which a double cannot count to are not read back: the safe direction.
    assert canonical is None or canonical_json(canonical) in (canonical, None)
    assert canonical is None or json.loads(canonical, parse_int=float) == document


@given(DOCUMENTS)
def test_short_way_and_long_way_agree(document: Any) -> None:
    """The quick encoder for plain documents is an economy, not another canonical form."""
    raw = json.dumps(document).encode()
    parsed = subject._DECODER.decode(raw.decode())

    quick = subject._plain_text(raw, parsed)

    assert quick is None or quick == subject._text(parsed, MAX_DEPTH)


DOUBTFUL = (
    b'{"a":1,"a":2}',
    b'{"a":1,"\\u0061":1}',
    b'[{"b":[{"a":1,"a":1}]}]',
    b"9007199254740992",
    b"-9007199254740992",
    b"9007199254740993",
    b"1" * 400,
    b"-" + b"9" * 5000,
    b"0.3000000000000000444",
    b"0.30000000000000001",
    b"333333333.33333329",
    b"9007199254740993.0",
    b"1e400",
    b"-1e400",
    b"1e-400",
    b"1e99999999999999999999",
    b"0." + b"0" * 63,
    b"0e" + b"0" * 63,
    b"1e" + b"9" * 5000,
    b"0." + b"1" * 200_000,
    b"1" * 200_000 + b".0",
    b"NaN",
    b"[Infinity]",
    b"-Infinity",
    b'"\\ud800"',
    b'{"\\udc00":1}',
    b'"\\ud800\\ud800"',
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"),
    "[]".encode("utf-32-le"),
    b"",
    b" ",
    b"{",
    b"[1,]",
    b"{'a':1}",
    b"01",
    b"1.",
    b".5",
    b"+1",
    b"\x0c1",
    b'"a\nb"',
    b"{} {}",
    b"[" * 100_000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
)


def test_doubtful_documents_have_no_form() -> None:
    """Two readers may understand them differently: their bytes are compared instead, without an error."""
    assert [] == [raw[:40] for raw in DOUBTFUL if canonical_json(raw) is not None]
    assert [] == [raw[:40] for raw in DOUBTFUL if raw_digest((raw,)) != json_digest(raw)]


@given(st.binary() | st.text(alphabet='{}[]",:0123456789.eE+-\\utrfalsn ').map(str.encode))
def test_no_bytes_are_an_error(raw: bytes) -> None:
    assert 33 == len(json_digest(raw, ignore=("/a", "/0/b")))


@given(st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", fullmatch=True))
@example("1.0")
@example("100")
@example("1e2")
@example("-0")
@example("-0.0")
@example("0.10")
@example("1E-7")
@example("1.50e3")
@example("1e15")
@example("-1e-5")
@example("9007199254740.99")
@example("5e-324")
@example("3e-324")
@example("2.5e-324")
def test_numbers_keep_their_exact_value_or_have_no_form(literal: str) -> None:
    """Two amounts are never equal because a parser rounded one (P-35)."""
    canonical = canonical_json(literal.encode())

    assert canonical is None or Decimal(literal) == Decimal(canonical.decode())


CLOSE_RELATIVES = (
    (b"[9007199254740992]", b"[9007199254740993]"),
    (b"[0.30000000000000004]", b"[0.3000000000000000444]"),
    (b"[0.1]", b"[0.1000000000000000055]"),
    (b'{"a":1,"a":2}', b'{"a":2}'),
    (b'{"a":2,"a":1}', b'{"a":1,"a":2}'),
    (b'"\\ud800"', b'"\\ud801"'),
    (b"[NaN]", b"[null]"),
    (b"[1e400]", b"[1e401]"),
    (b"[1e400]", b"[1.7976931348623157e308]"),
    (b"[1e-400]", b"[0.0]"),
    (b"[1e-400]", b"[1e-401]"),
    (b"[1e5]", b"[1e6]"),
    (b"[1.5]", b"[-1.5]"),
    (b"[9007199254740993.0]", b"[9007199254740992.0]"),
    (b"[100000000000000000000]", b"[100000000000000000001]"),
    (b"[0.1" + b"0" * 80 + b"]", b"[0.1" + b"0" * 80 + b"1]"),
    (b'{"amount":1}', b'{"amount":"1"}'),
    (b'{"amount":1}', b'{"amount":true}'),
    (b'{"a":"\xc3\xa9"}', '{"a":"e\u0301"}'.encode()),
)


def test_close_relatives_are_told_apart() -> None:
    """Large integers, long decimals, repeated names: what other layers have taken for equal (P-35)."""
    assert [] == [(left, right) for left, right in CLOSE_RELATIVES if json_digest(left) == json_digest(right)]


def test_depth_limit_is_exact() -> None:
    nested: Callable[[int], bytes] = lambda depth: b"[" * depth + b"]" * depth  # noqa: E731

    assert nested(MAX_DEPTH) == canonical_json(nested(MAX_DEPTH))
    assert canonical_json(nested(MAX_DEPTH + 1)) is None
    assert canonical_json(b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1)) is None


def test_size_limit_is_exact() -> None:
    largest = b'"' + b"x" * (MAX_CANONICAL_BYTES - 2) + b'"'

    assert largest == canonical_json(largest)
    assert canonical_json(largest + b" ") is None


def test_last_byte_beyond_the_limit_still_counts() -> None:
    """No digest of a prefix: bodies that differ only in their last byte differ (P-102)."""
    body = b'"' + b"x" * MAX_CANONICAL_BYTES

    assert json_digest(body + b'1"') != json_digest(body + b'2"')


def test_form_does_not_depend_on_the_callers_stack() -> None:
    """The deepest document that has a form has it wherever the digest is taken, or a retry would mismatch by chance."""
    raw = b"[" * MAX_DEPTH + b"1e-7" + b"]" * MAX_DEPTH

    def deep(levels: int) -> bytes | None:
        return deep(levels - 1) if levels else canonical_json(raw)

    found: list[bytes | None] = []
    thread = threading.Thread(target=lambda: found.append(deep(sys.getrecursionlimit() // 2)))
    thread.start()
    thread.join()

    assert [canonical_json(raw)] == found
    assert found != [None]


IGNORED: tuple[tuple[bytes, tuple[str, ...], bytes], ...] = (
    (b'{"a":1,"sent_at":5}', ("/sent_at",), b'{"a":1}'),
    (b'{"a":1}', ("/sent_at",), b'{"a":1}'),
    (b'{"meta":{"trace":1,"x":2}}', ("/meta/trace",), b'{"meta":{"x":2}}'),
    (b'{"trace":{"a":1},"meta":{"trace":1}}', ("/trace",), b'{"meta":{"trace":1}}'),
    (b'{"a/b":1,"m~n":2,"c":3}', ("/a~1b", "/m~0n"), b'{"c":3}'),
    (b'{"~1":1,"/":2}', ("/~01",), b'{"/":2}'),
    (b'{"":1,"a":2}', ("/",), b'{"a":2}'),
    (b"[1,2,3]", ("/0", "/1"), b"[3]"),
    (b"[1,2,3]", ("/-", "/01", "/3", "/-1"), b"[1,2,3]"),
    (b'[{"t":1,"v":2}]', ("/0/t",), b'[{"v":2}]'),
    (b'{"0":1}', ("/0",), b"{}"),
    (b'{"a":1}', ("/a/b/c",), b'{"a":1}'),
    (b'"text"', ("/a", "/0"), b'"text"'),
    (b'{"a":{"b":1}}', ("/a", "/a/b"), b"{}"),
    (b"[1,2]", ("/" + "9" * 5000,), b"[1,2]"),
    (b"[1,2]", ("/١",), b"[1,2]"),
)


def test_ignored_parts_are_left_out() -> None:
    for raw, ignore, expected in IGNORED:
        assert expected == canonical_json(raw, ignore=ignore), (raw, ignore)


def test_doubt_in_an_ignored_part_is_ignored() -> None:
    """A client's clock with too many digits must not make its retries differ."""
    assert b'{"a":1}' == canonical_json(b'{"a":1,"t":1700000000.1234567890123}', ignore=("/t",))
    assert b'{"a":1}' == canonical_json(b'{"a":1,"t":' + b"9" * 50_000 + b"}", ignore=("/t",))
    assert canonical_json(b'{"a":1,"t":1,"t":2}', ignore=("/t",)) is None


def test_depth_counts_in_an_ignored_part_too() -> None:
    """Between the limit and the interpreter's own, a digest would depend on how deep the caller stands."""
    within = b'{"a":1,"t":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b',"u":[[],[]]}'
    assert b'{"a":1,"u":[[],[]]}' == canonical_json(within, ignore=("/t",))

    for depth in (MAX_DEPTH, 800, 100_000):
        nested = b'{"a":1,"t":' + b"[" * depth + b"]" * depth + b"}"
        assert canonical_json(nested, ignore=("/t",)) is None, depth


def test_only_pointers_to_a_part_are_accepted() -> None:
    """Refused at start-up: a pointer that finds nothing would ignore nothing, silently."""
    for pointer in ("/", "/a", "/a/b", "/a~0b~1c", "//", "/é", "/a b", "/-", "/0"):
        check_pointer(pointer)
    malformed: tuple[Any, ...] = ("", "a", "#/a", "$.a", "/a~", "/a~2", "/~/b", None, 5)
    for pointer in malformed:
        with pytest.raises(ValueError, match="JSON Pointer"):
            check_pointer(pointer)


def digest(**changed: Any) -> bytes:
    facts: dict[str, Any] = {
        "method": "POST",
        "path": b"/payments",
        "query": b"",
        "media_type": "application/json",
        "body": json_digest(b"{}"),
    }
    return fingerprint(changed.pop("identity", IDENTITY), **(facts | changed))


def test_fingerprints_are_as_ever() -> None:
    """A store is full of them: with another digest, every retry after an upgrade would be a mismatch."""
    headers = [("X-A", "\xe9"), ("X-B", "\ud800")]

    assert "0107d8e196b2dc95d2cd13092051fe50eb" == digest().hex()
    assert "0103bf2672c60009efce54de2e23585344" == digest(query=b"a=1", headers=headers, path=b"/caf\xe9").hex()
    assert "0197a05cf5f5d46edf483976d8c6882bfc" == digest(media_type="", body=raw_digest([b"x"])).hex()


CHANGES: tuple[dict[str, Any], ...] = (
    {"method": "PUT"},
    {"path": b"/refunds"},
    {"query": b"dry_run=1"},
    {"media_type": "application/vnd.shop+json"},
    {"headers": [("API-Version", "2")]},
    {"body": json_digest(b"[]")},
    {"body": raw_digest([b"{}"])},
    {"identity": Identity(b"another secret")},
)


def test_every_part_counts() -> None:
    """Method, path, query, type, chosen headers, body, and the secret (P-31, P-32)."""
    assert [] == [changed for changed in CHANGES if digest() == digest(**changed)]


def test_header_names_have_no_case_and_values_do() -> None:
    assert digest(headers=[("API-Version", "a")]) == digest(headers=[("api-version", "a")])
    assert digest(headers=[("API-Version", "a")]) != digest(headers=[("API-Version", "A")])
    assert digest(headers=[("API-Version", "")]) != digest()


@given(*[st.text(max_size=3)] * 2, *[st.binary(max_size=3)] * 2, *[st.text(max_size=3)] * 2)
def test_parts_never_run_into_each_other(m1: str, m2: str, p1: bytes, p2: bytes, h1: str, h2: str) -> None:
    """Joined without lengths, ("A", "BC") would be ("AB", "C") (P-33)."""
    one = digest(method=m1, path=p1, headers=[(h1, h2)])
    other = digest(method=m2, path=p2, headers=[(h2, h1)])

    assert ((m1, p1, h1.lower(), h2) == (m2, p2, h2.lower(), h1)) == (one == other)


def test_kinds_of_body_never_meet() -> None:
    nothing = (raw_digest([]), form_digest([]), multipart_digest([], []), unread_digest(), unread_digest())

    assert len(nothing) == len(set(nothing))
    assert json_digest(b"{}") != raw_digest([b"{}"])


def test_cutting_the_bytes_differently_changes_nothing() -> None:
    assert raw_digest([b"ab", b"", b"c"]) == raw_digest([b"abc"])


PAIRS = st.lists(st.tuples(st.sampled_from("abc"), st.text(max_size=2)), max_size=5)


@given(PAIRS, PAIRS)
def test_forms_compare_as_names_and_ordered_values(left: list[tuple[str, str]], right: list[tuple[str, str]]) -> None:
    def grouped(pairs: list[tuple[str, str]]) -> list[tuple[str, list[str]]]:
        names = dict.fromkeys(name for name, _ in pairs)
        return [(name, [value for other, value in pairs if other == name]) for name in names]

    assert (grouped(left) == grouped(right)) == (form_digest(left) == form_digest(right))


FILE = FilePart("photo", "a.png", "image/png", b"\1" * 32)
OTHER_FORMS: tuple[tuple[list[tuple[str, str]], list[FilePart]], ...] = (
    ([("a", "2")], [FILE]),
    ([("b", "1")], [FILE]),
    ([], [FILE]),
    ([("a", "1")], []),
    ([("a", "1")], [FILE, FILE]),
    ([("a", "1")], [FilePart("image", "a.png", "image/png", b"\1" * 32)]),
    ([("a", "1")], [FilePart("photo", "b.png", "image/png", b"\1" * 32)]),
    ([("a", "1")], [FilePart("photo", "a.png", "image/gif", b"\1" * 32)]),
    ([("a", "1")], [FilePart("photo", "a.png", "image/png", b"\2" * 32)]),
)


def test_every_part_of_a_multipart_form_counts() -> None:
    """Names, values, file names, types, contents and numbers (P-36)."""
    first = multipart_digest([("a", "1")], [FILE])

    assert [] == [form for form in OTHER_FORMS if multipart_digest(*form) == first]
