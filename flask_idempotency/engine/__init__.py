"""What may happen to a key.

Nothing here imports another room of the house, or anything but the standard library.
Nothing here knows what a header, a request or a Redis is: those are the doors' and the stores' business.
"""
