"""Faults in the engine, and in the store that keeps its records in memory."""

from __future__ import annotations

from typing import Final

from tests.mutants.in_redis import CONTRACT
from tests.mutants.mutant import Mutant

ENGINE: Final = "flask_idempotency/engine"

IN_ENGINE: Final = (
    Mutant(
        name="outage-at-complete-releases-the-key",
        file=f"{ENGINE}/claim.py",
        replaced="self._pending, self._pending_since = settlement, ",
        by="self._pending, self._pending_since = Settlement(self._free), ",
        killed_by=("tests/engine/test_claim.py::test_p59_a_store_that_fails_at_complete_costs_the_caller_nothing",),
        harm="The payment was made while the store was away; when it is back the key is free, and a retry pays again.",
    ),
    Mutant(
        name="outage-at-complete-is-forgotten",
        file=f"{ENGINE}/claim.py",
        replaced="            self._around.repeats.watch(self, after=RETRY_SECONDS)\n"
        "            self._tell(CompletionRetrying(*self._who, error=type(error).__name__))\n\n",
        by="            self._tell(CompletionRetrying(*self._who, error=type(error).__name__))\n\n",
        killed_by=("tests/engine/test_claim.py::test_p59_a_store_that_fails_at_complete_costs_the_caller_nothing",),
        harm="The answer of a payment is never stored, and its retries hear that nobody knows.",
    ),
    Mutant(
        name="lost-claim-is-settled-all-the-same",
        file=f"{ENGINE}/claim.py",
        replaced="        if self._lost:\n",
        by="        if False:\n",
        killed_by=(
            "tests/engine/test_claim.py::test_an_owner_that_was_told_of_its_loss_never_delivers_even_if_the_store_is_down",
        ),
        harm="Two clients are given two different receipts for one payment.",
    ),
    Mutant(
        name="lease-is-never-renewed",
        file=f"{ENGINE}/engine.py",
        replaced="        claim.keep_alive()\n",
        by="",
        killed_by=("tests/engine/test_claim.py::test_p10_renewal_keeps_one_runner_for_many_leases",),
        harm="Every payment that takes longer than a lease is taken over, or unknown.",
    ),
    Mutant(
        name="point-of-no-return-is-not-written-down",
        file=f"{ENGINE}/claim.py",
        replaced="                self._around.store.mark(key, self._held.token)\n",
        by="                pass\n",
        killed_by=("tests/engine/test_claim.py::test_the_point_of_no_return_turns_take_over_into_quarantine",),
        harm="The worker died after it had called the bank; the retry calls it again.",
    ),
    Mutant(
        name="releases-past-the-point-of-no-return",
        file=f"{ENGINE}/policy.py",
        replaced="return Decision.QUARANTINE if past_point and decision is Decision.RELEASE else decision",
        by="return decision",
        killed_by=("tests/engine/test_policy.py::test_nothing_is_released_past_the_point_of_no_return",),
        harm="The bank's time-out becomes a 503 that frees the key, and the retry pays again.",
    ),
    Mutant(
        name="failed-plain-work-is-released",
        file=f"{ENGINE}/policy.py",
        replaced='by_effects = Decision.QUARANTINE if self.effects == "plain" else Decision.RELEASE',
        by="by_effects = Decision.RELEASE",
        killed_by=(
            "tests/web/test_hook_errors.py"
            "::test_p36_an_unhandled_exception_of_a_plain_view_quarantines_whoever_it_propagates_to[production]",
        ),
        harm="The card was charged, the receipt could not be printed, and the retry charges it again.",
    ),
    Mutant(
        name="profile-beats-what-was-written",
        file="flask_idempotency/settings/profiles.py",
        replaced="return merge(Policy(), {**_brought(written), **written})",
        by="return merge(Policy(), {**written, **_brought(written)})",
        killed_by=("tests/settings/test_profiles.py::test_a_written_value_beats_a_profile_of_any_layer",),
        harm="The application says that a status releases, the profile keeps it, and nobody can pay under that key.",
    ),
    Mutant(
        name="plain-effects-are-taken-over",
        file=f"{ENGINE}/policy.py",
        replaced='return OnExpiry.QUARANTINE if self.effects == "plain" else OnExpiry.TAKEOVER',
        by="return OnExpiry.TAKEOVER",
        killed_by=("tests/engine/test_policy.py::test_effects_decide_what_a_vanished_worker_leaves",),
        harm="By default a vanished worker's payment is made again.",
    ),
    Mutant(
        name="unanswered-claim-is-left-behind",
        file=f"{ENGINE}/engine.py",
        replaced="self._claim(asking, [*granted, _NOTHING], token, asked_at).abandon()",
        by="pass",
        killed_by=("tests/engine/test_engine.py::test_a_claim_that_the_store_did_not_answer_is_given_back",),
        harm="The claim of a payment that was never begun quarantines its key: a person has to look at it.",
    ),
    Mutant(
        name="token-is-the-same-for-all",
        file=f"{ENGINE}/keys.py",
        replaced="return beginning + secrets.token_bytes(TOKEN_BYTES - len(beginning))",
        by="return beginning + bytes(TOKEN_BYTES - len(beginning))",
        killed_by=("tests/engine/test_engine.py::test_two_requests_share_no_token",),
        harm="Whoever asks while the payment is being made is granted it as well.",
    ),
    Mutant(
        name="waiting-room-is-unbounded",
        file=f"{ENGINE}/waiting.py",
        replaced="if self._free <= 0 or len(seated) >= SEATS_PER_KEY:",
        by="if False:",
        killed_by=("tests/engine/test_waiting.py::test_no_more_waiters_than_seats",),
        harm="The duplicates of one slow payment take every thread, and nobody else can pay.",
    ),
    Mutant(
        name="waiter-does-not-ask-again",
        file=f"{ENGINE}/engine.py",
        replaced="if record is not None and record.state is State.PROCESSING and record.remaining > 0:",
        by="if record is None or record.state is State.PROCESSING:",
        killed_by=("tests/engine/test_engine.py::TestWaiting::test_a_waiter_takes_over_from_an_owner_that_vanishes",),
        may_hang=True,
        harm="A duplicate that waits is refused although nobody is at work on its payment any more.",
    ),
    Mutant(
        name="tenant-is-left-out-of-the-key",
        file=f"{ENGINE}/keys.py",
        replaced='return namespace.encode("utf-8", "surrogatepass"), _optional(tenant)',
        by='return namespace.encode("utf-8", "surrogatepass"), _optional(None)',
        killed_by=("tests/web/test_guard.py::test_principals_and_tenants_have_key_spaces_of_their_own",),
        harm="A tenant's payment is answered with the receipt of another tenant.",
    ),
    Mutant(
        name="principal-is-left-out-of-the-key",
        file=f"{ENGINE}/keys.py",
        replaced="request = (_optional(scope.principal), ",
        by="request = (_optional(None), ",
        killed_by=("tests/web/test_guard.py::test_principals_and_tenants_have_key_spaces_of_their_own",),
        harm="Bob, who guesses Alice's key, is given Alice's receipt.",
    ),
    Mutant(
        name="fingerprint-is-without-the-body",
        file=f"{ENGINE}/fingerprint.py",
        replaced="_utf8(media_type), selected, body)",
        by="_utf8(media_type), selected)",
        killed_by=("tests/engine/test_fingerprint.py::test_every_part_counts",),
        harm="A payment of 900 under the key of one of 100 is answered as if it had been made.",
    ),
    Mutant(
        name="resolver-keeps-the-token",
        file=f"{ENGINE}/recovery.py",
        replaced="token = successor(seen.record.token)",
        by="token = seen.record.token",
        killed_by=("tests/engine/test_settling.py::test_an_answer_is_sealed_under_the_fresh_token",),
        harm="The owner comes back late and delivers its own answer beside that of the person who has settled the payment.",
    ),
    Mutant(
        name="clock-set-forward-declares-owners-dead",
        file=f"{ENGINE}/recovery.py",
        replaced="return replace(record, remaining=max(record.remaining, record.deadline - horizon))",
        by="return record",
        killed_by=("tests/maintenance/test_resolving.py::test_a_clock_that_was_set_forward_declares_no_owner_dead",),
        harm="A payment is freed while its worker is about to call the bank.",
    ),
    Mutant(
        name="memory-renewal-shortens",
        file="flask_idempotency/stores/memory/store.py",
        replaced="deadline=max(record.deadline, now + seconds)",
        by="deadline=now + seconds",
        killed_by=(f"{CONTRACT}::test_a_renewal_never_shortens[memory]",),
        harm="A short renewal ends a long lease, and a retry takes the payment over while it is being made.",
    ),
)
