"""The laboratory: what can be done to the ground that a store stands on, and tests that it is done."""
