"""Tokens say by which secret the other side was told, and nothing else about it."""

from __future__ import annotations

from itertools import product

import pytest

from flask_idempotency.engine.keys import (
    MARK_BYTES,
    OWNER_BYTES,
    TOKEN_BYTES,
    Identity,
    _subkey,
    marked,
    new_token,
    owner_mark,
    successor,
)

MARKS = tuple(
    Identity(secret).mark(namespace) for secret, namespace in ((b"new", "shop"), (b"old", "shop"), (b"new", "bank"))
)


def test_every_token_is_another() -> None:
    for mark, several in product((b"", *MARKS), (False, True)):
        tokens = {new_token(mark, several=several) for _ in range(200)}

        assert (200, {TOKEN_BYTES}) == (len(tokens), {len(token) for token in tokens})
        assert len({token[MARK_BYTES:] for token in tokens}) == 200


def test_a_token_shows_the_secret_that_it_was_made_under() -> None:
    """Not if the claim was made under several: its record may bear the name of any, and the client was told by one."""
    for mark in (*MARKS, bytes(5), b"\xff" * 5, b"\0\0\0\x80\0"):
        token = new_token(mark)

        assert marked(token, mark)
        for at in range(MARK_BYTES):
            assert not marked(token, bytes(byte ^ (at == number) for number, byte in enumerate(mark)))
        assert not marked(new_token(mark, several=True), mark)


def test_marks_are_of_their_secrets() -> None:
    assert (MARKS[0], 3) == (Identity(b"new").mark("shop"), len(set(MARKS)))
    assert {MARK_BYTES} == {len(mark) for mark in MARKS}


def test_an_application_is_the_same_under_every_secret() -> None:
    new, old, other = (mark[:OWNER_BYTES] for mark in MARKS)

    assert (new, True) == (old, new != other)
    assert owner_mark("shop") == new


@pytest.mark.parametrize("several", (False, True))
def test_whoever_settles_a_claim_has_a_token_with_its_mark(several: bool) -> None:
    """What is settled may be quarantined again, and then its application must know it."""
    token = new_token(MARKS[0], several=several)

    assert token[:MARK_BYTES] == successor(token)[:MARK_BYTES]
    assert token != successor(token)


def test_a_mark_leads_back_to_nothing_else_that_is_derived() -> None:
    identity = Identity(b"new")
    derived = [
        identity.fingerprint(b"x"),
        identity.tenant_id("n", "t"),
        _subkey(b"new", b"record"),
        _subkey(b"new", b"log"),
    ]

    assert not any(each.startswith(identity.mark("n")) for each in derived)
