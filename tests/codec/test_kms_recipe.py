"""The provider that docs/encryption.md shows keeps what it is shown to keep."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flask_idempotency.codec.key_sources import load_ring
from flask_idempotency.engine.errors import CorruptRecord, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.stores.memory import MemoryStore
from tests.codec.sealing import BINDING, KEY, OTHER_TENANT, RESULT, codec

PAGE = Path(__file__).parents[2] / "docs" / "encryption.md"


@pytest.fixture
def recipe() -> dict[str, Any]:
    """The names that the page's recipe defines."""
    names: dict[str, Any] = {"app": SimpleNamespace(config={})}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(next(block for block in blocks if "KmsRing" in block), names)  # noqa: S102 - our own page
    return names


def test_the_recipe_seals_and_opens(recipe: dict[str, Any]) -> None:
    """Each process has its own ring of the same service."""
    shelf = MemoryStore().data_keys
    sealed = codec(shelf, provider=load_ring(recipe["ring"])).seal(RESULT, BINDING)

    assert RESULT == codec(shelf, provider=recipe["ring"]).open(sealed, BINDING)


def test_the_recipe_binds_keys_to_their_place(recipe: dict[str, Any]) -> None:
    """Another context, another key, and what it never wrapped are corrupt."""
    ring = recipe["KmsRing"](recipe["FakeKms"](), {"new": "arn:new", "old": "arn:old"})
    wrapped = ring.wrap("new", b"k" * 32, context=b"here")

    assert b"k" * 32 == ring.unwrap("new", wrapped, context=b"here")
    for kid, blob, context in (
        ("new", wrapped, b"there"),
        ("old", wrapped, b"here"),
        ("none", wrapped, b"here"),
        ("new", b"never", b"here"),
    ):
        with pytest.raises(CorruptRecord):
            ring.unwrap(kid, blob, context=context)


def test_a_service_that_is_away_is_unavailable(recipe: dict[str, Any]) -> None:
    """What the client raises need not be translated."""
    ring = recipe["ring"]
    sealing = codec(provider=ring)
    sealing.prepare(KEY)

    def throttled(**_: object) -> None:
        raise ConnectionError("throttled")

    ring._client.encrypt = ring._client.decrypt = throttled

    assert 201 == sealing.seal(RESULT, BINDING).status
    with pytest.raises(StoreUnavailable, match="ConnectionError"):
        sealing.seal(RESULT, replace(BINDING, key=StorageKey(KEY.rid, OTHER_TENANT)))
