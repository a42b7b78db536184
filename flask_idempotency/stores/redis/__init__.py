"""Records in Redis or Valkey: one string per record, one script and one round trip per transition.

Code outside `layout.py` spells no key, code outside `lua/` writes none. What a script reads, it checks before its first
write: scripts run alone, but an error half-way leaves the first half done.
"""
