"""Faults where requests meet the guard."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

WEB: Final = "flask_idempotency/web"

IN_WEB: Final = (
    Mutant(
        name="unnamed-callers-share-a-key-space",
        file=f"{WEB}/principals.py",
        replaced="if name is None and not allow_anonymous and (found := credentials.of(request)) is not None:",
        by="if loader is None and name is None and not allow_anonymous and (found := credentials.of(request)) is not None:",
        killed_by=(
            "tests/web/test_principals.py::test_credentials_that_nothing_names_never_share_a_key_space"
            "[a loader that says None-{'X-API-Key': 'x'}]",
        ),
        harm="A loader that does not know a caller puts it where all unknown callers are: it is given another's receipt.",
    ),
    Mutant(
        name="former-names-are-believed",
        file=f"{WEB}/guard.py",
        replaced="if record is not None and self._anothers(visit, record)\n            }",
        by="if False\n            }",
        killed_by=(
            "tests/web/test_former_identity.py::"
            "test_a_former_name_without_a_principal_shows_nobody_the_response_of_another",
        ),
        harm="While a loader is introduced, two callers with the same key get one receipt.",
    ),
    Mutant(
        name="commits-at-capture",
        file=f"{WEB}/guard.py",
        replaced="        elif visit.phase is Phase.CLAIMED:\n            self._capture(visit, response)\n",
        by="        elif visit.phase is Phase.CLAIMED:\n            self._capture(visit, response)\n"
        "            self.finished(visit, response)\n",
        killed_by=("tests/web/test_hook_capture.py::test_p28_a_failing_after_request_hook_leaves_nothing_completed",),
        harm="A later hook fails to commit and the client is told 500; its retry is told that the payment was made.",
    ),
    Mutant(
        name="captures-outside-its-scope",
        file=f"{WEB}/hooks.py",
        replaced="        self._capture = LastHook(app.after_request_funcs, self._slot, self.capture)\n",
        by="        self._capture = LastHook({}, self._slot, self.capture)\n"
        "        app.after_request(lambda answer: self.capture(v, answer) if (v := self._visit()) else answer)\n",
        killed_by=(
            "tests/web/test_hook_capture.py::test_p22_headers_that_blueprint_and_app_hooks_add_are_counted_once",
        ),
        harm="What other hooks add is stored with the receipt and added once more on each replay: it is another receipt.",
    ),
    Mutant(
        name="hashes-a-body-that-was-read",
        file=f"{WEB}/request_body.py",
        replaced='if position or (servers and _position(request.environ["wsgi.input"])):',
        by="if False:",
        killed_by=(
            "tests/web/test_bodies.py::test_consumed_body_is_a_loud_error",
            "tests/web/test_consumed_bodies.py::test_a_hook_that_reads_from_the_server_is_a_loud_error",
        ),
        harm="The digest of nothing is everybody's: a payment of 900 is answered with the receipt of one of 100.",
    ),
    Mutant(
        name="takes-a-truncated-body-for-whole",
        file=f"{WEB}/request_body.py",
        replaced="if length is not None and size < length:",
        by="if False:",
        killed_by=("tests/web/test_bodies.py::test_truncated_body_is_refused_where_the_server_does_not_say",),
        harm="Half an order is run, and the whole one is refused as another request.",
    ),
    Mutant(
        name="lost-claim-delivers-its-own-answer",
        file=f"{WEB}/guard.py",
        replaced="            self._answer_instead(visit, response)\n",
        by="            pass\n",
        killed_by=(
            "tests/web/test_hook_contexts.py::test_p77_a_worker_that_lost_its_claim_delivers_the_stored_answer",
        ),
        harm="Two clients are given two different receipts for one payment.",
    ),
    Mutant(
        name="interrupted-work-is-released",
        file=f"{WEB}/request_state.py",
        replaced="return Decision.RELEASE if visit.policy.on_lapse is OnExpiry.TAKEOVER else Decision.QUARANTINE",
        by="return Decision.RELEASE",
        killed_by=("tests/web/test_hook_errors.py::test_p37_an_interrupted_worker_leaves_what_a_vanished_one_would",),
        harm="A worker that is being killed in the middle of a payment frees its key, and the retry pays again.",
    ),
    Mutant(
        name="store-outage-lets-everything-run",
        file=f"{WEB}/guard.py",
        replaced='allowed = visit.policy.on_store_down == "allow" and not known',
        by="allowed = not known",
        killed_by=("tests/web/test_guard.py::test_a_silent_store_refuses_keyed_requests_only",),
        harm="While the store is away every retry pays.",
    ),
    Mutant(
        name="known-work-runs-without-its-keys",
        file=f"{WEB}/guard.py",
        replaced="known = isinstance(error, ResponseUnavailable | KeyProviderUnavailable)",
        by="known = False",
        killed_by=(
            "tests/web/test_unreadable_answers.py::"
            "test_what_was_done_is_not_run_again_although_views_may_run_without_a_store",
        ),
        harm="The key service is away, so a payment that is known to be done is done again.",
    ),
    Mutant(
        name="replay-guard-is-not-heard",
        file=f"{WEB}/guard.py",
        replaced="if guard is not None and not self._app.ensure_sync(guard)(replay.record):",
        by="if False:",
        killed_by=("tests/web/test_guard.py::test_the_replay_guard_may_refuse_a_replay_and_the_record_is_kept",),
        harm="Whoever has lost the right to see a payment is given its receipt.",
    ),
    Mutant(
        name="set-cookie-is-kept",
        file="flask_idempotency/settings/profiles.py",
        replaced='    "set-cookie",\n',
        by="",
        killed_by=(
            "tests/web/test_kept_headers.py::test_fields_of_the_exchange_are_not_kept_even_when_a_policy_names_them",
        ),
        harm="The session of whoever paid first is handed to whoever asks again.",
    ),
    Mutant(
        name="stored-headers-are-trusted",
        file=f"{WEB}/responses.py",
        replaced='if any(_UNSAFE.search(text) for pair in (*result.metadata, ("", result.reason)) for text in pair):',
        by="if False:",
        killed_by=(
            "tests/web/test_hook_capture.py::test_p55_a_stored_header_that_would_split_the_response_is_never_sent",
        ),
        harm="Who can write to the store forges a second response behind a receipt.",
    ),
    Mutant(
        name="text-raw-on-a-terminal",
        file="flask_idempotency/cli/context.py",
        replaced="click.echo(printable_lines(text), err=err, nl=newline)",
        by="click.echo(text, err=err, nl=newline)",
        killed_by=("tests/web/test_hostile_text.py::test_nothing_is_said_raw",),
        harm="A name in a store runs commands of the operator's terminal while it is asked whether a payment was made.",
    ),
    Mutant(
        name="text-forges-a-row",
        file="flask_idempotency/cli/context.py",
        replaced="lines = [tuple(map(printable, line)) for line in (head, *rows)]",
        by="lines = [head, *rows]",
        killed_by=("tests/web/test_hostile_text.py::test_no_name_forges_a_row_of_a_table[memory]",),
        harm="A tenant's name adds rows to the table that an operator releases keys by.",
    ),
    Mutant(
        name="text-raw-in-a-log",
        file="flask_idempotency/logs.py",
        replaced="record.args = tuple(map(_quoted, record.args))",
        by="pass",
        killed_by=("tests/web/test_hostile_text.py::test_no_message_forges_a_line_of_a_log",),
        harm="An endpoint's name or a library's message forges lines of the log that an auditor reads.",
    ),
    Mutant(
        name="text-raw-in-a-traceback",
        file="flask_idempotency/logs.py",
        replaced="if record.exc_info and record.exc_info[0] is not None and not record.exc_text:",
        by="if False:",
        killed_by=("tests/web/test_hostile_text.py::test_no_message_forges_a_line_of_a_log",),
        harm="What a store answers runs commands of the terminal that shows the log.",
    ),
    Mutant(
        name="text-raw-in-an-event",
        file="flask_idempotency/logs.py",
        replaced="printable_values(getattr(event, fact))",
        by="getattr(event, fact)",
        killed_by=("tests/web/test_hostile_text.py::test_no_event_forges_a_line_of_a_log",),
        harm="A reason that is stored with a record forges an audit line.",
    ),
    Mutant(
        name="text-raw-in-an-error",
        file="flask_idempotency/engine/errors.py",
        replaced="return printable_lines(super().__str__())",
        by="return super().__str__()",
        killed_by=("tests/web/test_hostile_text.py::test_no_error_of_ours_gives_orders",),
        harm="The id of a store runs commands of the terminal on which the application is started.",
    ),
    Mutant(
        name="names-of-any-length",
        file="flask_idempotency/web/principals.py",
        replaced="if name is not None and len(name) > LONGEST_NAME:",
        by="if False:",
        killed_by=("tests/web/test_hostile_text.py::test_a_name_that_is_too_long_is_refused_and_never_cut[tenant]",),
        harm="Names fill the store beside a quota that counts answers alone, and payments get 503.",
    ),
    Mutant(
        name="hook-speaks-for-the-view",
        file=f"{WEB}/guard.py",
        replaced="overruled = status != visit.capture.head.status not in RELEASED_BY_DEFAULT",
        by="overruled = False",
        killed_by=(
            "tests/web/test_hook_capture.py"
            "::test_p28_what_a_hook_says_over_a_success_does_not_mean_that_nothing_happened[plain-hold-503]",
        ),
        harm="The view has paid, an application hook answers 503 over it, and the retry pays again.",
    ),
    Mutant(
        name="abort-in-a-hook-is-no-error",
        file=f"{WEB}/hooks.py",
        replaced="if isinstance(exception, HTTPException) and not _unhandled(exception):",
        by="if isinstance(exception, HTTPException):",
        killed_by=("tests/web/test_hook_capture.py::test_p28_a_hook_that_aborts_after_the_view_has_failed",),
        harm="The view has paid, a hook aborts, the page for errors has the status 503, and the retry pays again.",
    ),
    Mutant(
        name="endpoint-with-a-fault-runs",
        file=f"{WEB}/hooks.py",
        replaced="if resolved.faults and (self._enabled or joint):",
        by="if False:",
        killed_by=("tests/web/test_closed_endpoints.py::test_only_its_own_endpoint_is_closed",),
        harm="A payment runs under a policy that cannot keep its promise.",
    ),
    Mutant(
        name="annotated-view-runs-without-the-extension",
        file=f"{WEB}/policies.py",
        replaced="    request_started.connect(refuse_unguarded)\n",
        by="",
        killed_by=("tests/web/test_unguarded.py::test_an_idempotent_view_without_the_extension_refuses_to_run",),
        harm="The author forgot Idempotency(app), nothing says so, and every retry pays again.",
    ),
    Mutant(
        name="url-torn-in-its-password",
        file="flask_idempotency/engine/escape.py",
        replaced='if "@" in behind:',
        by="if False:",
        killed_by=(
            "tests/engine/test_escape.py::test_only_the_password_is_hidden_where_that_is_sure[torn after its digits]",
        ),
        harm="An error report of a mistyped URL holds the password of the store of all payments.",
    ),
    Mutant(
        name="url-password-after-a-password",
        file="flask_idempotency/engine/escape.py",
        replaced="(secret and not _is_known(plain))",
        by="False",
        killed_by=("tests/engine/test_escape.py::test_no_piece_of_a_password_is_shown",),
        harm="The same, where the password has an ampersand in it.",
    ),
    Mutant(
        name="log-id-of-several-records",
        file="flask_idempotency/operations/records.py",
        replaced="if len(found) == 1:",
        by="if found:",
        killed_by=("tests/web/test_log_ids.py::test_an_id_of_several_records_is_refused_with_all_of_them",),
        harm="A person releases another payment than the one whose log line they read.",
    ),
    Mutant(
        name="replays-every-stored-header",
        file=f"{WEB}/responses.py",
        replaced="    return _allowed(result.metadata, policy)\n",
        by="    return result.metadata\n",
        killed_by=(
            "tests/web/test_tombstones.py::test_a_field_that_no_answer_keeps_is_not_sent_from_the_store"
            "[X-Accel-Redirect-True]",
        ),
        harm="Who can write to the store has the proxy send any of its files in the place of a receipt.",
    ),
)
