"""Processes that use keys of a few tenants in every way there is, and are killed while they do. Run as a program.

    python -m tests.e2e.quota_crowd '{"store": URL, "tids": [hex], "limit": 60, "processes": 64, "seconds": 60, "seed": 7}'

One process forks the crowd, kills one after another at random moments, forks others in their place, and ends them all
when the time is over. It prints one JSON object: how many were killed, and what calls were made by all of them.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from contextlib import suppress
from hashlib import sha256
from typing import Any, cast

from flask_idempotency.assembly import build_store
from flask_idempotency.engine.errors import LeaseLost, StoreUnavailable
from flask_idempotency.engine.keys import StorageKey
from flask_idempotency.engine.model import ClaimRequest, Grant, OnExpiry, OverQuota, StoredPayload
from flask_idempotency.engine.quota import Quota
from flask_idempotency.engine.store import Store

KEYS = 150
"""Names that a tenant's keys have: few enough that they meet."""

FORK_SECONDS = 0.03
LIFE_SECONDS = 3.0

KEEPS = (0.01, 0.05, 0.3, 1.0, 4.0)
FINGERPRINT = b"\1" + b"f" * 16
COUNTED = ("claims", "grants", "refusals", "completions")


def key_of(tid: bytes, name: int) -> StorageKey:
    return StorageKey(sha256(tid + b"%d" % name).digest(), tid)


class Member:
    """One process of the crowd. Its calls are counted in `counts`, in the order of `COUNTED`."""

    def __init__(self, store: Store, tids: list[bytes], limit: int, rng: random.Random, counts: memoryview) -> None:
        self._store = store
        self._tids = tids
        self._quota = Quota(records=limit, in_flight=limit)
        self._rng = rng
        self.counts = counts

    def work(self, until: float) -> None:
        while time.monotonic() < until:
            with suppress(LeaseLost, StoreUnavailable):
                self._use_a_key()

    def _use_a_key(self) -> None:
        rng, store = self._rng, self._store
        key, token = key_of(rng.choice(self._tids), rng.randrange(KEYS)), rng.randbytes(16)
        request = ClaimRequest(key, FINGERPRINT, OnExpiry.TAKEOVER)
        self.counts[0] += 1
        outcome = store.claim(request, token=token, lease=rng.uniform(0.02, 0.4), quota=self._quota)
        self.counts[2] += isinstance(outcome, OverQuota)
        if not isinstance(outcome, Grant):
            return
        self.counts[1] += 1
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 0.02))
        match rng.randrange(10):
            case 0:
                store.release(key, token)
                return
            case 1:
                store.renew(key, token, lease=0.2)
            case 2:
                store.quarantine(key, token, "for a while")
            case 3:
                # The same request once more, as a client library sends it after a lost reply.
                store.claim(request, token=token, lease=0.2, quota=self._quota)
            case 4:
                return
        payload = StoredPayload(rng.randbytes(8), 201, True, rng.randrange(5000))
        store.complete(key, token, payload, keep=rng.choice(KEEPS))
        self.counts[3] += 1
        if rng.random() < 0.1:
            store.complete(key, token, payload, keep=rng.choice(KEEPS))


class Crowd:
    """Forks members, kills them, and knows what each of them did: they count in memory that outlives them."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self._rng = random.Random(told["seed"])
        # What a store is made of takes a second to import: members who each did that would be killed before their first claim.
        cast("Any", build_store(told["store"], memory={"after_loss": "run"})).close()
        # Forking them all takes a while as well.
        self._until = time.monotonic() + told["seconds"] + FORK_SECONDS * told["processes"]
        self._pids: dict[int, mmap.mmap] = {}
        self.killed = 0
        self.counts = dict.fromkeys(COUNTED, 0)

    def run(self) -> None:
        for _ in range(self._told["processes"]):
            self._fork()
        while time.monotonic() < self._until - 0.5:
            # However many there are, each lives for three seconds or so: it has to do something before it is killed.
            time.sleep(self._rng.uniform(0, 2 * LIFE_SECONDS / self._told["processes"]))
            victim = self._rng.choice(list(self._pids))
            os.kill(victim, signal.SIGKILL)
            self._reap(victim)
            self.killed += 1
            self._fork()
        for pid in list(self._pids):
            self._reap(pid)

    def _fork(self) -> None:
        counts = mmap.mmap(-1, mmap.PAGESIZE)
        seed = self._rng.random()
        pid = os.fork()
        if pid == 0:
            self._be_a_member(seed, memoryview(counts).cast("Q"))
        self._pids[pid] = counts

    def _be_a_member(self, seed: float, counts: memoryview) -> None:
        try:
            store = build_store(self._told["store"], memory={"after_loss": "run"})
            tids = [bytes.fromhex(tid) for tid in self._told["tids"]]
            member = Member(store, tids, self._told["limit"], random.Random(seed), counts)
            member.work(self._until)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child must never go on as its parent
            sys.excepthook(*sys.exc_info())
            os._exit(1)

    def _reap(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
            raise SystemExit(f"a member of the crowd failed with {os.waitstatus_to_exitcode(status)}")
        with self._pids.pop(pid) as memory, memoryview(memory) as octets, octets.cast("Q") as counts:
            for name, count in zip(COUNTED, counts, strict=False):
                self.counts[name] += count


def main() -> None:
    crowd = Crowd(json.loads(sys.argv[1]))
    crowd.run()
    sys.stdout.write(json.dumps({"killed": crowd.killed, **crowd.counts}))


if __name__ == "__main__":
    main()
