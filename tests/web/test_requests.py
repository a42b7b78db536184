"""Which requests a retry may differ from, and which keys it carries."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from urllib.parse import urlencode

import pytest
from flask import Flask, Request
from hypothesis import given
from hypothesis import strategies as st

from flask_idempotency.engine.fingerprint import MAX_CANONICAL_BYTES
from flask_idempotency.engine.keys import Identity
from flask_idempotency.engine.policy import Policy
from flask_idempotency.web import forms
from flask_idempotency.web.request_body import BodyConsumed
from flask_idempotency.web.requests import client_keys, fingerprints, read_body
from tests.web.sending import DELIVERIES, Delivery, by_length, chunked, environ_of, multipart, request_of

FORM = "application/x-www-form-urlencoded"
IDENTITY = Identity(b"secret")
APP = Flask(__name__)
POLICY = Policy()

Part = tuple[str, str | None, str | None, bytes]
AMOUNT: Part = ("amount", None, None, b"1")
NOTE: Part = ("note", None, None, b"hello")
PHOTO: Part = ("photo", "a.png", "image/png", b"\x89PNG\n\xff" * 9)


def digest(data: bytes = b"{}", media_type: str = "application/json", *, policy: Policy = POLICY, **more: Any) -> bytes:
    return digest_of(request_of(data, media_type, **more), policy)


def named(csrf_field: str) -> Flask:
    """An application whose forms carry the token under this name."""
    app = Flask(__name__)
    app.config["WTF_CSRF_FIELD_NAME"] = csrf_field
    return app


def digest_of(asked: Request, policy: Policy = POLICY) -> bytes:
    (found,), _ = fingerprints(asked, policy, [IDENTITY], body=read_body(asked), app=APP)
    return found


def form_digest(*parts: Part, boundary: str = "xx", **more: Any) -> bytes:
    return digest(*multipart(*parts, boundary=boundary), **more)


def test_delivery_does_not_matter() -> None:
    """A retry may arrive in chunks through another proxy."""
    for delivery in DELIVERIES:
        assert digest(b'{"a": 1}') == digest(b'{"a": 1}', delivery=delivery), delivery


def test_every_part_of_the_request_counts() -> None:
    """Method, path, query, type and body (P-31): another of any is another request."""
    for changed in (
        {"method": "PUT"},
        {"path": "/other"},
        {"path": "/%2F"},
        {"query_string": "a=1"},
        {"query_string": "?"},
        {"media_type": "application/vnd.shop+json"},
        {"media_type": "text/json"},
        {"media_type": ""},
        {"data": b"[]"},
        {"data": b""},
    ):
        assert digest() != digest(**changed), changed


def test_order_of_the_query_counts() -> None:
    """It is compared as it was sent."""
    assert digest(query_string="a=1&b=2") != digest(query_string="b=2&a=1")


def test_mount_point_is_part_of_the_path() -> None:
    """One extension may serve two applications behind a dispatcher."""
    mounted, elsewhere = environ_of(b"{}"), environ_of(b"{}")
    mounted |= {"SCRIPT_NAME": "/shop", "PATH_INFO": "/pay"}
    elsewhere |= {"SCRIPT_NAME": "/bank", "PATH_INFO": "/pay"}

    assert digest_of(Request(mounted)) != digest_of(Request(elsewhere))
    assert digest_of(Request(mounted)) == digest(path="/shop/pay")


def test_paths_that_are_not_utf_8_stay_apart() -> None:
    """Werkzeug shows both of these to the view as one replacement character."""
    assert digest_of(Request(environ_of() | {"PATH_INFO": "/\xff"})) != digest_of(
        Request(environ_of() | {"PATH_INFO": "/\xfe"})
    )


def test_media_types_compare_by_meaning() -> None:
    """One type in two spellings is one type."""
    for one, same in (
        ("application/json", "Application/JSON"),
        ("text/plain; charset=utf-8", "text/plain;charset=UTF-8"),
        ("text/plain; a=1; b=2", "text/plain;b=2;a=1"),
        ("text/plain; CHARSET=utf-8", 'text/plain; charset="utf-8"'),
    ):
        assert digest(media_type=one) == digest(media_type=same), (one, same)


def test_parameters_of_json_do_not_count() -> None:
    """RFC 8259, section 11: it has none. Of every other type they count."""
    bodies = (b'{"a": 1}', '{"a": "é"}'.encode("utf-16"), b"not json", b"[" * 2 * MAX_CANONICAL_BYTES)
    for data, policy, media_type in product(
        bodies, (Policy(), Policy(fingerprint="raw")), ("application/json", "application/vnd.api+json")
    ):
        for parameters in ("; charset=utf-8", ";charset=UTF-16", '; profile="https://shop.example"', "; charset", ";"):
            assert digest(data, media_type, policy=policy) == digest(data, media_type + parameters, policy=policy), (
                parameters
            )
    for media_type in ("text/plain", "text/json", "application/xml", "application/x-www-form-urlencoded"):
        assert digest(media_type=media_type) != digest(media_type=media_type + "; charset=utf-8"), media_type


def test_volatile_headers_do_not_count() -> None:
    """What changes from one attempt to the next is no part of the request (P-41)."""
    for header in (
        ("User-Agent", "b"),
        ("Traceparent", "00-1-2-00"),
        ("Accept-Encoding", "br"),
        ("Date", "Sat, 21 Nov 2026 10:00:00 GMT"),
        ("Cookie", "session=2"),
        ("Authorization", "Bearer b"),
        ("X-Request-Id", "2"),
    ):
        assert digest(headers=[(header[0], "a")]) == digest(headers=[header]), header


def test_chosen_headers_count() -> None:
    """Such as the version of the interface (P-41, P-42); an absent header is not an empty one."""
    policy = Policy(fingerprint_headers=("API-Version", "Accept"))

    digests = [
        digest(policy=policy, headers=headers)
        for headers in ({}, {"API-Version": ""}, {"API-Version": "2"}, {"Accept": "2"})
    ]

    assert 4 == len(set(digests))
    assert digests[2] == digest(policy=policy, headers={"api-version": "2", "User-Agent": "x"})


def test_one_fingerprint_for_each_identity() -> None:
    """While a secret is rotated, in the order given, from one reading of the body (P-32)."""
    newest, oldest = Identity(b"new"), Identity(b"old")
    asked, again = request_of(b"{}", delivery=chunked), request_of(b"{}")
    both, _ = fingerprints(asked, Policy(), [newest, oldest], body=read_body(asked), app=APP)

    assert 2 == len(set(both))
    assert both == [
        fingerprints(again, Policy(), [one], body=read_body(again), app=APP)[0][0] for one in (newest, oldest)
    ]
    assert {17} == {len(one) for one in both}


def test_json_compares_by_content() -> None:
    """White space, order and escapes differ between clients and versions of one client (P-34)."""
    for media_type in ("application/json", "application/vnd.api+json", "application/json; charset=utf-8"):
        assert digest(b'{"a":1,"b":"\\u00e9"}', media_type) == digest('{ "b": "é",\n"a": 1.0}'.encode(), media_type), (
            media_type
        )
        assert digest(b'{"a":1}', media_type) != digest(b'{"a":2}', media_type), media_type


def test_doubtful_json_compares_by_bytes() -> None:
    """Never equal unless the bytes are, and never an error (P-35)."""
    for one, other in (
        (b'{"a":1,"a":2}', b'{"a":2}'),
        (b"[9007199254740992]", b"[9007199254740993]"),
        (b"[0.1]", b"[0.1000000000000000055]"),
        (b"[NaN]", b"[ NaN]"),
        (b'["\\ud800"]', b'["\\udfff"]'),
        (b"[" * 100_000, b"[" * 100_001),
        (b"{", b"{ "),
        (b"\xff", b"\xfe"),
        (b"", b" "),
    ):
        assert digest(one) != digest(other), (one, other)
        assert digest(one) == digest(one), (one, other)


def test_ignored_fields_may_change() -> None:
    """And nothing else may."""
    policy = Policy(ignore_fields=("/sent_at", "/meta/trace"))
    first = b'{"amount":1,"sent_at":10,"meta":{"trace":"a","x":1}}'

    assert digest(first, policy=policy) == digest(
        b'{"amount":1,"sent_at":99,"meta":{"trace":"b","x":1}}', policy=policy
    )
    assert digest(first, policy=policy) != digest(
        b'{"amount":2,"sent_at":10,"meta":{"trace":"a","x":1}}', policy=policy
    )


def test_anything_else_compares_by_bytes() -> None:
    """What Flask does not parse, we do not."""
    for media_type in ("text/plain", "application/octet-stream", "", "text/json", "nonsense"):
        assert digest(b'{"a":1}', media_type) == digest(b'{"a":1}', media_type), media_type
        assert digest(b'{"a":1}', media_type) != digest(b'{"a": 1}', media_type), media_type


def test_last_byte_of_a_large_body_counts() -> None:
    """At every limit, of memory and of parsing (P-102)."""
    sizes = (MAX_CANONICAL_BYTES - 9, MAX_CANONICAL_BYTES, 3 * MAX_CANONICAL_BYTES)
    for size, media_type in product(sizes, ("application/json", FORM, "text/plain")):
        body = b'"' + b"x" * size

        assert digest(body + b'1"', media_type) != digest(body + b'2"', media_type), (size, media_type)


def test_raw_policy_compares_bytes() -> None:
    """White space counts then, and so does a new boundary: that is what raw means."""
    raw = Policy(fingerprint="raw")

    assert digest(b'{"a":1}', policy=raw) != digest(b'{"a": 1}', policy=raw)
    assert digest(b'{"a":1}', policy=raw) == digest(b'{"a":1}', policy=raw)
    assert form_digest(AMOUNT, policy=raw) != form_digest(AMOUNT, boundary="yy", policy=raw)
    assert digest(b"a=%41", FORM, policy=raw) != digest(b"a=A", FORM, policy=raw)


def test_forms_compare_by_content() -> None:
    """As the view reads them."""
    for one, same in ((b"a=1&b=2", b"a=1&b=2&"), (b"a=%41", b"a=A"), (b"a=1+2", b"a=1%202"), (b"a", b"a=")):
        assert digest(one, FORM) == digest(same, FORM), (one, same)


def test_different_forms_differ() -> None:
    """Names, values, their number and their order."""
    for other in (b"a=1&b=3", b"b=2&a=1", b"a=1", b"a=1&b=2&c=", b"a=1&b=2&b=2", b"A=1&b=2", b"a=1%26b=2"):
        assert digest(b"a=1&b=2", FORM) != digest(other, FORM), other


def test_boundary_does_not_count() -> None:
    """Property 57: every attempt draws its own (P-36)."""
    large: Part = ("photo", "a.png", "image/png", b"x" * 2 * MAX_CANONICAL_BYTES)

    assert form_digest(AMOUNT, PHOTO, NOTE) == form_digest(AMOUNT, PHOTO, NOTE, boundary="another")
    assert form_digest(large) == form_digest(large, boundary="another")


def test_different_multipart_forms_differ() -> None:
    """Property 57: another file byte, name, type or order is another request."""
    for parts in (
        (AMOUNT, ("photo", "a.png", "image/png", PHOTO[3][:-1] + b"\xfe"), NOTE),
        (AMOUNT, ("photo", "b.png", "image/png", PHOTO[3]), NOTE),
        (AMOUNT, ("photo", "a.png", "image/gif", PHOTO[3]), NOTE),
        (AMOUNT, ("photo", "a.png", None, PHOTO[3]), NOTE),
        (AMOUNT, ("image", "a.png", "image/png", PHOTO[3]), NOTE),
        (AMOUNT, ("photo", None, None, b"a.png"), NOTE),
        (("amount", None, None, b"2"), PHOTO, NOTE),
        (NOTE, PHOTO, AMOUNT),
        (AMOUNT, PHOTO),
        (AMOUNT, PHOTO, PHOTO, NOTE),
        (AMOUNT, AMOUNT, PHOTO, NOTE),
    ):
        assert form_digest(AMOUNT, PHOTO, NOTE) != form_digest(*parts), parts


def parsed(data: bytes, media_type: str, delivery: Delivery) -> bytes:
    """The digest after a hook has parsed the form, as CSRF protection does."""
    asked = request_of(data, media_type, delivery=delivery)
    assert asked.form is not None
    return digest_of(asked)


def test_form_parsed_before_has_the_same_digest() -> None:
    """Property 58: whether or not CSRF protection came first, in this release of the application or the next."""
    for (data, media_type), delivery in product(
        (
            (b"a=1&b=2&a=3&c", FORM),
            (b"a=%c3%a9&b=%25FF", FORM),
            (b"a=1&csrf_token=1&checkout-csrf_token=2", FORM),
            multipart(AMOUNT, PHOTO, NOTE, ("amount", None, None, b"\xc3\xa9"), ("photo", "", None, b"")),
            multipart(
                ("a", None, "text/plain; charset=iso-8859-1", b"\xe9"), PHOTO, ("photo", "é.png", None, b"x" * 200_000)
            ),
        ),
        DELIVERIES,
    ):
        assert digest(data, media_type) == parsed(data, media_type, delivery), (data, media_type, delivery)


def test_forms_parsed_before_are_told_apart() -> None:
    """Property 58: not the hash of the nothing that parsing leaves (P-113)."""
    for (one, other, media_type), delivery in product(
        (
            (b"amount=1", b"amount=999", FORM),
            (multipart(AMOUNT)[0], multipart(("amount", None, None, b"9"))[0], multipart(AMOUNT)[1]),
            (multipart(PHOTO)[0], multipart((*PHOTO[:3], b"9"))[0], multipart(AMOUNT)[1]),
        ),
        DELIVERIES,
    ):
        assert parsed(one, media_type, delivery) != parsed(other, media_type, delivery), (
            one,
            other,
            media_type,
            delivery,
        )


@given(st.lists(st.tuples(st.sampled_from("ab"), st.binary(max_size=3)), max_size=4), st.booleans())
def test_any_form_has_one_digest(pairs: list[tuple[str, bytes]], files: bool) -> None:
    """Parsed by us, by somebody before us, or from a copy."""
    form, media_type = multipart(
        *((name, "f" if files else None, None, content.hex().encode()) for name, content in pairs)
    )
    cached = request_of(form, media_type)
    cached.get_data()

    assert digest(form, media_type) == digest_of(cached)
    if pairs:
        assert digest(form, media_type) == parsed(form, media_type, by_length)


def test_files_parsed_before_stay_where_they_stood() -> None:
    """The hook may have read a few bytes, to look at the type, and the view may rely on it."""
    asked = request_of(*multipart(PHOTO))
    asked.files["photo"].read(2)
    digest_of(asked)

    assert PHOTO[3][2:] == asked.files["photo"].read()


def test_files_that_a_hook_has_closed_are_a_loud_error() -> None:
    """Their contents can no longer be compared."""
    asked = request_of(*multipart(PHOTO))
    asked.files["photo"].close()

    with pytest.raises(BodyConsumed):
        digest_of(asked)


def test_broken_forms_compare_by_bytes() -> None:
    """Property 56's broken multipart is compared, not refused: the view decides what to say."""
    for delivery in DELIVERIES:
        form, media_type = multipart(AMOUNT, NOTE)

        assert digest(form[:-9], media_type, delivery=delivery) != digest(form[:-10], media_type, delivery=delivery), (
            delivery
        )
        assert digest(form, "multipart/form-data", delivery=delivery) == digest(form, "multipart/form-data"), delivery
        assert digest(b"a=\xff", FORM, delivery=delivery) != digest(b"a=\xfe", FORM, delivery=delivery), delivery


