"""Load and save GB/s of the shared stores beside their client libraries alone, in the same run.

``store`` is one ``load`` or ``save`` of a batch; ``library`` moves the same batch by the calls that
a program without aiokv would make: ``batch_get_into`` and ``batch_put_from`` of Mooncake Store on
registered memory, ``get`` and ``put`` of obstore on objects as large as the bundles of the store,
with as many requests at a time (its buffers are neither copied nor verified, as the store's are),
and ``preadv`` and ``pwritev`` of whole files in as many threads. Both take turns; ``ratio`` is
store over library, the median over the turns. All servers run on this machine.
A store whose package or server is absent is left out; `make services` installs them.

``s3_lookup`` is the time to find the stored part of a prompt of 20,480 tokens, in blocks of 16
tokens, on a server that takes 30 ms per request, and the number of requests.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from aiokv._native import seal_blocks
from aiokv.stores import DirectoryStore, MooncakeStore, S3Store
from aiokv.stores.base import KEY_BYTES, split_keys
from aiokv.stores.bundles import MAX_HEADER_BYTES, Bundle, Cuts
from aiokv.stores.proof import derive_keys
from aiokv.stores.store_set import StoreSet
from tests.stores import mooncake_cluster, moto_server
from tests.stores.conformance import Blocks, keys_of
from tests.stores.servers import Server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiokv.stores.base import Store

BATCH_BYTES = 32 << 20
THREADS = 4
REQUESTS = 16
HEADER = 'HTTP/1.1 200 OK\r\nContent-Length: {}\r\nETag: "1"\r\nLast-Modified: {}\r\n\r\n'
DATE = "Mon, 01 Jan 2024 00:00:00 GMT"
PROMPT_BLOCKS = 20_480 // 16
STORED_BLOCKS = (0, 1, 640, 1279, 1280)
REQUEST_SECONDS = 0.03


def run(quick: bool) -> dict[str, Any]:
    rounds = 5 if quick else 45
    results: dict[str, Any] = {"directory": {}}
    if not mooncake_cluster.why_absent():
        results["mooncake"] = {}
    if not moto_server.why_absent():
        results["s3"] = {}
    for name, kib in ((name, kib) for name in results for kib in (128, 1024, 4096)):
        folder = Path(tempfile.mkdtemp(prefix="aiokv-bench-"))
        try:
            results[name][f"{kib}_kib"] = uvloop.run(BENCHES[name](folder, kib << 10, rounds))
        finally:
            shutil.rmtree(folder)
    if "s3" in results:
        results["s3_lookup"] = uvloop.run(s3_lookup(rounds))
    return results


class Batch:
    """Host blocks, and the keys of one batch."""

    def __init__(self, block_bytes: int) -> None:
        count = BATCH_BYTES // block_bytes
        self.blocks = Blocks(count, block_bytes)
        self.blocks.fill(1)
        self.ids = np.arange(count, dtype=np.int32)
        self._next = 0

    @property
    def num_bytes(self) -> int:
        return len(self.ids) * self.blocks.memory.object_bytes

    def new_keys(self) -> bytes:
        """Return keys that no store has."""
        first = self._next
        self._next += len(self.ids)
        return keys_of(range(first, first + len(self.ids)))

    def addresses(self) -> tuple[list[int], list[int]]:
        memory = self.blocks.memory
        addresses = [memory.address + int(i) * memory.pitch_bytes for i in self.ids]
        return addresses, [memory.object_bytes] * len(addresses)

    def views(self) -> list[memoryview]:
        return [self.blocks.memory.object(int(i)) for i in self.ids]


async def compared(
    batch: Batch,
    rounds: int,
    store: Callable[[], Awaitable[Any]],
    library: Callable[[], Awaitable[Any]],
) -> dict[str, float]:
    """Return GB/s of both, measured in turns."""
    seconds: dict[str, list[float]] = {"store": [], "library": []}
    for turn in range(rounds + 1):
        both = [("store", store), ("library", library)]
        for name, move in both if turn % 2 else reversed(both):
            began = time.perf_counter()
            await move()
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    pairs = zip(seconds["library"], seconds["store"], strict=True)
    return {
        "store_gbps": batch.num_bytes / medians["store"] / 1e9,
        "library_gbps": batch.num_bytes / medians["library"] / 1e9,
        "ratio": statistics.median(library / store for library, store in pairs),
    }


async def checked_load(store: Store, keys: bytes, batch: Batch) -> None:
    results = await store.load(keys, batch.ids)
    assert not results.any(), results


async def checked_save(store: Store, keys: bytes, batch: Batch) -> None:
    results = await store.save(keys, batch.ids)
    assert not results.any(), results


def names_of(keys: bytes) -> list[str]:
    return [keys[i : i + KEY_BYTES].hex() for i in range(0, len(keys), KEY_BYTES)]


# --- directory ------------------------------------------------------------------------------------


async def directory(folder: Path, block_bytes: int, rounds: int) -> dict[str, Any]:
    batch = Batch(block_bytes)
    store = DirectoryStore(folder / "kv", threads=THREADS)
    await store.open(batch.blocks.memory)
    pool = ThreadPoolExecutor(THREADS)
    loop = asyncio.get_running_loop()
    views = batch.views()
    paths = [folder / f"plain-{i}" for i in range(len(views))]

    def read(first: int) -> None:
        for path, view in list(zip(paths, views, strict=True))[first::THREADS]:
            file = os.open(path, os.O_RDONLY)
            assert os.preadv(file, [view], 0) == len(view)
            os.close(file)

    def write(first: int) -> None:
        for path, view in list(zip(paths, views, strict=True))[first::THREADS]:
            file = os.open(path, os.O_WRONLY | os.O_CREAT)
            assert os.pwritev(file, [view], 0) == len(view)
            os.close(file)

    async def in_threads(move: Callable[[int], None]) -> None:
        await asyncio.gather(*(loop.run_in_executor(pool, move, i) for i in range(THREADS)))

    async def write_new_files() -> None:
        await in_threads(write)
        for path in paths:
            os.unlink(path)

    keys = batch.new_keys()

    async def save_new_files() -> None:
        await checked_save(store, keys, batch)
        await store.remove(keys)

    try:
        saved = await compared(batch, rounds, save_new_files, write_new_files)
        await checked_save(store, keys, batch)
        await in_threads(write)
        loaded = await compared(
            batch, rounds, lambda: checked_load(store, keys, batch), lambda: in_threads(read)
        )
    finally:
        pool.shutdown()
        await store.aclose()
    return {"load": loaded, "save": saved}


# --- Mooncake Store -------------------------------------------------------------------------------


async def mooncake(folder: Path, block_bytes: int, rounds: int) -> dict[str, Any]:
    from aiokv.stores.mooncake.client import import_library

    batch = Batch(block_bytes)
    addresses, sizes = batch.addresses()
    cluster = mooncake_cluster.MooncakeCluster(folder, segment_bytes=256 << 20)
    cluster.start()
    store = MooncakeStore(cluster.address)
    library = import_library()
    client = library.MooncakeDistributedStore()
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(1)
    try:
        await store.open(batch.blocks.memory)
        setup = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", cluster.address)
        assert client.setup(*setup) == 0
        assert client.register_buffer(addresses[0], batch.blocks.memory.num_bytes) == 0

        async def get(names: list[str]) -> None:
            got = await loop.run_in_executor(pool, client.batch_get_into, names, addresses, sizes)
            assert got == sizes

        async def put_new() -> None:
            names = names_of(batch.new_keys())
            put = await loop.run_in_executor(pool, client.batch_put_from, names, addresses, sizes)
            assert not any(put)
            client.batch_remove(names, True)

        async def save_new() -> None:
            keys = batch.new_keys()
            await checked_save(store, keys, batch)
            await store.remove(keys)

        saved = await compared(batch, rounds, save_new, put_new)
        keys = batch.new_keys()
        await checked_save(store, keys, batch)
        names = [f"aiokv/{name}" for name in names_of(keys)]
        loaded = await compared(
            batch, rounds, lambda: checked_load(store, keys, batch), lambda: get(names)
        )
    finally:
        await store.aclose()
        client.close()
        pool.shutdown()
        cluster.kill()
    return {"load": loaded, "save": saved}


# --- S3 -------------------------------------------------------------------------------------------


class Source(asyncio.Protocol):
    """An S3 server in memory: PUT, GET of a range or of all, and HEAD of one object."""

    def __init__(self, objects: dict[bytes, bytearray]) -> None:
        self._objects = objects
        self._buffer = b""
        self._content: bytearray | None = None  # of the PUT in progress
        self._left = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._content is not None:
            self._content += data
            self._left -= len(data)
        else:
            self._buffer += data
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            self._buffer = b""
            method, target, _ = head.split(b" ", 2)
            name = target.partition(b"?")[0]
            headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            if method != b"PUT":
                self._answer(method, self._objects.get(name), headers.get(b"range"))
                return
            self._content = self._objects[name] = bytearray(rest)
            self._left = int(headers[b"content-length"]) - len(rest)
        if not self._left:
            self._content = None
            self._transport.write(HEADER.format(0, DATE).encode())

    def _answer(self, method: bytes, content: bytearray | None, part: bytes | None) -> None:
        if content is None:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        first, last = 0, len(content) - 1
        head = HEADER
        if part is not None:
            first, last = (int(place) for place in part.removeprefix(b"bytes=").split(b"-"))
            last = min(last, len(content) - 1)
            place = f"Content-Range: bytes {first}-{last}/{len(content)}"
            head = head.replace("200 OK", f"206 Partial Content\r\n{place}")
        self._transport.write(head.format(last + 1 - first, DATE).encode())
        if method == b"GET":
            self._transport.write(memoryview(content)[first : last + 1])


async def serve(port: int) -> None:
    """Serve objects until the process ends."""
    objects: dict[bytes, bytearray] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Source(objects), "127.0.0.1", port)
    await server.serve_forever()


async def s3(folder: Path, block_bytes: int, rounds: int) -> dict[str, Any]:
    import obstore
    from obstore.store import from_url

    batch = Batch(block_bytes)
    program = "import sys, uvloop; from bench.remote_stores import serve; "
    program += "uvloop.run(serve(int(sys.argv[1])))"
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    server = Server(lambda port: [sys.executable, "-c", program, str(port)], folder / "s3.log")
    server.start()
    endpoint = f"http://127.0.0.1:{server.port}"
    options = {"access_key_id": "test", "secret_access_key": "test"}
    store = S3Store(
        "s3://kvcache", endpoint=endpoint, region="us-east-1", options=options, concurrency=REQUESTS
    )
    client = from_url(
        "s3://kvcache",
        config={**options, "endpoint": endpoint, "region": "us-east-1"},
        client_options={"allow_http": True},
    )
    gate = asyncio.Semaphore(REQUESTS)
    memory = batch.blocks.memory
    next_batch = iter(range(1_000_000))

    async def get(name: str) -> None:
        async with gate:
            content = await (await obstore.get_async(client, name)).bytes_async()
            assert len(content) >= memory.object_bytes

    async def put(name: str, content: bytes) -> None:
        async with gate:
            await obstore.put_async(client, name, content, use_multipart=False)

    new_keys = iter([batch.new_keys() for _ in range(rounds + 1)])
    follows = np.arange(len(batch.ids)) > 0

    async def save() -> None:
        results = await store.save_chains(next(new_keys), batch.ids, follows)
        assert not results.any(), results

    try:
        await store.open(memory)
        keys = batch.new_keys()
        # The same objects: as many and as large as the bundles of a batch.
        runs = Cuts(memory.object_bytes).runs(split_keys(keys), follows)
        contents = [bytes((end - first) * memory.object_bytes) for first, end in runs]

        def put_all() -> Awaitable[Any]:
            prefix = next(next_batch)
            return asyncio.gather(*(put(f"{prefix}/{i}", c) for i, c in enumerate(contents)))

        saved = await compared(batch, rounds, save, put_all)
        seal_blocks(
            memory.address, memory.pitch_bytes, memory.payload_bytes, batch.ids, keys,
            num_blocks=memory.num_blocks,
        )  # fmt: skip
        await store.save_chains(keys, batch.ids, follows)
        await asyncio.gather(*(put(f"own/{i}", c) for i, c in enumerate(contents)))
        loaded = await compared(
            batch,
            rounds,
            lambda: checked_load(store, keys, batch),
            lambda: asyncio.gather(*(get(f"own/{i}") for i in range(len(contents)))),
        )
    finally:
        await store.aclose()
        server.kill()
    return {"load": loaded, "save": saved}


class Catalog(asyncio.Protocol):
    """An S3 server that answers requests for the headers of bundles after a delay."""

    def __init__(self, stored: dict[bytes, Bundle]) -> None:
        self._stored = stored
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        name = data.split(b" ", 2)[1].rpartition(b"/")[2]
        answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        if (bundle := self._stored.get(name)) is not None:
            size = min(MAX_HEADER_BYTES, bundle.num_bytes)
            place = f"Content-Range: bytes 0-{size - 1}/{bundle.num_bytes}"
            head = HEADER.replace("200 OK", f"206 Partial Content\r\n{place}")
            answer = head.format(size, DATE).encode() + bundle.header.ljust(size, b"\0")[:size]
        asyncio.get_running_loop().call_later(REQUEST_SECONDS, self._transport.write, answer)


async def s3_lookup(rounds: int) -> dict[str, Any]:
    """Return seconds and requests per lookup, by the number of blocks that are stored."""
    fingerprint = bytes(KEY_BYTES)
    digests = keys_of(range(PROMPT_BLOCKS))
    keys = split_keys(derive_keys(fingerprint, digests))
    memory = Blocks(1, 128 << 10).memory
    stored: dict[bytes, Bundle] = {}
    server = await asyncio.get_running_loop().create_server(lambda: Catalog(stored), "127.0.0.1", 0)
    results = {}
    async with server:
        for count in STORED_BLOCKS:
            stored.clear()
            for first, end in Cuts(memory.object_bytes).runs(keys[:count], [True] * count):
                stored[keys[first].hex().encode()] = Bundle(keys[first:end], memory.object_bytes)
            seconds, requests = [], 0
            for _ in range(rounds):
                store = S3Store(  # which knows no bundle yet
                    "s3://kvcache",
                    endpoint=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",
                    region="us-east-1",
                    options={"access_key_id": "test", "secret_access_key": "test"},
                )
                stores = StoreSet([store])
                await stores.open(memory, fingerprint)
                await store.lookup_prefix(keys_of([-1 % 2**32]))  # connects
                began, before = time.perf_counter(), store.statistics().details["requests"]
                found = (await stores.lookup(digests)).blocks
                seconds.append(time.perf_counter() - began)
                requests += store.statistics().details["requests"] - before
                await stores.aclose()
                assert found == count, (found, count)
            results[f"stored_{count}"] = {
                "ms": statistics.median(seconds) * 1e3,
                "requests": requests / rounds,
            }
    return results


BENCHES: dict[str, Callable[[Path, int, int], Any]] = {
    "directory": directory,
    "mooncake": mooncake,
    "s3": s3,
}
