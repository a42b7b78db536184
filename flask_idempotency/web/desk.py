"""What one application's guard works with."""

from __future__ import annotations

from dataclasses import dataclass

from flask_idempotency.engine.engine import Engine
from flask_idempotency.engine.events import Observers
from flask_idempotency.engine.keys import Identity
from flask_idempotency.settings import Settings
from flask_idempotency.web.loaders import Loaders
from flask_idempotency.web.policies import Policies
from flask_idempotency.web.watch import ShapeWatch, Watch


@dataclass(frozen=True, slots=True, repr=False)
class Desk:
    """Made once per application, then only read, and never shown: it holds secrets.

    `identities` has one entry per secret in use, the newest first.
    """

    engine: Engine
    identities: tuple[Identity, ...]
    settings: Settings
    policies: Policies
    loaders: Loaders
    observers: Observers
    counts: bool = False
    """Whether the store can count what each tenant has."""
    watch: Watch | None = None
    """None: no janitor is expected."""
    shape: ShapeWatch | None = None
    """None: the store cannot remember the shape of identity, or no other process sees it."""