def test_part_without_a_name_is_compared_by_bytes() -> None:
    """Werkzeug hands it on under the name None; plain Flask answers such a form, and so must we."""
    nameless = b"--b\r\nContent-Disposition: nonsense\r\n\r\n%b\r\n--b--\r\n"
    media_type = "multipart/form-data; boundary=b"

    assert digest(nameless % b"x", media_type) == digest(nameless % b"x", media_type)
    assert digest(nameless % b"x", media_type) != digest(nameless % b"y", media_type)


def test_broken_form_parsed_before_is_not_the_empty_form() -> None:
    """Both look alike by then; what is known of them still differs."""
    broken = "multipart/form-data"

    assert parsed(b"x", broken, by_length) != parsed(b"", broken, by_length)
    assert parsed(b"x", broken, by_length) != parsed(b"xx", broken, by_length)


@pytest.mark.parametrize(
    ("limits", "within", "beyond"),
    (
        ({"max_form_parts": 3}, [AMOUNT] * 3, [AMOUNT] * 4),
        ({"max_form_memory_size": 300}, [AMOUNT], [("amount", None, None, b"x" * 400)]),
    ),
)
def test_forms_over_the_applications_limits_compare_by_bytes(
    limits: dict[str, int], within: list[Part], beyond: list[Part]
) -> None:
    """MAX_FORM_PARTS and MAX_FORM_MEMORY_SIZE answer 413 in the view, not here."""
    limited = type("Limited", (Request,), limits)

    def of(parts: list[Part]) -> bytes:
        return digest_of(limited(environ_of(*multipart(*parts))))

    assert form_digest(*within) == of(within)
    assert form_digest(*beyond) != of(beyond)
    assert of(beyond) != of([*beyond, AMOUNT])


