"""Serve pages on which operators watch the records of an application, and settle them."""

from flask_idempotency.console.access import Operator
from flask_idempotency.console.blueprint import Console

__all__ = ["Console", "Operator"]
