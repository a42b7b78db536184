"""Blinker signals: one for every event. A receiver gets the application as sender and the event as `event`.

Signals are sent after the fact and cannot change it: what a receiver raises is logged and passed over, because a
payment must not fail for the sake of its metrics. Receivers run in the request's thread, or in the lease thread for
renewals and repeated writes; keep them quick.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType

from blinker import NamedSignal, Namespace
from flask import Flask

from flask_idempotency.engine import events
from flask_idempotency.engine.events import Event, Observer, kinds, name_of

_namespace = Namespace()


SIGNALS: Mapping[type[Event], NamedSignal] = MappingProxyType(
    {kind: _namespace.signal(f"idempotency-{name_of(kind)}", kind.__doc__) for kind in kinds()}
)
"""Every event and its signal, for whoever wants to connect to all of them."""

claim_granted = SIGNALS[events.ClaimGranted]
replay_served = SIGNALS[events.ReplayServed]
conflict_refused = SIGNALS[events.ConflictRefused]
mismatch_refused = SIGNALS[events.MismatchRefused]
unknown_refused = SIGNALS[events.UnknownRefused]
quota_refused = SIGNALS[events.QuotaRefused]
erased_refused = SIGNALS[events.ErasedRefused]
refused_after_data_loss = SIGNALS[events.RefusedAfterDataLoss]
data_loss_detected = SIGNALS[events.DataLossDetected]
claim_restored = SIGNALS[events.ClaimRestored]
completed = SIGNALS[events.Completed]
released = SIGNALS[events.Released]
quarantined = SIGNALS[events.Quarantined]
committed_early = SIGNALS[events.CommittedEarly]
lease_expired = SIGNALS[events.LeaseExpired]
renewal_failed = SIGNALS[events.RenewalFailed]
max_runtime_exceeded = SIGNALS[events.MaxRuntimeExceeded]
completion_retrying = SIGNALS[events.CompletionRetrying]
completion_failed = SIGNALS[events.CompletionFailed]
store_failed = SIGNALS[events.StoreFailed]
record_corrupt = SIGNALS[events.RecordCorrupt]
replay_forbidden = SIGNALS[events.ReplayForbidden]
reaped = SIGNALS[events.Reaped]
resolved = SIGNALS[events.Resolved]
resolver_asked = SIGNALS[events.ResolverAsked]
tenant_erased = SIGNALS[events.TenantErased]
responses_sealed = SIGNALS[events.ResponsesSealed]
quota_set = SIGNALS[events.QuotaSet]
store_initialised = SIGNALS[events.StoreInitialised]
data_loss_acknowledged = SIGNALS[events.DataLossAcknowledged]
task_run = SIGNALS[events.TaskRun]
janitor_missing = SIGNALS[events.JanitorMissing]


def sender_for(app: Flask) -> Observer:
    """An observer that sends each event as its signal, in this application's name. Does not keep the app alive."""
    weak = weakref.ref(app)

    def send(event: Event) -> None:
        signal = SIGNALS[type(event)]
        if signal.receivers and (sender := weak()) is not None:
            signal.send(sender, event=event)

    return send
