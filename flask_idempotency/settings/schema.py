"""The options as a marshmallow schema: it converts a value that has not the type of its option, or says why it cannot.

Only a process that has such a value loads this module, and marshmallow with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from marshmallow import Schema, ValidationError, fields

from flask_idempotency.settings.reading import Option, Rule

_FIELDS: Final[Mapping[Any, Any]] = {
    bool: fields.Boolean,
    str: fields.String,
    int: partial(fields.Integer, strict=True),
}
"""The fields of what is loaded as it is. They take more: `"true"` for a boolean, and text in bytes."""


def _checked(rule: Rule, value: Any) -> bool:
    holds, sentence = rule
    if not holds(value):
        raise ValidationError(sentence)
    return True


def _field(option: Option) -> Any:
    # A function reads any value but None.
    made = _FIELDS.get(option.kind, fields.Raw)
    return made(allow_none=option.allow_none, validate=[partial(_checked, rule) for rule in option.rules])


def load(options: Mapping[str, Option], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return what these options load from these values, and the sentences that say why others are refused, by name."""
    schema = Schema.from_dict({name: _field(options[name]) for name in values})()
    try:
        loaded: dict[str, Any] = schema.load(values)
    except ValidationError as error:
        found = error.messages if isinstance(error.messages, dict) else {}
        return dict(error.valid_data) if isinstance(error.valid_data, dict) else {}, found
    return loaded, {}
