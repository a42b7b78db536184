"""An empty database of each kind, and engines that are put away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy import Engine, create_engine

from flask_idempotency.engine.clock import Clock
from flask_idempotency.stores.sql.database import Database
from flask_idempotency.stores.sql.schema import metadata
from flask_idempotency.stores.sql.store import SqlStore
from flask_idempotency.testing.clock import FrozenClock
