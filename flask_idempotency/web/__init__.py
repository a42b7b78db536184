"""HTTP. Nothing here decides what may happen to a key, opens a store or reads configuration."""
