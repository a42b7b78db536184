"""What a client may call a request, and what becomes of that name."""

from __future__ import annotations

import hmac
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flask_idempotency.engine.errors import InvalidKey
from flask_idempotency.engine.keys import Identity, Scope, StorageKey, encode, keyed_digest, one_key, parse_key

UUID = "8e03978e-40d5-43e8-bc93-6894a57f9324"
HOSTILE = st.text(alphabet=st.sampled_from(":{}\0\r\n%*|/é\ud800ab"), max_size=6)
VISIBLE = st.text(alphabet=st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=255)


def refused(value: str, **rules: Any) -> str:
    """The words with which this value is refused."""
    with pytest.raises(InvalidKey) as caught:
        parse_key(value, **rules)
    return str(caught.value)


KEYS = {
    "abc": "abc",
    '"abc"': "abc",
    f'"{UUID}"': UUID,
    r'"a\"b"': 'a"b',
    r'"a\\b"': "a\\b",
    '"a,b"': "a,b",
    "a;b=1": "a;b=1",
    # Parameters are read and ignored.
    '"abc";a=1': "abc",
    '"abc"; a': "abc",
    '"abc";a;b=-1.5;  *c-d.e_f=tok/en:x;g="q,\\"u;o=";h=:aGVsbG8=:;i=?0;a=2': "abc",
    '"a;b=1";b=2': "a;b=1",
    "!~": "!~",
    "0": "0",
}


def test_quoted_and_bare_form_name_the_same_key() -> None:
    """An RFC 8941 string is unquoted once. Anything else stands for itself, byte for byte."""
    assert KEYS == {value: parse_key(value) for value in KEYS}
    assert parse_key("Abc") != parse_key("abc")


PARAMETERS = (
    ";", "; ", " ;a", ";A=1", ";1=a", ";a=", ";a= 1", ";a =1", ";a=1;", ';a="x', ";a=1.", ";a=1.2345",
    ";a=1234567890123456", ";a=?2", ";a=:a", ";a=é", ";a=(1 2)", ";a=1,b", ';a=1, "b"', ";\ta", "a=1", ";;a",
    ";a='x y'",
)  # fmt: skip
"""Malformed ones: the value may have been cut off, or joined with another."""

REFUSALS = (
    # Requests without a key must never meet in one shared record (P-38).
    ("", ("", '""', " ", "   ", '" "', "\t")),
    # WSGI joins two header lines by a comma, and two keys must never pass for one.
    ("more than one key", ("a,b", "a, b", '"a","b"', '"a", "b"', '"a",b', ",", "a,")),
    # Stray quotes and unknown escapes are no part of a key. To guess what was meant would rename it.
    ("RFC 8941", ('"abc', '"abc"x', r'"a\b"', '"abc\\"', '"a"b"', '"')),
    ("RFC 8941", tuple(f'"abc"{rest}' for rest in PARAMETERS)),
    # A string that lost its first quote on the way must not become another key than the one that was meant.
    ("bare key", ('K"', 'a"b', 'a""b', 'K\\"', "'K\"", 'K";p=1')),
    # Servers decode control bytes and blanks differently.
    ("", ("a\0b", "a\nb", "a\rb", "a\tb", "a b", "a\x7f", "a\x1f", "é", "k€y", "ﬀ", '"a b"', '"é"')),
)


@pytest.mark.parametrize(
    ("why", "values"), REFUSALS, ids=("blank", "two lines", "malformed", "parameters", "stray quote", "bytes")
)
def test_what_is_no_key_is_refused(why: str, values: tuple[str, ...]) -> None:
    assert [] == [value for value in values if not (words := refused(value)) or why not in words]


@pytest.mark.parametrize("form", ("{}", '"{}"'))
def test_the_limit_counts_the_key_and_not_its_quotes(form: str) -> None:
    assert 255 == len(parse_key(form.format("k" * 255)))
    assert "longer than 255" in refused(form.format("k" * 256))
    assert "longer than 8" in refused(form.format("k" * 9), max_length=8)


def test_uuid_format_takes_uuids_and_nothing_else() -> None:
    """A counter or a timestamp as a key is what this format is chosen to keep out."""
    taken = (UUID, UUID.upper(), f'"{UUID}"')
    others = ("abc", UUID[:-1], UUID + "0", UUID.replace("-", ""), "{" + UUID + "}", UUID[:-1] + "g")

    assert [UUID] * 3 == [parse_key(value, key_format="uuid").lower() for value in taken]
    assert [] == [value for value in others if "UUID" not in refused(value, key_format="uuid")]


