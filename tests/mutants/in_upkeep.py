"""Faults in how answers are sealed, and in what a janitor does."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

ENCRYPTION: Final = "flask_idempotency/codec/encryption.py"
REAP: Final = "flask_idempotency/maintenance/reap.py"

IN_UPKEEP: Final = (
    Mutant(
        name="answer-is-sealed-for-no-record",
        file=ENCRYPTION,
        # The record is bound twice, so both are cut.
        replaced="""
    info = encode(_RECORD_KEY, binding.key.rid, b"%d" % binding.fence, binding.token)
    return AESGCM(HKDFExpand(SHA256(), KEY_BYTES, info).derive(key.key))


def _bound(head: bytes, binding: SealContext, clear: StoredPayload, key: UnwrappedKey) -> bytes:
    \"""What must be the same when it is opened. The order is part of the format.\"""
    return encode(
        _ANSWER,
        head,
        key.store,
        binding.key.tid,
        binding.key.rid,
        b"%d" % binding.fence,
        binding.token,
""",
        by="""
    return AESGCM(HKDFExpand(SHA256(), KEY_BYTES, encode(_RECORD_KEY)).derive(key.key))


def _bound(head: bytes, binding: SealContext, clear: StoredPayload, key: UnwrappedKey) -> bytes:
    return encode(
        _ANSWER,
        head,
        key.store,
        binding.key.tid,
""",
        killed_by=("tests/codec/test_encryption.py::test_answers_cannot_change_places",),
        harm="Who can write to the store puts one payment's receipt in the place of another's.",
    ),
    Mutant(
        name="answer-is-sealed-for-any-request",
        file=ENCRYPTION,
        replaced="        binding.fingerprint,\n",
        by="",
        killed_by=("tests/codec/test_encryption.py::test_an_answer_opens_for_no_other_record",),
        harm="Who can write to the store makes another request look as if it had been answered by this receipt.",
    ),
    Mutant(
        name="plain-answers-pass-where-encryption-is-required",
        file=ENCRYPTION,
        replaced="if not self._plain_allowed:",
        by="if False:",
        killed_by=("tests/codec/test_encrypted_codec.py::test_required_refuses_answers_that_are_not_encrypted",),
        harm="Who can write to the store needs no key to forge a receipt.",
    ),
    Mutant(
        name="rotates-into-the-clear",
        file="flask_idempotency/maintenance/rotate.py",
        replaced="if anew.sealed_by is None:",
        by="if False:",
        killed_by=("tests/maintenance/test_rotate.py::test_nothing_is_ever_rotated_into_the_clear",),
        harm="Receipts that were encrypted lie open in the store.",
    ),
    Mutant(
        name="rotation-throws-keys-away-that-are-needed",
        file="flask_idempotency/maintenance/rotate.py",
        replaced="            if (tid, key.number) in used:\n                continue\n",
        by="",
        killed_by=(
            "tests/maintenance/test_rotate.py::test_a_data_key_stays_while_an_answer_under_it_cannot_be_sealed_anew",
        ),
        harm="A receipt can be opened by nobody any more.",
    ),
    Mutant(
        name="janitor-frees-what-has-lapsed",
        file=REAP,
        replaced="if unsettled.lapse(found, horizon=horizon):",
        by="if unsettled.free(found):",
        killed_by=("tests/maintenance/test_reap.py::test_a_vanished_owners_key_is_quarantined_and_told_once",),
        harm="The worker vanished after it had paid; the janitor frees the key, and the retry pays again.",
    ),
    Mutant(
        name="janitor-believes-never-too-early",
        file=REAP,
        replaced="if may_live_for(as_of(found.record, horizon), max_runtime=policy.max_runtime) > 0:",
        by="if False:",
        killed_by=("tests/maintenance/test_resolving.py::test_never_while_its_owner_may_be_about_to",),
        harm="The bank has not heard of the payment yet, so its key is freed; then its frozen owner wakes up and pays.",
    ),
    Mutant(
        name="wiping-settles-what-has-no-answer",
        file="flask_idempotency/maintenance/rotate.py",
        replaced="        payload = found.record.payload\n        if payload is not None:\n",
        by="        from flask_idempotency.engine.model import StoredPayload\n\n"
        '        payload = found.record.payload or StoredPayload(b"", 200, True, 0)\n'
        "        if payload is not None:\n",
        killed_by=("tests/maintenance/test_wipe.py::test_a_quarantined_key_without_an_answer_is_not_made_a_done_one",),
        harm="A payment of unknown outcome is told to have been made.",
    ),
    Mutant(
        name="rotation-seals-what-was-planted",
        file="flask_idempotency/maintenance/rotate.py",
        replaced="outcome = _plain(answer) or _reseal_unless_blocked(",
        by="outcome = _reseal_unless_blocked(",
        killed_by=("tests/maintenance/test_rotate.py::test_a_rotation_leaves_plain_answers_alone",),
        harm="Who can write to the store plants a receipt, and the next night's janitor makes it genuine.",
    ),
)
