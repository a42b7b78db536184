"""A claim and the rows of a view in one transaction of the application's own session."""
