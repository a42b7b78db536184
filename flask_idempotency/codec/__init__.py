"""Convert responses to bytes and back, and JSON bodies to digests. This package does not store, wait or unpickle."""
