"""Records in the database that also holds what they are about.

Nothing here interprets an answer, waits for an owner, or commits a transaction of the application's that was not to be
settled. Every statement is a named function in `statements.py`, `completions.py` or a file that ends in `_statements.py`,
made of what is in `clauses.py`; what differs from one database to the next is in `dialects.py`; no other module spells SQL.
"""
