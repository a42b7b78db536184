"""Durable steps: a view or a message goes on after what an earlier attempt has finished."""
