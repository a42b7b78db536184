"""Waitress on a socket that is open already; its own command cannot be given one."""

from __future__ import annotations

import socket
import sys

import waitress  # type: ignore[import-untyped]

from tests.e2e.service import from_environment

if __name__ == "__main__":
    descriptor, threads = map(int, sys.argv[1:])
    waitress.serve(from_environment(), sockets=[socket.socket(fileno=descriptor)], threads=threads)
