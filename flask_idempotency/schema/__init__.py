"""Every word that configuration may contain: its type, its limits, and the text that the reference shows."""

from flask_idempotency.schema.deployment import DOCS_URL, MEMORY, DeploymentSchema
from flask_idempotency.schema.fields import MAX_LIMIT
from flask_idempotency.schema.policy import PolicySchema

__all__ = ["DOCS_URL", "MAX_LIMIT", "MEMORY", "DeploymentSchema", "PolicySchema"]
