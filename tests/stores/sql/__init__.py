"""The SQL that every dialect gets, word for word."""