def test_body_over_the_limit_is_equal_to_none() -> None:
    """
    Property 60: it is not read, and the view may raise its own limit. Its length would pass one upload for another.
    """
    app = Flask(__name__)
    app.config["MAX_CONTENT_LENGTH"] = 5
    with app.app_context():
        assert digest(b"123456") != digest(b"654321")
        assert digest(b"123456") != digest(b"123456")


def test_no_body_is_touched_for_the_key() -> None:
    """Not even of a form, unless the policy names a field."""
    asked = request_of(b"key=k", FORM, headers={"Idempotency-Key": "h"})

    assert ["h"] == client_keys(asked, Policy())
    assert "stream" not in asked.__dict__
    assert "flask_idempotency.body" not in asked.environ


def test_headers_are_read_by_their_names_in_the_policy() -> None:
    """All aliases, in the policy's order, as they came; an empty one is there."""
    policy = Policy(header=("Idempotency-Key", "X-Idempotency-Key"))
    headers = {"x-idempotency-key": '"b"', "IDEMPOTENCY-KEY": ""}

    assert ["", '"b"'] == client_keys(request_of(headers=headers), policy)
    assert [] == client_keys(request_of(headers={"Other": "x"}), policy)


def test_two_lines_of_one_header_are_one_value() -> None:
    """As WSGI has it; `parse_key` refuses the comma."""
    asked = request_of(headers=[("Idempotency-Key", "a"), ("Idempotency-Key", "b")])

    assert ["a, b"] == client_keys(asked, Policy())


