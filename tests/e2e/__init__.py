"""The whole thing: real server processes, real sockets, real databases.

Code here may not reach into the library: it starts servers that use it as anybody would, speaks bytes to them, and looks at
what is left in the store. What a view did is counted in a second Redis, which no test breaks. Nothing is ever mocked.
"""
