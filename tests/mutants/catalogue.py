"""All seeded faults, by the room that they are in. A new one is one more entry in one of these."""

from __future__ import annotations

from typing import Final

from tests.mutants.in_engine import IN_ENGINE
from tests.mutants.in_memory import IN_MEMORY
from tests.mutants.in_redis import IN_REDIS
from tests.mutants.in_sql import IN_SQL
from tests.mutants.in_tiered import IN_TIERED
from tests.mutants.in_upkeep import IN_UPKEEP
from tests.mutants.in_web import IN_WEB
from tests.mutants.mutant import Mutant

CATALOGUE: Final[tuple[Mutant, ...]] = (*IN_REDIS, *IN_MEMORY, *IN_SQL, *IN_TIERED, *IN_ENGINE, *IN_WEB, *IN_UPKEEP)
