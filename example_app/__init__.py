"""A small payments API that shows the library from outside: public names only."""
