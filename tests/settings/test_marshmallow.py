from __future__ import annotations

from pathlib import Path

import flask_idempotency


def test_fields_have_no_type_parameter_in_marshmallow_3() -> None:
    """`fields.Field[...]` fails at the import there; `schema.fields.Field` does not. The CI runs the rest on both."""
    package = Path(flask_idempotency.__file__).parent

    assert [] == [str(file) for file in package.rglob("*.py") if "(fields.Field[" in file.read_text(encoding="utf-8")]
