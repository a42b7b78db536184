"""Make unsafe HTTP endpoints of a Flask application safe to retry. These are the public names.

`import flask_idempotency` loads nothing else. Each name is imported from its module when you first use it (PEP 562), and a
store with its client when `Idempotency` is set up on an application, before the first request.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flask_idempotency.engine.errors import (
        ConfigurationError,
        IdempotencyError,
        LeaseLost,
        NotCommitted,
        NotStorable,
        StepInDoubt,
        StepsChanged,
        StoreUnavailable,
    )
    from flask_idempotency.engine.policy import Decision
    from flask_idempotency.engine.quota import NewKeys, Quota
    from flask_idempotency.engine.recovery import (
        Happened,
        NeverHappened,
        Resolution,
        Resume,
        StillUnknown,
        UnknownOutcome,
    )
    from flask_idempotency.engine.step_rules import Step
    from flask_idempotency.extension import Idempotency
    from flask_idempotency.settings import derived_secret
    from flask_idempotency.settings.cors import cors_headers
    from flask_idempotency.steps.steps import current_step, durable_step
    from flask_idempotency.web.current_claim import current_claim, idempotency_field
    from flask_idempotency.web.key_status import key_status
    from flask_idempotency.web.policies import claim_here, exempt, idempotent
    from flask_idempotency.web.webhooks import webhook

__all__ = [
    "ConfigurationError",
    "Decision",
    "Happened",
    "Idempotency",
    "IdempotencyError",
    "LeaseLost",
    "NeverHappened",
    "NewKeys",
    "NotCommitted",
    "NotStorable",
    "Quota",
    "Resolution",
    "Resume",
    "Step",
    "StepInDoubt",
    "StepsChanged",
    "StillUnknown",
    "StoreUnavailable",
    "UnknownOutcome",
    "claim_here",
    "cors_headers",
    "current_claim",
    "current_step",
    "derived_secret",
    "durable_step",
    "exempt",
    "idempotency_field",
    "idempotent",
    "key_status",
    "webhook",
]

# The imports above once more, for Python. tests/test_imports.py compares the two.
_NAMES = {
    "engine.errors": (
        "ConfigurationError",
        "IdempotencyError",
        "LeaseLost",
        "NotCommitted",
        "NotStorable",
        "StepInDoubt",
        "StepsChanged",
        "StoreUnavailable",
    ),
    "engine.policy": ("Decision",),
    "engine.quota": ("NewKeys", "Quota"),
    "engine.recovery": ("Happened", "NeverHappened", "Resolution", "Resume", "StillUnknown", "UnknownOutcome"),
    "engine.step_rules": ("Step",),
    "extension": ("Idempotency",),
    "settings": ("derived_secret",),
    "settings.cors": ("cors_headers",),
    "steps.steps": ("current_step", "durable_step"),
    "web.current_claim": ("current_claim", "idempotency_field"),
    "web.key_status": ("key_status",),
    "web.policies": ("claim_here", "exempt", "idempotent"),
    "web.webhooks": ("webhook",),
}

# A type checker would take any name for one of ours if it saw this function.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import this public name, and keep it: Python calls this function only for names that are not here yet."""
        for module, names in _NAMES.items():
            if name in names:
                # Two threads may do this at the same time. Python imports a module once, so both find the same object.
                value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