FORM_KEY = Policy(form_field="idempotency_key")


def test_a_form_field_goes_before_every_header() -> None:
    """Browsers may add the header. The fingerprint is that of the form alone."""
    headers = {"Idempotency-Key": '"of-the-browser"', "X-Idempotency-Key": "another"}
    policy = replace(FORM_KEY, header=("Idempotency-Key", "X-Idempotency-Key"))
    for fields, expected in (
        ([("idempotency_key", "k"), ("amount", "1")], ["k"]),
        ([("amount", "1"), ("idempotency_key", "k")], ["k"]),
        ([("idempotency_key", ""), ("amount", "1")], [""]),
        ([("idempotency_key", "k"), ("idempotency_key", "l")], ["k", "l"]),
        ([("amount", "1")], ['"of-the-browser"', "another"]),
    ):
        multiparts = multipart(*((name, None, None, value.encode()) for name, value in fields))
        for data, media_type in ((urlencode(fields).encode(), FORM), multiparts):
            for before in (lambda asked: None, lambda asked: asked.form):
                asked = request_of(data, media_type, headers=headers)
                before(asked)
                assert expected == client_keys(asked, policy), (media_type, fields)
                assert digest_of(asked, policy) == digest_of(request_of(data, media_type), policy), (media_type, fields)

    assert ['"of-the-browser"', "another"] == client_keys(request_of(b"{}", headers=headers), policy)


