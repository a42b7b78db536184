DELETE FROM idempotency_ledger WHERE (idempotency_ledger.tid, idempotency_ledger.kind, idempotency_ledger.edge, idempotency_ledger.span, idempotency_ledger.shard) IN (SELECT idempotency_ledger.tid, idempotency_ledger.kind, idempotency_ledger.edge, idempotency_ledger.span, idempotency_ledger.shard
FROM idempotency_ledger
WHERE idempotency_ledger.edge <= coalesce(?, cast((julianday('now') - 2440587.5) * 86400000000 as integer)) AND idempotency_ledger.edge <= coalesce(?, idempotency_ledger.edge)
 LIMIT ? OFFSET ?)
