WITH chosen AS
(SELECT idempotency_ledger.tid AS tid, idempotency_ledger.kind AS kind, idempotency_ledger.edge AS edge, idempotency_ledger.span AS span, idempotency_ledger.shard AS shard
FROM idempotency_ledger
WHERE idempotency_ledger.edge <= coalesce(%(now)s::BIGINT, (extract(epoch from clock_timestamp()) * 1000000)::bigint) AND idempotency_ledger.edge <= coalesce(%(my_horizon)s::BIGINT, idempotency_ledger.edge)
 LIMIT %(my_limit)s::BIGINT FOR UPDATE SKIP LOCKED)
 DELETE FROM idempotency_ledger WHERE (idempotency_ledger.tid, idempotency_ledger.kind, idempotency_ledger.edge, idempotency_ledger.span, idempotency_ledger.shard) IN (SELECT chosen.tid, chosen.kind, chosen.edge, chosen.span, chosen.shard
FROM chosen)