def part(headers: bytes, content: bytes = b"1") -> tuple[bytes, str]:
    """A multipart form of one part with this very header."""
    return b"--xx\r\n" + headers + b"\r\n\r\n" + content + b"\r\n--xx--\r\n", "multipart/form-data; boundary=xx"


NAMED = b'Content-Disposition: form-data; name="a"'
FILE = NAMED + b'; filename="x"'

LOOK_ALIKES = {
    "urlencoded, not UTF-8": ((b"a=%ff", FORM), (b"a=%25FF", FORM)),
    "urlencoded name, not UTF-8": ((b"%ff=1", FORM), (b"%25FF=1", FORM)),
    "urlencoded surrogate": ((b"a=%ed%a0%80", FORM), (b"a=%25ED%25A0%2580", FORM)),
    "value, not UTF-8": (part(NAMED, b"\xff"), part(NAMED, b"\xfe")),
    "value, beyond ASCII": (
        part(NAMED + b"\r\nContent-Type: text/plain; charset=us-ascii", b"\xe9"),
        part(NAMED + b"\r\nContent-Type: text/plain; charset=us-ascii", b"\xe8"),
    ),
    "replacement character": (part(NAMED, b"\xff"), part(NAMED, "\ufffd".encode())),
    "unknown charset": (part(NAMED + b"\r\nContent-Type: text/plain; charset=utf-7", b"+AOk-"), part(NAMED, b"+AOk-")),
    "wide charset": (
        part(NAMED + b"\r\nContent-Type: text/plain; charset=utf-16be", b"\0001"),
        part(NAMED + b"\r\nContent-Type: text/plain; charset=utf-16le", b"\0001"),
    ),
    "transfer encoding": (part(NAMED + b"\r\nContent-Transfer-Encoding: base64", b"MQ=="), part(NAMED, b"MQ==")),
    "transfer encoding of a file": (part(FILE + b"\r\nContent-Transfer-Encoding: base64"), part(FILE)),
    "file name, not UTF-8": (
        part(NAMED + b"; filename*=utf-8''%ff"),
        part(NAMED + b"; filename*=utf-8''%fe"),
    ),
    "file name, unknown charset": (
        part(NAMED + b"; filename*=koi8-r''%ff"),
        part(NAMED + b'; filename="%ff"'),
    ),
    "name, unknown charset": (part(b"Content-Disposition: form-data; name*=koi8-r''a"), part(NAMED)),
    "two names": (part(b'Content-Disposition: form-data; name="b"; name="a"'), part(NAMED)),
    "two dispositions": (part(NAMED + b'\r\nContent-Disposition: form-data; name="b"'), part(NAMED)),
    "two types": (
        part(FILE + b"\r\nContent-Type: text/plain\r\nContent-Type: text/html"),
        part(FILE + b"\r\nContent-Type: text/plain"),
    ),
}
"""Forms that Werkzeug reads alike, and another reader of the same bytes does not."""


