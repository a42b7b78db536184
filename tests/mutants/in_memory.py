"""Faults in how a store notices that it has lost its memory, and in what owners and operators do about it."""

from __future__ import annotations

from typing import Final

from tests.mutants.in_redis import LUA
from tests.mutants.mutant import Mutant

REFUSED: Final = "tests/stores/test_redis_memory.py"
RESTORED: Final = "tests/stores/test_redis_restored.py"
SERVERS: Final = "tests/stores/test_redis_handed_over.py"
OWNERS: Final = "tests/engine/test_forgotten.py"
ON: Final = "valkey-9.1"

IN_MEMORY: Final = (
    Mutant(
        name="memory-emptied-is-taken-for-new",
        file=f"{LUA}/canary.lua",
        replaced="  loss = 'missing'\n",
        by="  loss, after = nil, 'run'\n",
        killed_by=(f"{REFUSED}::test_a_key_that_is_not_known_waits_for_somebody_to_look[{ON}-emptied]",),
        harm="After a FLUSHALL every retry of every payment runs again.",
    ),
    Mutant(
        name="memory-restart-goes-unnoticed",
        file=f"{LUA}/canary.lua",
        replaced="elseif changed then",
        by="elseif false then",
        killed_by=(f"{SERVERS}::test_a_restart_is_noticed_though_nothing_is_lost[{ON}]",),
        harm="What a fail-over has lost runs again.",
    ),
    Mutant(
        name="memory-primary-comes-back-unnoticed",
        file=f"{LUA}/process.lua",
        replaced="process ~= process_then or promoted",
        by="process ~= process_then",
        killed_by=(f"{SERVERS}::test_a_primary_that_was_one_before_has_lost_what_came_between[{ON}]",),
        harm="A primary that was demoted and promoted again runs what it threw away in between.",
    ),
    Mutant(
        name="memory-foreign-store-will-do",
        file=f"{LUA}/canary.lua",
        replaced="(expected ~= '' and memory[2] ~= expected) or ",
        by="",
        killed_by=(f"{REFUSED}::test_another_store_is_foreign[{ON}]",),
        harm="With a wrong number in the URL, production runs against the Redis of another environment, which knows no key.",
    ),
    Mutant(
        name="memory-other-layout-will-do",
        file=f"{LUA}/canary.lua",
        replaced=" or memory[3] ~= laid_out",
        by="",
        killed_by=(f"{REFUSED}::test_another_store_is_foreign[{ON}]",),
        harm="Another number of shards looks for every record where it is not, and every retry runs again.",
    ),
    Mutant(
        name="memory-old-acknowledgement-holds-for-ever",
        file=f"{LUA}/canary.lua",
        replaced="open and open >= since",
        by="open",
        killed_by=(f"{REFUSED}::test_what_is_lost_after_an_acknowledgement_is_another_loss[{ON}]",),
        harm="Who has acknowledged one fail-over has acknowledged all that come.",
    ),
    Mutant(
        name="memory-loss-is-earlier-than-the-one-before",
        file=f"{LUA}/process.lua",
        replaced="(tonumber(remembered.lost) or 0) + 1, ",
        by="",
        killed_by=(f"{REFUSED}::test_what_is_lost_after_an_acknowledgement_is_another_loss[{ON}]",),
        harm="Where the clock was set back, a second fail-over passes for the one that was acknowledged.",
    ),
    Mutant(
        name="memory-key-from-the-future-is-believed",
        file=f"{LUA}/canary.lua",
        replaced=" and born <= now_ms + skew",
        by="",
        killed_by=(f"{REFUSED}::test_a_key_that_was_made_later_than_the_loss_runs_at_once[{ON}-made in the future]",),
        harm="A client whose clock is a day ahead has its forgotten payments run again.",
    ),
    Mutant(
        name="memory-key-at-the-edge-is-believed",
        file=f"{LUA}/canary.lua",
        replaced="born > since + skew",
        by="born > since - skew",
        killed_by=(f"{REFUSED}::test_a_key_that_was_made_later_than_the_loss_runs_at_once[{ON}-made before]",),
        harm="A payment made just before a fail-over runs again.",
    ),
    Mutant(
        name="memory-takes-over-from-before-a-loss",
        file=f"{LUA}/grant.lua",
        replaced="(after == 'run' or fence(record) > last_before)",
        by="true",
        killed_by=(f"{REFUSED}::test_what_was_claimed_before_a_loss_is_never_taken_over[{ON}]",),
        harm="A key whose answer was given, and forgotten, gets a second answer.",
    ),
    Mutant(
        name="memory-superseded-owner-goes-on",
        file=f"{LUA}/owner.lua",
        replaced="record.state ~= COMPLETED and superseded(record)",
        by="false",
        killed_by=(
            f"{REFUSED}::test_whoever_may_have_been_taken_over_in_what_was_forgotten_has_lost_its_claim[{ON}-release]",
        ),
        harm="An owner whose successor was forgotten frees the key of a payment that the successor has made.",
    ),
    Mutant(
        name="memory-puts-back-what-was-freed",
        file=f"{LUA}/restore.lua",
        replaced="if memory[2] and not changed and (tonumber(memory[5]) or 0) == lost_before then",
        by="if false then",
        killed_by=(f"{RESTORED}::test_nothing_is_put_back_that_was_removed[{ON}]",),
        harm="A key that a person has freed is taken again by the owner that was given up.",
    ),
    Mutant(
        name="memory-puts-back-what-was-given-up",
        file=f"{LUA}/restore.lua",
        replaced="if redis.call('EXISTS', KEYS[8]) == 1 or",
        by="if",
        killed_by=(f"{RESTORED}::test_nothing_is_put_back_that_its_owner_gives_up_at_that_moment[{ON}]",),
        harm="A key that its owner has released is held by nobody, and ends in quarantine.",
    ),
    Mutant(
        name="memory-fence-falls-after-what-was-put-back",
        file=f"{LUA}/restore.lua",
        replaced="if fence > (tonumber(memory[1]) or 0) then",
        by="if false then",
        killed_by=(f"{RESTORED}::test_fences_rise_after_what_was_put_back[{ON}]",),
        harm="A stale worker passes the application's own check of fences.",
    ),
    Mutant(
        name="memory-heals-under-takeover",
        file="flask_idempotency/engine/claim.py",
        replaced="memory is None or (held.on_lapse is OnLapse.TAKEOVER and not self._past_point)",
        by="memory is None",
        killed_by=(f"{OWNERS}::test_whoever_may_have_been_taken_over_puts_nothing_back",),
        harm="A superseded owner calls its claim back to life, and the key gets two answers (M18).",
    ),
    Mutant(
        name="memory-answer-of-a-forgotten-claim-is-dropped",
        file="flask_idempotency/engine/claim.py",
        replaced="Settlement(self._remembered(write), lambda: self._completed(sealing))",
        by="Settlement(write, lambda: self._completed(sealing))",
        killed_by=(f"{OWNERS}::test_a_result_of_a_forgotten_claim_is_replayed",),
        harm="A payment that was made is unknown for ever, and runs again once somebody has acknowledged the loss.",
    ),
    Mutant(
        name="memory-acknowledged-before-owners-came-back",
        file="flask_idempotency/stores/redis/memory.py",
        replaced="if due is not None and standing.now < due and not forced:",
        by="if False:",
        killed_by=(f"{REFUSED}::test_owners_are_waited_for[{ON}-another process]",),
        harm="A payment that is being made runs again, because its owner had no time to say so.",
    ),
    Mutant(
        name="memory-lost-runs-unprotected",
        file="flask_idempotency/web/asking.py",
        replaced="if isinstance(error, MemoryLost):",
        by="if False:",
        killed_by=("tests/web/test_memory_lost.py::test_a_request_is_refused_and_never_run[allow]",),
        harm="Where requests run while the store is away, forgotten payments run again while it is there.",
    ),
    Mutant(
        name="memory-resolver-is-asked-too-early",
        file="flask_idempotency/web/chores.py",
        replaced="asked = asking if _remembers(built, observers) else None",
        by="asked = asking",
        killed_by=(
            f"tests/web/test_resolvers_after_loss.py::test_a_resolver_is_asked_when_somebody_has_looked[{ON}-False]",
        ),
        harm="A resolver finds nothing of a payment that a forgotten owner is about to make, and frees its key.",
    ),
    Mutant(
        name="redis-refused-claim-may-still-be-granted",
        file="flask_idempotency/stores/redis/store.py",
        replaced="if tries.repeated and answer[:1]",
        by="if False and answer[:1]",
        killed_by=(
            f"tests/stores/test_redis_late.py::test_a_claim_that_was_refused_and_arrives_once_more_is_granted_to_nobody[{ON}]",
        ),
        harm="A claim that was sent twice, and refused, holds the key for nobody when its first packet comes.",
    ),
    Mutant(
        name="memory-acknowledged-without-being-seen",
        file=f"{LUA}/acknowledge.lua",
        replaced=" or (lost and not (seen and lost <= seen))",
        by="",
        killed_by=(f"{REFUSED}::test_an_acknowledgement_that_comes_late_is_of_what_was_seen[{ON}]",),
        harm="Who acknowledges one fail-over, slowly, acknowledges the next one too.",
    ),
    Mutant(
        name="memory-full-server-passes-for-one-that-is-away",
        file=f"{LUA}/process.lua",
        replaced="  local told = redis.pcall(\n    'HSET', key,",
        by="  local told = redis.call(\n    'HSET', key,",
        killed_by=(f"tests/stores/test_redis_full_memory.py::test_a_key_that_is_not_known_is_refused_as_such[{ON}]",),
        harm="Where requests run while the store is away, what it has forgotten runs while it is full.",
    ),
    Mutant(
        name="memory-loss-noticed-by-a-slow-clock",
        file=f"{LUA}/process.lua",
        replaced=", math.floor(last_fence / 1000))",
        by=")",
        killed_by=(f"{REFUSED}::test_a_loss_is_never_earlier_than_a_claim[{ON}]",),
        harm="A payment made before a crash passes for one made after it, on a machine whose clock was behind.",
    ),
    Mutant(
        name="memory-silent-part-makes-an-outage-of-a-loss",
        file="flask_idempotency/stores/redis/memory.py",
        replaced="            with suppress(IdempotencyError):\n                self._parts()",
        by="            self._parts()",
        killed_by=(f"{REFUSED}::test_a_part_that_is_away_makes_no_loss_an_outage[{ON}]",),
        harm="Where requests run while the store is away, a forgotten payment runs while another node is down.",
    ),
    Mutant(
        name="redis-grants-to-who-gave-up",
        file=f"{LUA}/grant.lua",
        replaced="redis.call('EXISTS', KEYS[8]) == 1",
        by="false",
        killed_by=(
            "tests/stores/test_contract.py::TestStores::test_a_claim_that_comes_after_its_release_is_not_granted[fakeredis]",
        ),
        harm="A claim that arrives after it was given up holds the key for nobody, and ends in quarantine.",
    ),
)
