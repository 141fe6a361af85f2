"""Listening sockets of the commands that serve."""

from __future__ import annotations

import socket

from aiokv.errors import UsageError

MAX_PORT = 2**16 - 1


def listen(option: str, host: str, port: int) -> socket.socket:
    """Return a listening socket. If the address cannot be bound, this fails before the start.

    Args:
        option: flag that gives the port, for the messages.
        host: address or name of this machine.
        port: port; 0 for any.

    Raises:
        UsageError: the port is out of range, or the address cannot be bound.
    """
    if not 0 <= port <= MAX_PORT:
        raise UsageError(f"{option} is {port}; it must be a port, from 0 to {MAX_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"{option}: port {port} of {host} cannot be bound: {error.strerror or error}",
            hint=f"choose another port; {option} 0 takes any free port",
        ) from None
