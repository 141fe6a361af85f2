"""Parts of test_disk_io.py that need a process of their own: PART LOOP FILE."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import struct
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import uvloop

from aiokv.errors import ConfigError, UsageError
from aiokv.stores.disk.io import DiskIo

if TYPE_CHECKING:
    from collections.abc import Iterator

_IO_URING_SETUP = 425
_SET_SECCOMP, _SET_NO_NEW_PRIVILEGES, _FILTER = 22, 38, 2


def refuse_io_uring() -> None:
    """Make io_uring_setup fail with EPERM in this process, as the sandbox of a container does."""
    instructions = (
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, _IO_URING_SETUP),  # skip one instruction if it is another
        (0x06, 0, 0, 0x00050000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000),  # allow
    )
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(buffer))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    assert prctl(_SET_SECCOMP, _FILTER, program, 0, 0) == 0, os.strerror(ctypes.get_errno())


@contextmanager
def raises(kind: type[Exception], text: str) -> Iterator[None]:
    """Check that the body raises such an error, whose message contains ``text``."""
    try:
        yield
    except kind as error:
        if text in str(error):
            return
        raise
    raise AssertionError(f"no {kind.__name__}")


async def write_page(io: DiskIo, path: str) -> None:
    page = np.zeros(4096, np.uint8)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    written = await io.write(
        fd,
        np.array([page.ctypes.data], np.uint64),
        np.array([4096], np.uint32),
        np.array([0], np.uint64),
    )
    os.close(fd)
    assert written.tolist() == [4096]


async def refused(path: str) -> None:
    """Fall back to threads, and log the reason once per process."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("aiokv").addHandler(handler)
    refuse_io_uring()
    for _ in range(2):
        io = DiskIo()
        assert io.backend == "threads"
        await write_page(io, path)
        await io.aclose()
    assert len(records) == 1
    assert "Operation not permitted" in records[0].getMessage()
    with raises(ConfigError, "io_uring_setup"):
        DiskIo(backend="io_uring")


async def fork(path: str) -> None:
    """Refuse the use of the queue in a child; the parent goes on."""
    io = DiskIo()
    await write_page(io, path)
    child = os.fork()
    if child == 0:
        try:
            with raises(UsageError, "os.fork()"):
                io.register_buffer(0, 4096)
            del io
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222
    await write_page(io, path)
    await io.aclose()


async def imports(path: str) -> None:
    """Import nothing within a call, where it would hold the loop."""
    io = DiskIo()
    before = set(sys.modules)
    await write_page(io, path)
    await io.aclose()
    assert set(sys.modules) == before


if __name__ == "__main__":
    part, loop, path = sys.argv[1:]
    run = uvloop.run if loop == "uvloop" else asyncio.run
    run({"refused": refused, "fork": fork, "imports": imports}[part](path))
