"""Rows, and who may change them.

A store decides one key at a time, atomically, and only by what the record itself says. Code here does not wait, retry,
encode or interpret a payload, does not know what a policy, a header or a request is, and never compares its own host's
clock with a server's.
"""
