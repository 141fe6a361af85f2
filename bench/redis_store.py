"""Bytes per second between host blocks and a Redis server on this machine, over loopback.

``load`` and ``save`` of ``RedisStore`` on asyncio and uvloop, per size of an object, in turns with:

* ``recv_into`` and ``send``: a loop over one blocking socket that receives the same replies into
  the arena, one behind the other, or sends the same requests, and looks at nothing;
* ``redis_py``: ``GET`` and ``SET`` one after the other, and ``redis_py_asyncio`` the same on
  uvloop; ``redis_py_gathered`` has 4 calls at a time on 4 connections;
* ``buffered_protocol``: values read into blocks on the thread of the loop.

Each number is the median of the rounds. A ``ratio`` is the median of the ratios within each round:
the store on uvloop over the other. ``beside_busy_loop`` repeats loads while a task of the loop
computes 2 ms in each pass. ``held_ms`` is the CPU time for which one callback of the store holds
the loop. ``lookup_us_per_key`` is the time of a lookup of 1,000 keys, over their number.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.stores.base import KEY_BYTES, Result, StoreMemory
from aiokv.stores.redis import RedisStore
from aiokv.stores.redis.commands import WINDOW_BYTES
from aiokv.worker.arena import HostArena
from bench.loop_held import LoopWatch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

SIZES = {"128_kib": 128 << 10, "1_mib": 1 << 20, "4_mib": 4 << 20}
TOTAL_BYTES = 64 << 20
LOOKUP_KEYS = 1_000
WARM_UP = 8  # objects before the clock starts, on the same connection
RECEIVE_BYTES = 128 << 10  # of one recv_into
BUSY_SECONDS = 0.002


def run(quick: bool) -> dict[str, Any]:
    """Return the results by size of an object; none without redis-py and a server."""
    if importlib.util.find_spec("redis") is None or not find_program():
        print("bench: redis_store needs redis-py and a server; `make services`", file=sys.stderr)
        return {}
    from tests.stores.servers_redis import running_server

    with (
        tempfile.TemporaryDirectory() as directory,
        running_server(Path(directory) / "server") as server,
    ):
        return {
            name: _Bench(server.port, object_bytes, quick).run()
            for name, object_bytes in SIZES.items()
        }


def find_program() -> bool:
    """Return whether a server is installed."""
    return any(map(shutil.which, ("valkey-server", "redis-server")))


class _Bench:
    """One size of objects."""

    def __init__(self, port: int, object_bytes: int, quick: bool) -> None:
        import redis.asyncio

        self.redis = redis
        self.port = port
        self.object_bytes = object_bytes
        self.quick = quick
        self.rounds = 2 if quick else 7
        total = TOTAL_BYTES // 8 if quick else TOTAL_BYTES
        self.count = max(4, total // object_bytes)
        self.arena = HostArena(num_blocks=self.count, pitch_bytes=object_bytes)
        self.arena.blocks[:] = np.random.default_rng(0).integers(0, 256, object_bytes, np.uint8)
        self.arena.blocks[:, 0] = np.arange(self.count)
        self.view = memoryview(self.arena.blocks.reshape(-1))
        self.memory = StoreMemory(
            address=self.arena.pointer,
            num_blocks=self.count,
            pitch_bytes=object_bytes,
            payload_bytes=object_bytes - TRAILER_BYTES,
            view=self.view,
        )
        digests = np.random.default_rng(1).integers(0, 256, (self.count, KEY_BYTES), np.uint8)
        self.keys = digests.tobytes()
        self.names = [b"aiokv:" + digest.tobytes().hex().encode() for digest in digests]
        self.ids = np.arange(self.count, dtype=np.int32)

    def run(self) -> dict[str, Any]:
        try:
            held = asyncio.run(self.held_ms())
            lookup_us = uvloop.run(self.lookup_us_per_key())
            numbers = {
                "load": self.measure(self.loads(), self.rounds),
                "save": self.measure(self.saves(), self.rounds),
                "held_ms": held,
                "lookup_us_per_key": lookup_us,
            }
            if not self.quick:  # a busy loop may keep the interpreter from threads for minutes
                numbers["beside_busy_loop"] = self.measure(self.busy_loads(), 3)
            return numbers
        finally:
            self.client().flushall()
            self.view.release()
            self.arena.close()

    def measure(self, ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
        """Run all ways in turns; each returns its seconds."""
        seconds: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            for name, way in ways.items():
                seconds[name].append(way())
        moved = self.count * self.object_bytes / 1e9
        results = {f"{name}_gbps": moved / statistics.median(s) for name, s in seconds.items()}
        ours = seconds["store_uvloop"]
        for name, others in seconds.items():
            if not name.startswith("store"):
                ratios = [other / own for other, own in zip(others, ours, strict=True)]
                results[f"ratio_to_{name}"] = statistics.median(ratios)
        return results

    # --- the store --------------------------------------------------------------------------------

    def loads(self) -> dict[str, Callable[[], float]]:
        self.fill()
        return {
            "store_asyncio": lambda: asyncio.run(self.load()),
            "store_uvloop": lambda: uvloop.run(self.load()),
            "recv_into": self.recv_into,
            "redis_py": self.redis_py_get,
            "redis_py_asyncio": lambda: uvloop.run(self.redis_py_asyncio_get(1)),
            "redis_py_gathered": lambda: uvloop.run(self.redis_py_asyncio_get(4)),
            "buffered_protocol": lambda: uvloop.run(self.protocol_load()),
        }

    def busy_loads(self) -> dict[str, Callable[[], float]]:
        self.fill()
        return {
            "store_asyncio": lambda: asyncio.run(_beside_busy_task(self.load)),
            "store_uvloop": lambda: uvloop.run(_beside_busy_task(self.load)),
            "buffered_protocol_asyncio": lambda: asyncio.run(_beside_busy_task(self.protocol_load)),
            "buffered_protocol": lambda: uvloop.run(_beside_busy_task(self.protocol_load)),
        }

    def saves(self) -> dict[str, Callable[[], float]]:
        return {
            "store_asyncio": lambda: asyncio.run(self.save()),
            "store_uvloop": lambda: uvloop.run(self.save()),
            "send": self.send,
            "redis_py": self.redis_py_set,
            "redis_py_asyncio": lambda: uvloop.run(self.redis_py_asyncio_set()),
        }

    async def load(self) -> float:
        store = await self.opened()
        await store.load(self.keys[: WARM_UP * KEY_BYTES], self.ids[:WARM_UP])
        began = time.perf_counter()
        results = await store.load(self.keys, self.ids)
        seconds = time.perf_counter() - began
        await store.aclose()
        self.check(results)
        return seconds

    async def save(self) -> float:
        self.client().flushall()
        store = await self.opened()
        await store.lookup(self.keys[:KEY_BYTES])
        began = time.perf_counter()
        results = await store.save(self.keys, self.ids)
        seconds = time.perf_counter() - began
        await store.aclose()
        self.check(results)
        return seconds

    async def held_ms(self) -> dict[str, dict[str, float]]:
        """Return the CPU time per callback of the loop, the median and the longest."""
        store = await self.opened()
        watch = LoopWatch()
        with watch.watching(None):
            for verb, call in (
                ("save", store.save(self.keys, self.ids)),
                ("lookup", store.lookup(self.keys)),
                ("load", store.load(self.keys, self.ids)),
            ):
                watch.verb = verb
                await call
        watch.verb = ""
        await store.aclose()
        held: dict[str, dict[str, float]] = watch.results()["held_ms"]
        return held

    async def lookup_us_per_key(self) -> float:
        store = await self.opened()
        keys = np.random.default_rng(2).integers(0, 256, (LOOKUP_KEYS, KEY_BYTES), np.uint8)
        seconds = []
        for _ in range(1 + self.rounds):
            began = time.perf_counter()
            await store.lookup(keys.tobytes())
            seconds.append(time.perf_counter() - began)
        await store.aclose()
        return statistics.median(seconds[1:]) / LOOKUP_KEYS * 1e6

    async def opened(self) -> RedisStore:
        # beside a busy loop, a thread waits for the interpreter at each reply
        store = RedisStore(f"redis://127.0.0.1:{self.port}", connect_timeout_seconds=30.0)
        await store.open(self.memory)
        return store

    def check(self, results: np.ndarray) -> None:
        if (results != Result.DONE).any():
            raise RuntimeError(f"redis_store: results {np.unique(results)}")

    def fill(self) -> None:
        with self.client() as client:
            client.flushall()
            for block, name in enumerate(self.names):
                client.set(name, self.memory.object(block))

    # --- plain sockets ----------------------------------------------------------------------------

    def recv_into(self) -> float:
        reply_bytes = len(b"$%d\r\n" % self.object_bytes) + self.object_bytes + 2
        with self.connected() as plain:
            plain.sendall(b"".join(_request(b"GET", name) for name in self.names[:WARM_UP]))
            rest = min(WARM_UP, self.count) * reply_bytes
            while rest:
                rest -= plain.recv_into(self.view[: min(rest, RECEIVE_BYTES)])
            at = 0
            began = time.perf_counter()
            for now, behind in self.windows():
                plain.sendall(b"".join(_request(b"GET", name) for name in behind))
                rest = len(now) * reply_bytes
                while rest:
                    received = plain.recv_into(self.view[at : at + min(rest, RECEIVE_BYTES)])
                    rest -= received
                    at = (at + received) % (len(self.view) - RECEIVE_BYTES)
            return time.perf_counter() - began

    def send(self) -> float:
        self.client().flushall()
        blocks = {name: self.memory.object(block) for block, name in enumerate(self.names)}
        with self.connected() as plain:
            replies = 0
            began = time.perf_counter()
            for now, behind in self.windows():
                for name in behind:
                    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$" % (len(name), name)
                    plain.sendall(head + b"%d\r\n" % self.object_bytes)
                    plain.sendall(blocks[name])
                    plain.sendall(b"\r\n")
                replies += len(now)
                while replies:
                    replies -= len(plain.recv(min(replies * 5, 4096))) // 5
            return time.perf_counter() - began

    def windows(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Return pairs: names whose replies are due, and names to request before reading these."""
        step = max(1, WINDOW_BYTES // self.object_bytes // 2)
        groups = [self.names[i : i + step] for i in range(0, self.count, step)]
        return pairwise([[], *groups, []])

    def connected(self) -> socket.socket:
        plain = socket.create_connection(("127.0.0.1", self.port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return plain

    async def protocol_load(self) -> float:
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(_ValuesProtocol, "127.0.0.1", self.port)
        began = time.perf_counter()
        await protocol.load(self.names, [self.memory.object(block) for block in range(self.count)])
        seconds = time.perf_counter() - began
        protocol.transport.close()
        return seconds

    # --- redis-py ---------------------------------------------------------------------------------

    def client(self) -> Any:
        return self.redis.Redis(port=self.port, protocol=2)

    def redis_py_get(self) -> float:
        with self.client() as client:
            client.ping()
            began = time.perf_counter()
            for name in self.names:
                client.get(name)
            return time.perf_counter() - began

    def redis_py_set(self) -> float:
        with self.client() as client:
            client.flushall()
            began = time.perf_counter()
            for block, name in enumerate(self.names):
                client.set(name, self.memory.object(block))
            return time.perf_counter() - began

    async def redis_py_asyncio_get(self, calls: int) -> float:
        async with self.redis.asyncio.Redis(port=self.port, protocol=2) as client:
            await client.ping()
            began = time.perf_counter()
            await asyncio.gather(*(_each(client.get, self.names[i::calls]) for i in range(calls)))
            return time.perf_counter() - began

    async def redis_py_asyncio_set(self) -> float:
        async with self.redis.asyncio.Redis(port=self.port, protocol=2) as client:
            await client.flushall()
            began = time.perf_counter()
            for block, name in enumerate(self.names):
                await client.set(name, self.memory.object(block))
            return time.perf_counter() - began


class _ValuesProtocol(asyncio.BufferedProtocol):
    """Reads values of pipelined GETs into blocks; each key must exist."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.blocks: list[memoryview] = []
        self.names: list[bytes] = []
        self.received = 0  # values
        self.at = 0  # in the value, or in the bytes between two values
        self.in_value = False
        self.between = memoryview(bytearray(2 + len(b"$%d\r\n" % (1 << 30))))
        self.gap = 0
        self.done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def load(self, names: list[bytes], blocks: list[memoryview]) -> asyncio.Future[None]:
        self.names, self.blocks = names, blocks
        self.gap = len(b"\r\n$%d\r\n" % len(blocks[0]))
        self.at = 2  # there is no end of a value before the first one
        self.done = asyncio.get_running_loop().create_future()
        window = max(2, WINDOW_BYTES // len(blocks[0]))
        self.transport.write(b"".join(_request(b"GET", name) for name in names[:window]))
        self.names = names[window:]
        return self.done

    def get_buffer(self, hint: int) -> memoryview:
        if self.in_value:
            return self.blocks[self.received][self.at :]
        return self.between[self.at : self.gap]

    def buffer_updated(self, num_bytes: int) -> None:
        self.at += num_bytes
        if self.in_value and self.at == len(self.blocks[self.received]):
            self.in_value, self.at = False, 0
            self.received += 1
            if self.names:
                self.transport.write(_request(b"GET", self.names.pop(0)))
        elif not self.in_value and self.at == self.gap:
            self.in_value, self.at = True, 0
        if self.received == len(self.blocks) and self.at == 2 and self.done is not None:
            self.done.set_result(None)


async def _beside_busy_task(work: Callable[[], Awaitable[float]]) -> float:
    """Run ``work`` while another task computes in each pass of the loop."""

    async def compute() -> None:
        while True:
            until = time.perf_counter() + BUSY_SECONDS
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0)

    busy = asyncio.create_task(compute())
    try:
        return await work()
    finally:
        busy.cancel()


async def _each(get: Callable[[bytes], Awaitable[object]], names: Iterable[bytes]) -> None:
    for name in names:
        await get(name)


def _request(*arguments: bytes) -> bytes:
    parts = b"".join(b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments)
    return b"*%d\r\n%b" % (len(arguments), parts)


if __name__ == "__main__":
    import json

    print(json.dumps(run("--quick" in sys.argv), indent=2))
