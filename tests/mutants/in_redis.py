"""Faults in the scripts that Redis runs."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

LUA: Final = "flask_idempotency/stores/redis/lua"
CONTRACT: Final = "tests/stores/test_contract.py::TestStores"
UNSETTLED: Final = "tests/stores/test_contract.py::TestUnsettled"

IN_REDIS: Final = (
    Mutant(
        name="redis-completes-for-any-token",
        file=f"{LUA}/complete.lua",
        replaced="= owned_record(KEYS, token, now)",
        by="= owned_record(KEYS, string.sub(redis.call('GET', KEYS[1]) or '', 2, 17), now)",
        killed_by=(f"{CONTRACT}::test_the_late_finisher_is_fenced_off[fakeredis]",),
        harm="A worker that was given up stores its answer over the claim of the one that runs the payment now.",
    ),
    Mutant(
        name="redis-releases-for-any-token",
        file=f"{LUA}/release.lua",
        replaced="= owned_record(KEYS, token, now)",
        by="= owned_record(KEYS, string.sub(redis.call('GET', KEYS[1]) or '', 2, 17), now)",
        killed_by=(f"{CONTRACT}::test_a_token_that_was_taken_over_changes_nothing[fakeredis-release]",),
        harm="A worker that was given up frees the key while its successor is at work: a third one runs the payment too.",
    ),
    Mutant(
        name="redis-owner-is-anybody",
        file=f"{LUA}/lib/owner.lua",
        replaced="record.token ~= token",
        by="false",
        killed_by=(f"{CONTRACT}::test_a_token_that_never_owned_changes_nothing[fakeredis-hold]",),
        harm="Whoever was refused may settle the payment of the one who was not.",
    ),
    Mutant(
        name="redis-refusal-writes",
        file=f"{LUA}/claim.lua",
        replaced="  if left > 0 then\n",
        by="  if left > 0 then\n    redis.call('SETRANGE', KEYS[1], 1, token)\n",
        killed_by=(f"{CONTRACT}::test_refusal_changes_nothing[fakeredis-same-in flight]",),
        harm="Each impatient retry takes the record from its owner, who then cannot say that the payment was made.",
    ),
    Mutant(
        name="redis-claim-is-not-idempotent",
        file=f"{LUA}/claim.lua",
        replaced="if record.token == token then",
        by="if false then",
        killed_by=(f"{CONTRACT}::test_the_same_token_is_granted_again[fakeredis]",),
        harm="A claim whose reply was lost and that is sent again meets itself: nobody pays, and the key is stuck.",
    ),
    Mutant(
        name="redis-renewal-shortens",
        file=f"{LUA}/renew.lua",
        replaced="if deadline <= record.deadline then",
        by="if deadline == record.deadline then",
        killed_by=(f"{CONTRACT}::test_a_renewal_never_shortens[fakeredis]",),
        harm="A short renewal ends a long lease, and a retry takes the payment over while it is being made.",
    ),
    Mutant(
        name="redis-mark-is-not-stored",
        file=f"{LUA}/mark_point_of_no_return.lua",
        replaced="first_byte(PROCESSING, false, ",
        by="first_byte(PROCESSING, true, ",
        killed_by=(f"{CONTRACT}::test_a_marked_record_is_never_taken_over[fakeredis]",),
        harm="A payment that was past its point of no return is made once more by the next retry.",
    ),
    Mutant(
        name="redis-lapsed-key-is-taken-over-against-its-rule",
        file=f"{LUA}/claim.lua",
        replaced="local takeover = live and record.takeover",
        by="local takeover = live",
        killed_by=(f"{CONTRACT}::test_a_lapsed_record_is_quarantined[fakeredis-OnExpiry.QUARANTINE]",),
        harm="The worker vanished after it had paid; the retry pays again.",
    ),
    Mutant(
        name="redis-quarantined-key-is-taken-over",
        file=f"{LUA}/claim.lua",
        replaced="data_loss_of(KEYS[4], ARGV[8], ARGV[9], rule, tonumber(ARGV[11]), tonumber(ARGV[12]), now)\n",
        by="data_loss_of(KEYS[4], ARGV[8], ARGV[9], rule, tonumber(ARGV[11]), tonumber(ARGV[12]), now)\n"
        "if live and record.takeover then\n"
        "  record.state = PROCESSING\n"
        "end\n",
        killed_by=(f"{CONTRACT}::test_a_held_claim_is_never_taken_over[fakeredis]",),
        harm="A payment of which its owner said that nobody knows what became of it is simply made again.",
    ),
    Mutant(
        name="redis-quarantine-ends-by-time",
        file=f"{LUA}/lib/record.lua",
        replaced="return record.state == COMPLETED and record.deadline * 1000 <= now",
        by="return record.state ~= PROCESSING and record.deadline * 1000 <= now",
        killed_by=(f"{CONTRACT}::test_a_quarantined_record_never_expires[fakeredis]",),
        harm="Whoever waits long enough may repeat a payment of which nobody knows the outcome.",
    ),
    Mutant(
        name="redis-processing-has-a-ttl",
        file=f"{LUA}/claim.lua",
        replaced="    .. ARGV[6]\n)",
        by="    .. ARGV[6],\n  'PX', decimal(math.ceil(lease / 1000))\n)",
        killed_by=("tests/stores/redis/test_records.py::test_what_is_not_completed_has_no_time_to_live",),
        harm="Redis itself forgets the claim of a slow worker, and a retry pays beside it.",
    ),
    Mutant(
        name="redis-fence-restarts",
        file=f"{LUA}/claim.lua",
        replaced="math.max(tonumber(floor) + 1, last_fence + 1, now)",
        by="last_fence + 1",
        killed_by=(f"{CONTRACT}::test_the_next_fence_is_higher[fakeredis-released]",),
        harm="After a release the key begins at a low fence again, and the bank takes the older of two orders for the newer.",
    ),
    Mutant(
        name="redis-overwrites-a-completed-record",
        file=f"{LUA}/complete.lua",
        replaced="if record.state == COMPLETED then",
        by="if false then",
        killed_by=(f"{CONTRACT}::test_the_first_result_stays[fakeredis]",),
        harm="A payment that was answered with 201 is answered with something else from then on.",
    ),
    Mutant(
        name="redis-in-flight-comes-before-mismatch",
        file=f"{LUA}/claim.lua",
        replaced="if live and record.fingerprint ~= fingerprint then",
        by="if live and record.state ~= PROCESSING and record.fingerprint ~= fingerprint then",
        killed_by=(f"{CONTRACT}::test_another_request_is_a_mismatch_before_anything_else[fakeredis-in flight]",),
        harm="A second payment under the first one's key is asked to come back, and is then given the first one's receipt.",
    ),
    Mutant(
        name="redis-corrupt-record-is-absent",
        file=f"{LUA}/claim.lua",
        replaced="if (bytes and not record) or (live",
        by="if (live",
        killed_by=("tests/stores/redis/test_corrupt.py::test_what_cannot_be_read_is_corrupt",),
        harm="One flipped bit in a record, and the payment that it stood for is made again.",
    ),
    Mutant(
        name="redis-quota-is-checked-after-the-write",
        file=f"{LUA}/claim.lua",
        replaced="  if refusal then\n",
        by="  if refusal then\n    redis.call('ZADD', KEYS[2], decimal(math.ceil((now + lease) / 1000)), name)\n",
        killed_by=("tests/stores/redis/test_quota.py::test_who_is_refused_writes_nothing",),
        harm="Each request that is refused with 429 costs the server memory, and looks like one in flight to an operator.",
    ),
    Mutant(
        name="redis-janitor-acts-on-another-claim",
        file=f"{LUA}/lib/snapshot.lua",
        replaced=" and record.token == token then",
        by=" then",
        killed_by=(f"{UNSETTLED}::test_another_claim_of_the_same_moment_is_not_freed[fakeredis]",),
        harm="Somebody frees the key of an attempt that is over, and frees that of the one that has just begun to pay.",
    ),
    Mutant(
        name="redis-janitor-acts-on-a-stale-reading",
        file=f"{LUA}/lib/snapshot.lua",
        replaced="return record.deadline == tonumber(deadline) and record or nil",
        by="return record",
        killed_by=(f"{UNSETTLED}::test_what_does_not_stand_as_it_was_seen_is_not_freed[fakeredis-renewed]",),
        harm="A key is freed although its owner has renewed since: it pays, and so does the retry.",
    ),
    Mutant(
        name="redis-janitor-quarantines-whoever-is-at-work",
        file=f"{LUA}/quarantine_expired.lua",
        replaced=" or record.deadline * 1000 > math.min(horizon, now) then",
        by=" then",
        killed_by=(f"{UNSETTLED}::test_a_lease_that_is_not_over_does_not_lapse[fakeredis]",),
        harm="Every payment in flight becomes one of unknown outcome whenever the janitor comes by.",
    ),
    Mutant(
        name="redis-janitor-quarantines-what-may-be-taken-over",
        file=f"{LUA}/quarantine_expired.lua",
        replaced=" or record.takeover or ",
        by=" or ",
        killed_by=(f"{UNSETTLED}::test_what_is_to_be_taken_over_is_not_quarantined[fakeredis]",),
        harm="A payment that the next retry could have finished safely waits for a person instead.",
    ),
    Mutant(
        name="cache-keeps-the-older-answer",
        file=f"{LUA}/cache_put.lua",
        replaced="read_number(entry, 32, 38) > read_number(sealed, 18, 24)",
        by="false",
        killed_by=("tests/stores/redis/test_replays.py::test_a_later_claims_answer_stays",),
        harm="A fill that was long on its way brings back the answer of the key's last life: last month's receipt.",
    ),
    Mutant(
        name="cache-outlives-the-record",
        file=f"{LUA}/cache_put.lua",
        replaced="local looked_at = math.min(missed_at, now)",
        by="local looked_at = now",
        killed_by=("tests/stores/redis/test_replays.py::test_what_arrives_late_has_lived_for_as_long",),
        harm="The key is free in the database and still replayed: the new payment is never made.",
    ),
    Mutant(
        name="believes-any-length",
        file="flask_idempotency/stores/redis/encoding.py",
        replaced="        if at == last:\n",
        by="        if False:\n",
        killed_by=("tests/stores/test_damage.py::test_four_hundred_kilobytes_of_length_are_refused_after_nine[size]",),
        harm="One planted record keeps a worker busy for 40 seconds at each retry: payments of others wait.",
    ),
)
