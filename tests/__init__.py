"""Tests mirror the package; what they need from outside is in `services`."""
