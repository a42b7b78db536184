"""The application, and on one page the promise of each endpoint to a client that retries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flask import Flask

from example_app import auth, events, models, openapi, operators, problems, providers, simulate
from example_app.accounting import accounting
from example_app.charges import charges
from example_app.checkout import checkouts, what_became_of_it
from example_app.extension import idempotency
from example_app.gateway import gateway, what_happened
from example_app.payments import payments
from example_app.shop import shop

DATABASE = "sqlite:///example.sqlite3"

# A payment and its record are committed together: a worker that vanishes leaves both or neither, and no unknown outcome.
idempotency.configure(payments, required=True, effects="transactional")
idempotency.configure(charges, profile="stripe")
# Each commit carries a unique marker of its request, so a retry may run again what a vanished worker left.
idempotency.configure(accounting, profile="x-idempotency", effects="deduplicated")
# A worker that is silent for five seconds here is gone: a charge takes less than one, and each worker renews its lease.
idempotency.configure(gateway, profile="playbook", ignore_fields=("/timestamp", "/trace_id"), lease=5)
# Four effects, each a durable step: a retry goes on after those that are done.
idempotency.configure(checkouts, required=True)
# People click twice: the second click waits for the first, and gets the same page.
idempotency.configure(
    shop, required=True, effects="transactional", form_field="idempotency_key", in_flight="wait", wait=5
)
# The gateway view commits by itself. If its worker vanishes, this resolver finds out whether the charge was made.
idempotency.resolver("gateway.create")(what_happened)
# A worker that vanishes while it charges leaves one step in doubt. The card provider knows what became of it.
idempotency.resolver("checkouts.create")(what_became_of_it)


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """Return the application. `config` overrides the environment: DATABASE_URL, IDEMPOTENCY_REDIS_URL and FLASK_….

    Without a SECRET_KEY there is no shop page, because Flask cannot sign its cookie.
    """
    app = Flask(__name__)
    app.config.from_mapping(
        SQLALCHEMY_DATABASE_URI=models.database_url(os.environ.get("DATABASE_URL") or DATABASE),
        IDEMPOTENCY_STORE="flask-sqlalchemy://",
        IDEMPOTENCY_PUBLISH=True,
        IDEMPOTENCY_BROWSER_MODULE="/idempotency.js",
        SESSION_COOKIE_SAMESITE="Lax",
        CONSOLE_ALLOW_HTTP=False,
        DEMO_SIMULATE=simulate.wanted(),
        DEMO_WITNESS=os.path.join(app.instance_path, "witness.sqlite3"),
        DEMO_PROVIDERS=os.path.join(app.instance_path, "providers.sqlite3"),
    )
    if cache := os.environ.get("IDEMPOTENCY_REDIS_URL"):
        app.config["IDEMPOTENCY_REDIS_URL"] = cache
    app.config.from_prefixed_env()
    app.config.from_mapping(config or {})

    app.before_request(auth.authenticate)
    for blueprint in (payments, charges, accounting, gateway, checkouts):
        app.register_blueprint(blueprint)
    if app.secret_key:
        app.register_blueprint(shop)
    app.register_blueprint(operators.console(allow_http=app.config["CONSOLE_ALLOW_HTTP"]))
    openapi.install(app)
    problems.install(app)
    models.install(app)
    events.install(app)
    providers.install(app)
    if app.config["DEMO_SIMULATE"]:
        simulate.install(app)
    idempotency.init_app(app)
    return app
