"""The page on encryption: the settings that it shows for `required` are enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from flask import Flask

from flask_idempotency import Idempotency
from flask_idempotency.codec.key_sources import generate

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "encryption.md"


def test_its_three_settings_and_a_principal_switch_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## Off, on, required\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("IDEMPOTENCY_SECRET", "only-tests-9f2c47d1e8b35a60c1d47be2")
    monkeypatch.setenv("PAYMENT_KEYS", generate("2026-11"))
    app = Flask("documented")

    exec(block, {"app": app})  # noqa: S102 - our own page
    Idempotency(app, principal=lambda: "alice")

    settings = app.extensions["idempotency"].settings
    assert 3 == len([name for name in app.config if name.startswith("IDEMPOTENCY_")])
    assert ("required", True, None) == (settings.encryption, settings.hash_identities, settings.compression)
