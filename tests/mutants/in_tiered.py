"""Faults where a cache of answers stands before a system of record."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

TIERED: Final = "flask_idempotency/stores/tiered.py"

IN_TIERED: Final = (
    Mutant(
        name="tiered-caches-before-the-commit",
        file=TIERED,
        replaced="            self.committed(key, self._telling.complete_and_tell(key, token, payload, keep=keep))\n",
        by="            from flask_idempotency.engine.model import State\n\n"
        "            early = self._system.read(key)\n"
        "            if early is not None:\n"
        "                early = replace(early, state=State.COMPLETED, payload=payload, completed_at=early.requested_at)\n"
        "                self.committed(key, replace(early, remaining=keep, deadline=early.requested_at + keep))\n"
        "            self._telling.complete_and_tell(key, token, payload, keep=keep)\n",
        killed_by=("tests/stores/tiered/test_store.py::test_nothing_is_cached_before_the_system_has_committed",),
        harm="The database refuses the commit, and the cache goes on telling everybody that the payment was made.",
    ),
    Mutant(
        name="tiered-cache-grants",
        file=TIERED,
        replaced="        outcome = self._system.claim(request, token=token, lease=lease, quota=quota)\n",
        by="        from flask_idempotency.engine.model import Grant\n\n"
        "        outcome: StoreOutcome = Claimed(Grant(token, found.at or 1, 1, lease))\n",
        killed_by=("tests/stores/test_contract.py::TestStores::test_a_taken_key_is_in_flight[tiered-fakeredis]",),
        harm="A miss in the cache passes for a claim, and every duplicate pays.",
    ),
    Mutant(
        name="tiered-replays-to-another-request",
        file=TIERED,
        replaced="if found.fingerprint != request.fingerprint:",
        by="if False:",
        killed_by=(
            "tests/stores/test_contract.py::TestStores::"
            "test_another_request_is_a_mismatch_before_anything_else[tiered-redis-6.2-telling-completed]",
        ),
        harm="A second payment under the first one's key is given the first one's receipt, but only while the cache is warm.",
    ),
    Mutant(
        name="tiered-frees-what-is-still-replayed",
        file="flask_idempotency/stores/tiered.py",
        replaced="if seen.record.payload is not None and not self._withdraw(seen.key, seen.record.fence):",
        by="if False:",
        killed_by=("tests/stores/tiered/test_unsettled.py::test_an_answer_whose_key_was_freed_is_not_replayed",),
        harm="An operator frees a payment that was never made, and its retries are told that it was.",
    ),
)
