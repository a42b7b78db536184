"""Everything beside the request path of the Redis store: what the janitor, the command line and `doctor` call."""