def test_forms_that_only_look_alike_are_compared_by_bytes() -> None:
    """A view may read the bytes itself. What it cannot tell apart, a client still meant as two requests."""
    for shape in LOOK_ALIKES:
        one, other = LOOK_ALIKES[shape]
        forms = [request_of(*sent).form.to_dict() for sent in (one, other)]
        files = [[(file.name, file.filename) for file in request_of(*sent).files.values()] for sent in (one, other)]

        assert digest(*one) != digest(*other), shape
        assert digest(*one) == digest(*one), shape
        # Else the two are no look-alikes, and this test proves nothing.
        assert (forms[0], files[0]) == (forms[1], files[1]) or shape in ("two types", "wide charset"), shape


def test_key_is_found_in_a_form_that_is_compared_by_bytes() -> None:
    """A view that reads the key reads it all the same: it must not run unprotected."""
    for shape in LOOK_ALIKES:
        body, media_type = LOOK_ALIKES[shape][0]
        if media_type == FORM:
            body += b"&idempotency_key=k"
        else:
            body = body.replace(
                b"--xx--", b'--xx\r\nContent-Disposition: form-data; name="idempotency_key"\r\n\r\nk\r\n--xx--'
            )

        assert ["k"] == client_keys(request_of(body, media_type), FORM_KEY), shape


