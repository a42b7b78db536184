"""Publish messages together with your rows, and send each of them at least once, under one id.

`Webhook` needs httpx: pip install 'flask-idempotency[client]'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flask_idempotency.engine.outbox import Adapter, Message, Undeliverable
from flask_idempotency.outbox.brokers import Exchange, Kafka, Tasks
from flask_idempotency.outbox.outbox import Outbox

if TYPE_CHECKING:
    from flask_idempotency.outbox.webhook import Webhook

__all__ = ["Adapter", "Exchange", "Kafka", "Message", "Outbox", "Tasks", "Undeliverable", "Webhook"]


def __getattr__(name: str) -> Any:
    """Import `Webhook` when it is first used: applications without webhooks need no HTTP client."""
    if name == "Webhook":
        from flask_idempotency.outbox.webhook import Webhook

        return Webhook
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
