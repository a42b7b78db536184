"""Records in Redis or Valkey: one string per record, one script and one round trip per transition.

Only `layout.py` builds key names, and only the scripts in `lua/` write keys. A script checks all that it reads before
its first write, because Redis does not undo the writes of a script that fails half-way.
"""
