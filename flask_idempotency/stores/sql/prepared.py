"""What the store itself sends, built once."""

from __future__ import annotations

from flask_idempotency.stores.sql import statements
from flask_idempotency.stores.sql.completing import Completing
from flask_idempotency.stores.sql.dialects import Dialect


class Statements:
    def __init__(self, dialect: Dialect) -> None:
        self.read = statements.read(dialect)
        self.standing = statements.standing(dialect)
        self.renew = statements.renew(dialect)
        self.mark = statements.mark(dialect)
        self.mark_early = statements.mark_early(dialect)
        self.has_written = statements.has_written(dialect)
        self.release = statements.release(dialect)
        self.give_up = statements.give_up(dialect)
        self.hold = statements.hold(dialect)
        self.completing = Completing(dialect)
