DELETE FROM idempotency_ledger WHERE (idempotency_ledger.tid, idempotency_ledger.kind, idempotency_ledger.edge, idempotency_ledger.span, idempotency_ledger.shard) IN (SELECT chosen.tid, chosen.kind, chosen.edge, chosen.span, chosen.shard
FROM (SELECT idempotency_ledger.tid AS tid, idempotency_ledger.kind AS kind, idempotency_ledger.edge AS edge, idempotency_ledger.span AS span, idempotency_ledger.shard AS shard
FROM idempotency_ledger
WHERE idempotency_ledger.edge <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AND idempotency_ledger.edge <= coalesce(?, idempotency_ledger.edge)
 LIMIT ? OFFSET ?) AS chosen)
