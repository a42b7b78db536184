"""Commit a claim's record and the rows of a view in one transaction of the application's session."""
