UPDATE idempotency_chores SET holder=NULL, held_until=NULL WHERE idempotency_chores.name = %(my_name)s::VARCHAR AND idempotency_chores.holder = %(my_holder)s
