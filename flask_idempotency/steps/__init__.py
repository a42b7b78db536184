"""Durable steps: a view or a message goes on behind what an earlier attempt has finished."""
