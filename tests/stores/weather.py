"""A Redis to which things happen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, get_args

import redis

Fate: TypeAlias = Literal["fine", "emptied before", "emptied after", "request lost", "reply lost", "frozen"]
FATES: tuple[Fate, ...] = tuple(fate for fate in get_args(Fate) if fate != "fine")


class Exposed:
    """Mixed into a client: what befalls each of the scripts that it is to run."""

    _fates: tuple[Fate, ...] = ()
    _after: Fate = "fine"
    _frozen: tuple[tuple[Any, ...], ...] = ()

    def expect(self, fates: Iterable[Fate], *, after: Fate = "fine") -> None:
        """These, one script each, and `after` once they are used up."""
        self._fates, self._after = tuple(fates), after

    @property
    def unspent(self) -> bool:
        return bool(self._fates)

    def thaw(self, now: float) -> None:
        """What the server was sent while it was frozen it does now, in this order, and nobody listens any more."""
        commands, self._frozen = self._frozen, ()
        for name, script, count, *rest in commands:
            self._pass(name, script, count, *rest[: int(count)], round(now * 1_000_000), *rest[int(count) + 1 :])

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if not str(args[0]).startswith("EVAL"):
            return self._pass(*args, **options)
        fate, self._fates = (self._fates or (self._after,))[0], self._fates[1:]
        if fate == "frozen":
            self._frozen += (args,)
        if fate in ("request lost", "frozen"):
            raise redis.ConnectionError("the request was lost, as this test asked")
        if fate == "emptied before":
            self._pass("FLUSHALL")
        answer = self._pass(*args, **options)
        if fate == "emptied after":
            self._pass("FLUSHALL")
        if fate == "reply lost":
            raise redis.ConnectionError("the reply was lost, as this test asked")
        return answer

    def _pass(self, *args: Any, **options: Any) -> Any:
        client: Any = super()
        return client.execute_command(*args, **options)


class Weather(Exposed, redis.Redis):
    pass
