"""The schema of each release, step by step, as its own migrations made it. Never edit a step after its release.

An upgrade must make the declared tables of whatever these leave.
"""

from typing import Final

from tests.stores.sql.migrations.frozen import (
    m0001_tables,
    m0002_outbox,
    m0003_steps,
    m0004_activity,
    m0005_outbox_namespaces,
    m0006_remembered,
)

STEPS: Final = (
    m0001_tables.STEP,
    m0002_outbox.STEP,
    m0003_steps.STEP,
    m0004_activity.STEP,
    m0005_outbox_namespaces.STEP,
    m0006_remembered.STEP,
)
