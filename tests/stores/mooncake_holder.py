"""A process that gives memory to a Mooncake cluster; arguments: master, bytes, port.

A connection to the port that sends ``clear`` removes all objects; it is answered when done.
"""

from __future__ import annotations

import socket
import sys

from mooncake.store import MooncakeDistributedStore


def main() -> None:
    master, size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", size, 0, "tcp", "", master)
    if code != 0:
        sys.exit(f"setup returned {code}")
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                if connection.recv(16) == b"clear":
                    connection.sendall(str(store.remove_all(True)).encode())


if __name__ == "__main__":
    main()
