"""The extension object. `app.py` says what it promises at each endpoint, and `events.py` what becomes of messages."""

from __future__ import annotations

from example_app import auth
from flask_idempotency import Idempotency

idempotency = Idempotency(principal=auth.principal, tenant=auth.tenant)
idempotency.quota_loader(auth.plan)
