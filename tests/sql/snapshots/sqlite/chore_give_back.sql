UPDATE idempotency_chores SET holder=NULL, held_until=NULL WHERE idempotency_chores.name = ? AND idempotency_chores.holder = ?
