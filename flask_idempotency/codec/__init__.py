"""Convert responses to bytes and back. This package does not store, wait or unpickle."""
