"""A process that gives memory to a Mooncake cluster; arguments: master, bytes, port.

It obeys commands that arrive at the port, one per connection.
"""

from __future__ import annotations

import socket
import sys
from typing import BinaryIO

from mooncake.store import MooncakeDistributedStore, ReplicateConfig


def main() -> None:
    master, size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", size, 16 << 20, "tcp", "", master)
    if code != 0:
        sys.exit(f"setup returned {code}")
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb") as stream:
                words = stream.readline().decode().split()
                if words:  # otherwise it was a test of readiness
                    stream.write(f"{obey(store, words, stream)}\n".encode())


def obey(store: MooncakeDistributedStore, words: list[str], stream: BinaryIO) -> int:
    """Carry out a command; return 0 when it has succeeded.

    ``clear`` removes all objects; ``put NAME LENGTH``, followed by the bytes, replaces an object;
    ``fill`` leaves no memory.
    """
    match words:
        case ["clear"]:
            return min(0, store.remove_all(True))
        case ["put", name, length]:
            store.remove(name, True)
            return store.put(name, stream.read(int(length)))
        case ["fill"]:
            config = ReplicateConfig()
            config.with_hard_pin = True
            for size in (1 << 20, 1 << 14, 1 << 10):
                number = 0
                while store.put(f"filler/{size}/{number}", bytes(size), config) == 0:
                    number += 1
            return 0
    return -1


if __name__ == "__main__":
    main()
