"""The application, and on one page what each of its endpoints promises to a client that retries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flask import Flask

from example_app import auth, models, problems, simulate
from example_app.accounting import accounting
from example_app.charges import charges
from example_app.gateway import gateway
from example_app.payments import payments
from flask_idempotency import Idempotency

idempotency = Idempotency(principal=auth.principal, tenant=auth.tenant)

# "transactional" once the library has its SQL store: the record would then be committed together with the payment, and
# a worker that vanishes could never leave an unknown outcome. Until then the view marks its point of no return.
idempotency.configure(payments, required=True, effects="marked")
idempotency.configure(charges, profile="stripe")
idempotency.configure(accounting, profile="x-idempotency")
idempotency.configure(gateway, profile="playbook", ignore_fields=("/timestamp", "/trace_id"))


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """The service. Configured by `config`, else by FLASK_… variables: FLASK_IDEMPOTENCY_STORE=redis://localhost."""
    app = Flask(__name__)
    app.config.from_mapping(
        SQLALCHEMY_DATABASE_URI="sqlite:///example.sqlite3",
        DEMO_SIMULATE=simulate.wanted(),
        DEMO_WITNESS=os.path.join(app.instance_path, "witness.sqlite3"),
    )
    app.config.from_prefixed_env()
    app.config.from_mapping(config or {})

    app.before_request(auth.authenticate)
    for blueprint in (payments, charges, accounting, gateway):
        app.register_blueprint(blueprint)
    problems.install(app)
    models.install(app)
    if app.config["DEMO_SIMULATE"]:
        simulate.install(app)
    idempotency.init_app(app)
    return app