def test_unusual_headers_of_parts_are_compared_by_meaning() -> None:
    """Java and old Python clients send these, with another boundary each time."""
    for headers in [
        NAMED + b"\r\nContent-Type: text/plain; charset=UTF-8\r\nContent-Transfer-Encoding: 8bit\r\nContent-Length: 1",
        NAMED + b"; filename*=UTF-8''%C3%A9.png",
        b'Content-Disposition: form-data; name="a"; filename="b; name=c"',
        b'Content-Disposition: form-data; name="a\\"; name=b"',
    ]:
        data, _ = part(headers)

        assert digest(data, "multipart/form-data; boundary=xx") == digest(
            data.replace(b"--xx", b"--yy"), "multipart/form-data; boundary=yy"
        ), headers


def test_header_of_a_part_is_looked_at_once() -> None:
    """One match covers a string, whether or not it ends: else a header of n quotes would be searched n times."""
    for end in ["", "\\", '"', 'a"']:
        matches = list(forms._QUOTED.finditer('"' + '\\"' * 1000 + end))

        assert [(0, 2001 + len(end))] == [match.span() for match in matches], end


def fields_as(kind: str, fields: list[tuple[str, str]]) -> tuple[bytes, str]:
    if kind == "urlencoded":
        return urlencode(fields).encode(), FORM
    return multipart(*((name, None, None, value.encode()) for name, value in fields))


FORM_KINDS = ("urlencoded", "multipart")


def untouched(asked: Request) -> None:
    """No hook reads the body."""


def parse(asked: Request) -> None:
    assert asked.form is not None


def digests(before: Callable[[Request], None], *forms: tuple[bytes, str]) -> set[bytes]:
    """Return the digests of these forms after an earlier hook."""
    found = set()
    for form in forms:
        asked = request_of(*form)
        before(asked)
        found.add(digest_of(asked, FORM_KEY))
    return found


@pytest.mark.parametrize("before", (untouched, parse))
@pytest.mark.parametrize("kind", FORM_KINDS)
def test_only_the_fields_that_each_rendering_changes_do_not_count(kind: str, before: Callable[[Request], None]) -> None:
    """The token, also of a form with a prefix, and the key's own field. What only resembles a token may be an amount."""
    for name in ("csrf_token", "checkout-csrf_token", "a.b_c-2-csrf_token", "idempotency_key"):
        tokens: tuple[list[tuple[str, str]], ...] = ([(name, "first")], [(name, "second")], [])
        forms = [fields_as(kind, [("amount", "1"), *token, ("note", "x")]) for token in tokens]
        assert 1 == len(digests(before, *forms)), name
    for name in (
        "Csrf_token",
        "csrf_token2",
        "xcsrf_token",
        "csrf_token-amount",
        "csrf-token",
        "-csrf_token",
        "a b-csrf_token",
        "amount",
    ):
        assert 2 == len(digests(before, *(fields_as(kind, [(name, value)]) for value in "12"))), name


@pytest.mark.parametrize("before", (untouched, parse))
def test_file_under_the_name_of_a_token_counts(before: Callable[[Request], None]) -> None:
    """A file is no token, whatever it is called."""
    for name in ("csrf_token", "checkout-csrf_token", "idempotency_key"):
        forms = [multipart((name, "a.csv", "text/csv", content)) for content in (b"1", b"2")]
        assert 2 == len(digests(before, *forms)), name


def test_field_of_the_key_counts_where_no_policy_reads_the_key_from_it() -> None:
    for kind in FORM_KINDS:
        one, other = (digest(*fields_as(kind, [("idempotency_key", value)])) for value in "12")
        assert one != other, kind


def test_token_counts_under_a_policy_that_compares_bytes_and_in_json() -> None:
    """Raw means bytes; a JSON document is no form."""
    raw = Policy(fingerprint="raw")

    assert digest(b"csrf_token=1", FORM, policy=raw) != digest(b"csrf_token=2", FORM, policy=raw)
    assert digest(b'{"csrf_token":1}') != digest(b'{"csrf_token":2}')


def test_token_has_the_name_that_the_application_gives_it() -> None:
    asked = [request_of(b"_token=%d&csrf_token=%d" % pair, FORM) for pair in ((1, 1), (2, 1), (1, 2))]
    first, other_token, other_field = (
        fingerprints(each, Policy(), [IDENTITY], body=read_body(each), app=named("_token")) for each in asked
    )

    assert first == other_token
    assert first != other_field