def test_regular_expression_must_match_the_whole_key() -> None:
    assert "ord_12" == parse_key("ord_12", key_format=r"ord_[0-9]+")
    assert refused("ord_12x", key_format=r"ord_[0-9]+")
    assert refused("xord_12", key_format=r"ord_[0-9]+")


def test_refusals_never_repeat_the_key() -> None:
    assert "s3cret" not in refused("s3cret s3cret")
    assert "s3cret" not in refused("s3cret" * 50)


@given(VISIBLE)
def test_every_visible_key_survives_quoting(key: str) -> None:
    quoted = '"' + re.sub(r'(["\\])', r"\\\1", key) + '"'

    assert key == parse_key(quoted)


@given(VISIBLE, st.text(alphabet='";=a1 ?:,\\.', max_size=20))
def test_what_follows_the_key_never_changes_it(key: str, rest: str) -> None:
    quoted = '"' + re.sub(r'(["\\])', r"\\\1", key) + '"'
    try:
        found = parse_key(quoted + rest)
    except InvalidKey:
        return

    assert key == found


@given(st.text())
def test_any_header_is_a_visible_key_or_refused(value: str) -> None:
    try:
        key = parse_key(value)
    except InvalidKey:
        return

    assert re.fullmatch(r"[!-~]{1,255}", key)


def test_aliases_must_agree() -> None:
    assert "k" == one_key(["k", '"k"'])
    with pytest.raises(InvalidKey):
        one_key(["k", "l"])


@given(st.lists(st.binary(max_size=4), max_size=5), st.lists(st.binary(max_size=4), max_size=5))
def test_encoded_parts_are_injective(left: list[bytes], right: list[bytes]) -> None:
    """("A", "BC") and ("AB", "C") never meet (P-33)."""
    assert (left == right) == (encode(*left) == encode(*right))


Parts = tuple[str, str | None, str | None, str | None, str]
PARTS = st.tuples(HOSTILE, st.none() | HOSTILE, st.none() | HOSTILE, st.none() | HOSTILE, HOSTILE)


def stored(parts: Parts, identity: Identity) -> StorageKey:
    namespace, tenant, principal, operation, key = parts
    return identity.storage_key(Scope(namespace, tenant, principal, operation), key)


@given(PARTS, PARTS)
def test_storage_keys_are_injective_for_hostile_parts(left: Parts, right: Parts) -> None:
    """No choice of tenant, principal or key lets one caller arrive at another's record, and "" is not nobody."""
    identity = Identity(b"secret")

    assert (left == right) == (stored(left, identity).rid == stored(right, identity).rid)


@given(PARTS, PARTS)
def test_tenant_keys_tell_tenants_apart(left: Parts, right: Parts) -> None:
    identity = Identity(b"secret")

    assert (left[:2] == right[:2]) == (stored(left, identity).tid == stored(right, identity).tid)


@given(PARTS)
def test_no_client_byte_reaches_a_storage_key(parts: Parts) -> None:
    key, other = stored(parts, Identity(b"secret")), stored(parts, Identity(b"another"))

    assert (32, 16) == (len(key.rid), len(key.tid))
    assert key.rid != other.rid
    assert "StorageKey(…)" == repr(key)


@given(st.binary(max_size=64), st.lists(st.binary(max_size=200), max_size=3))
def test_the_keyed_digest_is_hmac(key: bytes, messages: list[bytes]) -> None:
    mac = keyed_digest(key)

    assert [mac(message) for message in messages] == [hmac.digest(key, message, "sha256") for message in messages]


def test_derived_names_do_not_meet() -> None:
    identity = Identity(b"secret")
    key = identity.storage_key(Scope("app", None, None), "k")

    names = {key.rid.hex(), key.tid.hex(), identity.downstream_key(key, "a"), identity.downstream_key(key, "b")}

    assert 4 == len(names)
    assert re.fullmatch("[a-z2-7]{52}", identity.downstream_key(key, "a"))
    assert re.fullmatch("[0-9a-f]{8}", key.label)
    assert key.label not in key.rid.hex() + key.tid.hex()
    assert identity.downstream_key(key, "a") == identity.downstream_key(key, "a")
