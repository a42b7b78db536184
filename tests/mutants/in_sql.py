"""Faults in SQL statements, and in the transaction that commits business rows with their record."""

from __future__ import annotations

from typing import Final

from tests.mutants.in_redis import CONTRACT, UNSETTLED
from tests.mutants.mutant import Mutant

SQL: Final = "flask_idempotency/stores/sql"
EXPIRY: Final = "tests/stores/test_contract.py::TestExpiry"

IN_SQL: Final = (
    Mutant(
        name="sql-owner-is-anybody",
        file=f"{SQL}/statements.py",
        replaced='owned = and_(_r.token == bindparam("my_token", type_=LargeBinary), _r.state',
        by="owned = and_(_r.state",
        killed_by=(f"{CONTRACT}::test_a_token_that_was_taken_over_changes_nothing[sqlite-hold]",),
        harm="A worker that was given up settles the payment of its successor.",
    ),
    Mutant(
        name="sql-completion-is-not-checked",
        file=f"{SQL}/store.py",
        replaced="                if write(connection, parameters):\n                    return\n",
        by="                write(connection, parameters)\n                return\n",
        killed_by=(f"{CONTRACT}::test_the_late_finisher_is_fenced_off[sqlite]",),
        harm="An UPDATE of no row passes for a stored answer: the client is told 201, and its retry something else.",
    ),
    Mutant(
        name="sql-claim-is-not-idempotent",
        file=f"{SQL}/claiming.py",
        replaced="if row.token == asked.token:",
        by="if False:",
        killed_by=(f"{CONTRACT}::test_the_same_token_is_granted_again[sqlite]",),
        harm="A claim whose reply was lost and that is sent again meets itself: nobody pays, and the key is stuck.",
    ),
    Mutant(
        name="sql-in-flight-comes-before-mismatch",
        file=f"{SQL}/claiming.py",
        replaced="if row.fingerprint != asked.request.fingerprint:",
        by="if row.lease_expires_at is None and row.fingerprint != asked.request.fingerprint:",
        killed_by=(f"{CONTRACT}::test_another_request_is_a_mismatch_before_anything_else[sqlite-in flight]",),
        harm="A second payment under the first one's key is asked to come back, and is then given the first one's receipt.",
    ),
    Mutant(
        name="sql-renewal-shortens",
        file=f"{SQL}/statements.py",
        replaced='getattr(func, dialect.greatest)(_r.lease_expires_at, now + duration("lease"))',
        by='now + duration("lease")',
        killed_by=(f"{CONTRACT}::test_a_renewal_never_shortens[sqlite]",),
        harm="A short renewal ends a long lease, and a retry takes the payment over while it is being made.",
    ),
    Mutant(
        name="sql-takes-over-against-the-rule",
        file=f"{SQL}/claiming.py",
        replaced="return Move.TAKE_OVER if row.on_expiry == TAKEOVER else Move.QUARANTINE",
        by="return Move.TAKE_OVER",
        killed_by=(f"{CONTRACT}::test_a_lapsed_record_is_quarantined[sqlite-OnExpiry.QUARANTINE]",),
        harm="A lapsed payment is neither quarantined nor taken over: its key hangs for ever.",
    ),
    Mutant(
        name="sql-quarantined-key-is-taken-over",
        file=f"{SQL}/statements.py",
        replaced='.values(state=word(QUARANTINED), reason=bindparam("my_reason"',
        by='.values(state=word(PROCESSING), reason=bindparam("my_reason"',
        killed_by=(f"{CONTRACT}::test_a_held_claim_is_never_taken_over[sqlite]",),
        harm="A payment of which its owner said that nobody knows what became of it is simply made again.",
    ),
    Mutant(
        name="sql-releases-what-is-completed",
        file=f"{SQL}/statements.py",
        replaced="owners(dialect, PROCESSING, QUARANTINED)\n    uncondemned = statement.where(~has_answer(), ",
        by="owners(dialect, PROCESSING, QUARANTINED, 'completed')\n    uncondemned = statement.where(",
        killed_by=(f"{CONTRACT}::test_a_completed_record_is_settled_for_good[sqlite-release]",),
        harm="A payment that was made and answered is free to be made again.",
    ),
    Mutant(
        name="sql-expiry-removes-what-is-in-progress",
        file=f"{SQL}/admin/janitor.py",
        replaced="return and_(or_(_r.state == word(RELEASED), is_answer), ",
        by="return or_(_r.lease_expires_at <= horizon, _r.state == word(RELEASED)) | and_(is_answer, ",
        killed_by=(f"{EXPIRY}::test_what_is_not_settled_is_never_removed[sqlite-in flight]",),
        harm="The record of a worker that is only slow is swept away, and its payment is made twice.",
    ),
    Mutant(
        name="sql-expiry-removes-before-its-time",
        file=f"{SQL}/admin/janitor.py",
        replaced=", _r.expires_at <= horizon, _r.expires_at <= dialect.now)",
        by=", _r.expires_at.is_not(None), horizon >= horizon)",
        killed_by=(f"{EXPIRY}::test_an_answer_is_not_removed_before_its_life_is_over[sqlite]",),
        harm="A retry within the time that was promised pays again.",
    ),
    Mutant(
        name="sql-janitor-acts-on-another-claim",
        file=f"{SQL}/statements.py",
        replaced='        _r.token == bindparam("seen_token", type_=LargeBinary),\n        func.coalesce',
        by="        func.coalesce",
        killed_by=(f"{UNSETTLED}::test_another_claim_of_the_same_moment_is_not_freed[sqlite]",),
        harm="Somebody frees the key of an attempt that is over, and frees that of the one that has just begun to pay.",
    ),
    Mutant(
        name="sql-fence-follows-the-sequence-back",
        file=f"{SQL}/statements.py",
        replaced='func.greatest(values["fence"], _r.fence + ONE)',
        by='values["fence"]',
        killed_by=(
            "tests/stores/sql/test_store.py::test_the_fence_of_a_key_rises_where_the_sequence_went_back"
            "[lapsed-no quota-postgresql-insert]",
        ),
        harm="The database moves to another server, and a worker that was given up writes over what its successor has paid.",
    ),
    Mutant(
        name="sql-fence-restarts",
        file=f"{SQL}/statements.py",
        replaced='getattr(func, dialect.greatest)(last + literal_column("1"), dialect.now)',
        by="dialect.now",
        killed_by=(f"{CONTRACT}::test_the_next_fence_is_higher[sqlite-released, clock set back]",),
        harm="After the clock was set back the bank takes the older of two orders for the newer.",
    ),
    Mutant(
        name="sql-commits-the-business-without-the-record",
        file=f"{SQL}/transactional/transaction.py",
        replaced="            self._commit(session, lambda: writing(complete))\n",
        by="            self._commit(session, _nothing)\n            self._commit(session, lambda: writing(complete))\n",
        killed_by=("tests/stores/sql/test_session.py::test_a_superseded_worker_commits_nothing[sqlite]",),
        harm="Both the worker that was given up and its successor book the payment.",
    ),
    Mutant(
        name="sql-denies-a-commit-whose-reply-was-lost",
        file=f"{SQL}/transactional/transaction.py",
        replaced="""
        if not self._records.is_completed(self._keys[0], self._token):
            if lost is not None:
                raise lost
""",
        by="""
        if True:
""",
        killed_by=("tests/stores/sql/test_lost_commits.py::TestLostCommits::test_it_was_committed[sqlite]",),
        harm="The payment is booked, and its client is told that it was not.",
    ),
    Mutant(
        name="sql-tells-the-cache-before-the-commit",
        file=f"{SQL}/transactional/transaction.py",
        replaced="                write_last()\n                self._going_out = True\n",
        by="                write_last()\n                self._going_out = True\n"
        "                self._records.tell([(key, self._records.settled(key, self._token)) for key in self._keys])\n",
        killed_by=(
            "tests/stores/sql/test_lost_commits.py::TestLostCommits::test_a_cache_hears_of_nothing_that_was_not_committed[sqlite]",
        ),
        harm="A payment that was rolled back is replayed out of the cache as made.",
    ),
    Mutant(
        name="sql-early-commit-goes-unnoticed",
        file=f"{SQL}/transactional/transaction.py",
        replaced="            self._records.mark(connection, key, self._token)\n        self._marked = True\n",
        by="            pass\n",
        killed_by=(
            "tests/stores/sql/test_early_commits.py::TestEarlyCommits::test_the_record_is_marked_in_the_same_commit[sqlite]",
        ),
        harm="A view has committed its payment by itself and died: the retry books it again.",
    ),
)
