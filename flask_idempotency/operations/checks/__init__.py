"""The checks of `doctor`. Each is a function that looks, changes nothing, and says what it found.

A finding that is not fine names a command or a setting that mends it. None names a key, tenant, password or URL.
"""
