"""A fault that is seeded on purpose, and who has to notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One place of our code, what is put there instead, and the tests of which one must fail then."""

    name: str
    file: str
    """From the top of the repository."""
    replaced: str
    """Found exactly once in the file. As short as that allows, so that it outlives changes beside it."""
    by: str
    killed_by: tuple[str, ...]
    """Node ids of quick tests. Those that run without a server of their own are preferred."""
    harm: str
    """What would happen to a payment."""
    may_hang: bool = False
    """Whether a run that does not end has noticed the fault."""

    def places(self, text: str) -> int:
        """How often the place is found in the text of its file."""
        return text.count(self.replaced)

    def applied(self, text: str) -> str:
        return text.replace(self.replaced, self.by)
