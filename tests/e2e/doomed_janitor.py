"""A janitor that is killed at a point of the request that it finishes. Run as a program: its argument names the point."""

from __future__ import annotations

import sys
import time

from flask_idempotency.maintenance.janitor import Batcher
from flask_idempotency.web.janitor import work_of
from tests.e2e.service import STEPS
from tests.e2e.step_shop import from_environment


def main() -> None:
    app = from_environment()
    state = app.extensions["idempotency"]
    state.extension.act_for(lambda principal, tenant: {STEPS: f"die:{sys.argv[1]}"})
    # Without the lock of the task, which a killed janitor would leave behind for minutes.
    every = work_of(app)
    with app.app_context():
        every["finish"](time.time(), Batcher())


if __name__ == "__main__":
    main()
