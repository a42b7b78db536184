"""The servers that tests start: nothing imports these modules until a test uses a server."""
