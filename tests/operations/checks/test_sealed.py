"""Rings that cannot open what is there, or seal what is to come."""

from __future__ import annotations

from base64 import b64encode

import pytest

from flask_idempotency.codec.key_sources import load_ring
from flask_idempotency.codec.keyring import KeyRing
from flask_idempotency.engine.capabilities import Verdict
from flask_idempotency.engine.errors import StoreUnavailable
from flask_idempotency.operations.admin import KeysReport, KeyStatus
from flask_idempotency.operations.doctor import keys, newest_key
from tests.operations.checks.judging import worst

NEW = KeyStatus("new", 5, 1, newest=True, known=True)


def test_a_ring_that_works_is_fine() -> None:
    assert Verdict.FINE is worst(newest_key(load_ring({"a": b64encode(b"k" * 32).decode()})))


class Broken(KeyRing):
    """A key service that has lost its newest key, or does not answer."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__({"a": b"k" * 32})
        self.error = error

    def unwrap(self, kid: str, wrapped: bytes, *, context: bytes) -> bytes:
        if self.error is not None:
            raise self.error
        return b"something else"


@pytest.mark.parametrize(
    "error",
    (
        pytest.param(StoreUnavailable("away"), id="away"),
        pytest.param(PermissionError("arn:aws:kms:secret"), id="forbidden"),
        pytest.param(None, id="another key"),
    ),
)
def test_a_newest_key_that_cannot_be_used_is_a_fault(error: Exception | None) -> None:
    """Whoever's service it is: what it raises is told by its class."""
    found = newest_key(Broken(error))

    assert Verdict.FAULT is worst(found)
    assert "arn:" not in found[0].text


@pytest.mark.parametrize(
    ("others", "plain", "required", "verdict"),
    (
        pytest.param((), 0, True, Verdict.FINE, id="one key"),
        pytest.param((KeyStatus("old", 0, 0, newest=False, known=True),), 0, True, Verdict.FINE, id="a spare one"),
        pytest.param((KeyStatus("old", 1, 0, newest=False, known=True),), 0, False, Verdict.ADVICE, id="an old record"),
        pytest.param(
            (KeyStatus("old", 0, 1, newest=False, known=True),), 0, False, Verdict.ADVICE, id="an old data key"
        ),
        pytest.param((KeyStatus("lost", 1, 0, newest=False, known=False),), 0, False, Verdict.FAULT, id="a lost key"),
        pytest.param((), 3, False, Verdict.ADVICE, id="plain ones, which open"),
        pytest.param((), 3, True, Verdict.FAULT, id="plain ones, which are refused"),
    ),
)
def test_what_is_sealed_must_open(others: tuple[KeyStatus, ...], plain: int, required: bool, verdict: Verdict) -> None:
    assert verdict is worst(keys(KeysReport((NEW, *others), plain), required=required))


@pytest.mark.parametrize(("required", "first"), ((True, "Find out who stored them"), (False, "Wait until they expire")))
def test_nobody_is_advised_to_seal_plain_answers_by_a_rotation(required: bool, first: str) -> None:
    """A rotation goes on by itself. To seal a planted answer makes it genuine, so a person has to decide that."""
    (found,) = keys(KeysReport((NEW,), 3), required=required)

    assert (True, True) == (found.text.startswith("3 stored answers"), found.remedy.startswith(first))
    assert ("rotate" in found.remedy, "flask idempotency seal" in found.remedy) == (False, True)
    assert required is ("planted" in found.text)
