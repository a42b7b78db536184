"""What the janitor, the command line and `doctor` call on the Redis store, outside the path of a request."""
