"""Make unsafe HTTP endpoints of a Flask application safe to retry. These are the public names."""

from flask_idempotency.engine.errors import ConfigurationError, IdempotencyError, LeaseLost, StoreUnavailable
from flask_idempotency.engine.policy import Decision
from flask_idempotency.engine.quota import NewKeys, Quota
from flask_idempotency.engine.recovery import Happened, NeverHappened, Resolution, StillUnknown, UnknownOutcome
from flask_idempotency.extension import Idempotency
from flask_idempotency.web.current_claim import current_claim, idempotency_field
from flask_idempotency.web.policies import claim_here, exempt, idempotent

__all__ = [
    "ConfigurationError",
    "Decision",
    "Happened",
    "Idempotency",
    "IdempotencyError",
    "LeaseLost",
    "NeverHappened",
    "NewKeys",
    "Quota",
    "Resolution",
    "StillUnknown",
    "StoreUnavailable",
    "UnknownOutcome",
    "claim_here",
    "current_claim",
    "exempt",
    "idempotency_field",
    "idempotent",
]
