"""Every word that configuration may contain: its type, its limits, and the text that the reference shows."""

from flask_idempotency.schema.deployment import DOCS_URL, MEMORY, DeploymentSchema
from flask_idempotency.schema.policy import PolicySchema

__all__ = ["DOCS_URL", "MEMORY", "DeploymentSchema", "PolicySchema"]
