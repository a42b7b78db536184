"""Each tenant's usage and limits in Redis, as the scripts count them, and the repair of wrong counts."""

from __future__ import annotations

from collections.abc import Sequence

from flask_idempotency.engine.errors import CorruptRecord
from flask_idempotency.engine.quota import Drift, NewKeys, Quota, Usage
from flask_idempotency.stores.redis import layout, scripts
from flask_idempotency.stores.redis.encoding import limits_of
from flask_idempotency.stores.redis.executor import RedisCapability, corrupt, whole_number
from flask_idempotency.stores.redis.scan import BATCH, batches, scan_all

_LIMITS, _BUCKET, _JOURNALS = (layout.FIELDS[name].encode() for name in ("LIMITS", "BUCKET", "JOURNALS"))

_LIMITS_BYTES = 200
"""Enough for six numbers and five commas."""
_LONGEST_WINDOW = 1e10
"""Seconds, about 300 years."""


class RedisLedger(RedisCapability):
    """Implement `capabilities.Ledger`."""

    def usage(self, tid: bytes) -> Usage:
        keys = layout.tenant_unfinished(tid), layout.tenant_quota(tid)
        found = self._server.run(scripts.QUOTA_USAGE, keys)
        if found == b"CORRUPT":
            raise corrupt()
        return Usage(*found)

    def limits(self, tid: bytes) -> Quota:
        text = self._server.execute("HGET", layout.tenant_quota(tid), _LIMITS)
        return Quota() if text is None else decode_limits(text)

    def limit(self, tid: bytes, quota: Quota) -> None:
        if quota.unlimited:
            self._server.execute("HDEL", layout.tenant_quota(tid), _LIMITS)
            return
        seconds = "" if quota.new_keys is None else repr(quota.new_keys.seconds)
        self._server.execute(
            "HSET", layout.tenant_quota(tid), _LIMITS, ",".join((*map(str, limits_of(quota)), seconds))
        )

    def tenants(self) -> Sequence[bytes]:
        found = {layout.tid(name) for names in scan_all(self._server, layout.every(b"[fq]")) for name in names}
        return tuple(tid for tid in found if tid is not None)

    def reconcile(self, tid: bytes) -> Drift:
        ledger, unfinished, partition = layout.tenant_quota(tid), layout.tenant_unfinished(tid), layout.number(tid)
        before = self._server.execute("HGET", ledger, _JOURNALS)
        unsettled = in_journals = 0
        # The scripts count later changes correctly.
        for batch in batches(self._unfinished(tid), BATCH, lambda _: tid):
            records = [layout.record_in(partition, name) for name in batch]
            removed, added = self._server.run(scripts.QUOTA_REPAIR_UNFINISHED, (unfinished, *records), tid, *batch)
            unsettled += removed - added
            journals = [layout.journal_in(partition, name) for name in batch]
            both = [key for pair in zip(records, journals, strict=True) for key in pair]
            in_journals += self._server.run(scripts.QUOTA_RECOUNT_JOURNALS, both, tid)
        # Not if a journal has changed in between.
        excess, changed = self._server.run(scripts.QUOTA_REPAIR_JOURNALS, (ledger,), before or b"", in_journals)
        records_excess, stored_excess, busy = self._repair_completed(tid)
        return Drift(records_excess, stored_excess + excess, unsettled, busy + changed)

    def _unfinished(self, tid: bytes) -> Sequence[bytes]:
        """Return the name of each record that is unfinished in the tenant's partition, or counted as unfinished."""
        in_flight, quarantined = layout.indexes_in(layout.number(tid))
        # Read in flight again at the end: a quarantined record that is resumed moves back.
        indexes = layout.tenant_unfinished(tid), in_flight, quarantined, in_flight
        return list(dict.fromkeys(name for index in indexes for name in self._server.execute("ZRANGE", index, 0, -1)))

    def _repair_completed(self, tid: bytes) -> tuple[int, int, int]:
        """Count completed records by bucket, and correct each bucket that did not change during the count."""
        ledger = layout.tenant_quota(tid)
        fields = self._server.execute("HGETALL", ledger)
        if not isinstance(fields, dict):  # Some clients return a mapping, others a list.
            fields = dict(zip(fields[::2], fields[1::2], strict=True))
        edges = {field: field.removeprefix(_BUCKET) for field in fields if field.startswith(_BUCKET)}
        stated = {whole_number(edge): fields[field] for field, edge in edges.items() if edge.isdigit()}
        counted = self._counted(tid)
        both = sorted(stated.keys() | counted.keys())
        buckets = [(b"%d" % edge, stated.get(edge, b""), counted.get(edge, b"")) for edge in both]
        records, stored, busy = self._server.run(
            scripts.QUOTA_REPAIR, (ledger,), *(text for bucket in buckets for text in bucket)
        )
        return records, stored, busy

    def _counted(self, tid: bytes) -> dict[int, bytes]:
        counts = dict[int, tuple[int, int]]()
        for names in filter(None, scan_all(self._server, layout.every(b"r", tid))):
            found = self._server.run(scripts.QUOTA_RECOUNT, names, tid)
            for edge, more, size in zip(found[::3], found[1::3], found[2::3], strict=True):
                count, stored = counts.get(edge, (0, 0))
                counts[edge] = count + more, stored + size
        return {edge: b"%d %d" % count for edge, count in counts.items()}


def decode_limits(text: bytes) -> Quota:
    """Decode the field `LIMITS` of a tenant's quota."""
    parts = text.split(b",") if len(text) <= _LIMITS_BYTES else []
    try:
        records, stored, in_flight, count, _ = (whole_number(part) if part else None for part in parts[:5])
        seconds = float(parts[5]) if parts[5] else None
        if len(parts) > 6 or not (seconds is None or 0 < seconds < _LONGEST_WINDOW):
            raise corrupt()
    except (ValueError, IndexError, CorruptRecord) as error:
        raise CorruptRecord("a tenant's limits in Redis are corrupt: run flask idempotency quota set") from error
    return Quota(records, stored, in_flight, None if count is None or seconds is None else NewKeys(count, seconds))