def test_ignored_fields_name_fields_of_forms() -> None:
    for (pointers, same, different), parsed_before in product(
        (
            (("/sent_at",), b"a=1&sent_at=9&sent_at=8", b"a=2&sent_at=1"),
            (("/a~1b~0c",), b"a=1&sent_at=1&a%2Fb%7Ec=5", b"a=1&sent_at=2"),
            (("/meta/sent_at", "/0"), b"a=1&sent_at=1", b"a=1&sent_at=2"),  # a form has no members of members
            (("/sent_at/",), b"a=1&sent_at=1", b"a=1&sent_at=2"),
            (("/sent",), b"a=1&sent_at=1", b"a=1&sent_at=2"),  # the whole name
        ),
        (False, True),
    ):
        policy = Policy(ignore_fields=pointers)
        asked = [request_of(body, FORM) for body in (b"a=1&sent_at=1", same, different)]
        if parsed_before:
            assert all(each.form for each in asked), (pointers, same, different, parsed_before)
        first, equal, other = (digest_of(each, policy) for each in asked)

        assert first == equal, (pointers, same, different, parsed_before)
        assert first != other, (pointers, same, different, parsed_before)


def test_a_file_under_an_ignored_name_counts() -> None:
    policy = Policy(ignore_fields=("/photo", "/note"))

    assert form_digest(PHOTO, NOTE, policy=policy) == form_digest(PHOTO, policy=policy)
    assert form_digest(PHOTO, NOTE, policy=policy) != form_digest(NOTE, policy=policy)


def test_prefixed_field_counts_where_the_name_of_the_token_does_not_say_csrf() -> None:
    """Where the token is called `token`, a `card-token` is still what is charged."""
    asked = [request_of(b"token=1&card-token=%d" % number, FORM) for number in (1, 2)]
    one, other = (fingerprints(each, Policy(), [IDENTITY], body=read_body(each), app=named("token")) for each in asked)

    assert one != other


def test_key_is_found_in_the_form() -> None:
    """However large it is and whoever has parsed it; and the view still finds its form."""
    for (data, media_type), before, delivery in product(
        (
            (b"idempotency_key=k&amount=1", FORM),
            multipart(("idempotency_key", None, None, b"k"), AMOUNT, PHOTO),
            (b"idempotency_key=k&x=" + b"y" * 2 * MAX_CANONICAL_BYTES, FORM),
        ),
        (lambda asked: None, lambda asked: asked.form, lambda asked: asked.get_data()),
        DELIVERIES,
    ):
        asked = request_of(data, media_type, delivery=delivery)
        before(asked)

        assert ["k"] == client_keys(asked, FORM_KEY), (data, media_type, before, delivery)
        assert "k" == asked.form["idempotency_key"], (data, media_type, before, delivery)


def test_all_keys_that_were_sent_are_told() -> None:
    """Whether the fields agree is for `one_key` to say."""
    asked = request_of(b"idempotency_key=a&idempotency_key=&idempotency_key=b", FORM, headers={"Idempotency-Key": "h"})

    assert ["a", "", "b"] == client_keys(asked, FORM_KEY)


def test_other_bodies_carry_no_key() -> None:
    """Another type, a form without the field, or one that is broken."""
    for data, media_type in (
        (b'{"idempotency_key": "k"}', "application/json"),
        (b"amount=1", FORM),
        (b"\xff", FORM),
        (b"x", "multipart/form-data"),
    ):
        assert [] == client_keys(request_of(data, media_type), FORM_KEY), (data, media_type)


def test_file_under_the_keys_name_is_no_key() -> None:
    """Its content is never looked at."""
    assert [] == client_keys(request_of(*multipart(("idempotency_key", "k", None, b"k"))), FORM_KEY)


def test_reading_for_the_key_and_for_the_fingerprint_is_reading_once() -> None:
    """The server's stream can be read once only."""
    asked = request_of(b"idempotency_key=k", FORM, delivery=chunked)
    client_keys(asked, FORM_KEY)
    body = read_body(asked)

    assert digest(b"idempotency_key=k", FORM) == digest_of(asked)
    assert body is read_body(asked)
    assert isinstance(body.stream, io.BytesIO)
