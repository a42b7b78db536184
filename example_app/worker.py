"""The worker of the example's messages: `celery -A example_app.worker worker`."""

from __future__ import annotations

from example_app.app import create_app
from example_app.events import celery
from flask_idempotency.consumers.celery import serve

serve(celery, create_app())
app = celery
