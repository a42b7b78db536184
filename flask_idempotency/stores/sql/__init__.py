"""Records in the database that also holds what they are about.

No code here interprets a response, waits for an owner, or commits a transaction of the application outside its claim. Every
statement is a named function beside the code that sends it, made of what `statements.py` has for all. What differs from one
database to the next is in `dialects.py`. No other package spells SQL.
"""
