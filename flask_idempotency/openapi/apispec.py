"""The plugin for apispec, and so for flask-smorest and APIFlask: it describes each document as it is generated."""

from __future__ import annotations

from typing import Any, Literal

from apispec import APISpec, BasePlugin
from flask import Flask, current_app

from flask_idempotency.openapi.describing import describe

__all__ = ["IdempotencyPlugin"]


class IdempotencyPlugin(BasePlugin):
    """Describe the idempotency of your operations in each document that an `APISpec` generates.

    Pass it in `plugins=[…]`. Without `app` it takes the current application when the document is generated. `header` is that
    of `describe`. `spec.to_dict()` and `spec.to_yaml()` raise what `describe` raises.
    """

    def __init__(self, app: Flask | None = None, *, header: Literal["enforced", "optional"] = "enforced") -> None:
        self._app = app
        self._header = header

    def init_spec(self, spec: APISpec) -> None:
        """Describe when the document is generated. Helpers of operations run before policies are final."""
        plain = spec.to_dict

        def to_dict() -> dict[str, Any]:
            app: Any = current_app if self._app is None else self._app
            return describe(plain(), app, header=self._header)

        # `to_yaml` calls it too.
        spec.to_dict = to_dict  # type: ignore[method-assign]
