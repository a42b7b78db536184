"""Tell clients, in documents, what this application promises: the policy document, and additions to OpenAPI documents."""

from flask_idempotency.openapi.describing import describe

__all__ = ["describe"]
