"""Makes unsafe HTTP endpoints of a Flask application safe to retry."""
