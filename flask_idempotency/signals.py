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
loss_refused = SIGNALS[events.LossRefused]
loss_noticed = SIGNALS[events.LossNoticed]
claim_restored = SIGNALS[events.ClaimRestored]
completed = SIGNALS[events.Completed]
released = SIGNALS[events.Released]
quarantined = SIGNALS[events.Quarantined]
committed_early = SIGNALS[events.CommittedEarly]
lease_expired = SIGNALS[events.LeaseExpired]
renewal_failed = SIGNALS[events.RenewalFailed]
renewal_stopped = SIGNALS[events.RenewalStopped]
settlement_delayed = SIGNALS[events.SettlementDelayed]
settlement_abandoned = SIGNALS[events.SettlementAbandoned]
store_failed = SIGNALS[events.StoreFailed]
record_corrupt = SIGNALS[events.RecordCorrupt]
replay_forbidden = SIGNALS[events.ReplayForbidden]
reaped = SIGNALS[events.Reaped]
settled = SIGNALS[events.Settled]
resolver_asked = SIGNALS[events.ResolverAsked]
tenant_erased = SIGNALS[events.TenantErased]
answers_sealed = SIGNALS[events.AnswersSealed]
quota_set = SIGNALS[events.QuotaSet]
store_initialised = SIGNALS[events.StoreInitialised]
loss_acknowledged = SIGNALS[events.LossAcknowledged]
chore_done = SIGNALS[events.ChoreDone]
janitor_missing = SIGNALS[events.JanitorMissing]


def sender_for(app: Flask) -> Observer:
    """An observer that sends each event as its signal, in this application's name. Does not keep the app alive."""
    weak = weakref.ref(app)

    def send(event: Event) -> None:
        signal = SIGNALS[type(event)]
        if signal.receivers and (sender := weak()) is not None:
            signal.send(sender, event=event)

    return send
