"""The header fields that a browser must let scripts of another origin send and see."""

from __future__ import annotations

from typing import Any, Final

from flask_idempotency.settings.profiles import PROFILES

EXPOSED: Final = (
    "Idempotency-Status",
    "Retry-After",
    "Location",
    "Link",
    "Preference-Applied",
    "RateLimit",
    "RateLimit-Policy",
)
"""The response headers that a client acts on. Browsers hide all of them from scripts of another origin."""


def cors_headers(*allow: str) -> dict[str, Any]:
    """Return the header names of every dialect for Flask-CORS: `CORS(app, origins=[…], **cors_headers("Content-Type"))`.

    `allow` are the request headers that your API takes besides. Pass `Content-Type` for JSON, and `Authorization` if your
    callers send it. It says nothing about origins, methods or credentials. Raises `TypeError` if you pass a list.
    """
    for name in allow:
        if not isinstance(name, str):
            raise TypeError(
                f'Pass the names of header fields, not a {type(name).__name__}: cors_headers("Content-Type", "Authorization").'
            )
    keys = [name for profile in PROFILES.values() for name in profile.values["header"]]
    marks = [name for profile in PROFILES.values() for name, _ in profile.values["replayed_header"]]
    return {
        "allow_headers": list(dict.fromkeys((*keys, "Prefer", *allow))),
        "expose_headers": list(dict.fromkeys((*marks, *EXPOSED))),
    }
