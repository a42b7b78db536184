"""Connect Flask's requests and responses to the engine.

Modules here decide nothing about a key, open no store and read no configuration.
"""
