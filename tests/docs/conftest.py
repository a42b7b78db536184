"""Blocks of the documentation run as if each had a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import celery._state
import celery.app.builtins
import pytest


@pytest.fixture(autouse=True)
def keep_tasks_apart() -> Iterator[None]:
    """Forget the tasks that a test defines: Celery shares each with every application of the process."""
    state: Any = celery._state
    before = set(state._on_app_finalizers)
    yield
    state._on_app_finalizers.intersection_update(before)
