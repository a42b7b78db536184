"""Everything beside the request path of the SQL store: what the janitor, the command line and `doctor` call."""
