"""S3Store: blocks as objects of S3, Google Cloud Storage or Azure Blob Storage."""

from __future__ import annotations

import asyncio
import os
import re
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np

from aiokv import _native
from aiokv.base.statistics import StoreStatistics
from aiokv.errors import ConfigError, StoreError
from aiokv.stores.base import KEY_BYTES, Result, Store, StoreMemory, split_keys
from aiokv.stores.bundles import MAX_HEADER_BYTES, Bundle, BundleIndex, Cuts, PrefixWalk
from aiokv.stores.labels import KINDS
from aiokv.stores.options import url_options, url_text, without_query
from aiokv.stores.signed_reads import SignedReads
from aiokv.stores.threads import StoreThreads
from aiokv.stores.waiting import all_ended

if TYPE_CHECKING:
    import threading
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

    from numpy.typing import NDArray

    from aiokv._native import ObjectWriter

_SCHEMES: Final = ("s3", "gs", "az")
INLINE_BYTES: Final = 256 << 10  # larger objects are copied into blocks by threads
_THREADS: Final = 8
_CHUNK_BYTES: Final = 64 << 10
_LOOKUP_KEYS: Final = 64  # requests of a lookup in flight
_SIGNED_FOR: Final = timedelta(minutes=10)  # validity of a URL, for clocks that differ
_KEY: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
# Messages name the object, whose hexadecimal digits may look like a status.
_NO_RANGE: Final = "status code: 416"
_NO_ROOM: Final = ("status code: 507", "StorageFull", "InsufficientStorage", "QuotaExceeded")


class S3Store(Store):
    """Blocks as objects of a bucket, over HTTPS. The consecutive blocks of a save are bundled.

    Bundles have 32 MiB on average, and at most 128 blocks: see :mod:`aiokv.stores.bundles`. A save
    takes two requests per bundle, and a load one. When a block is removed or wrong, its whole
    bundle is removed. Snapshots of recurrent state and window blocks are single objects.

    Credentials come from ``options``, from the environment (``AWS_ACCESS_KEY_ID`` and the like), or
    from the role of the machine. The bucket must exist. Its lifecycle rules remove old objects:
    this store has no limit of its own.

    A prompt of which nothing is stored costs one request, and a stored prefix one per bundle that
    this store has not seen lately. Single objects are looked up with one request per key.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
        endpoint: URL of another server of the same protocol, such as MinIO or Ceph; None for that
            of the cloud. An endpoint with ``http:`` sends blocks unencrypted.
        region: region of the bucket; None for that of the environment.
        options: further options of the obstore package for this cloud, such as
            ``{"access_key_id": ..., "secret_access_key": ...}``.
        concurrency: requests that move blocks at a time.
        timeout_seconds: limit of one request.

    Raises:
        ConfigError: an argument is out of range.
    """

    kind: str = "s3"
    max_lookup_keys: int = _LOOKUP_KEYS
    lookup_deadline_seconds: float = 1.0
    finds_prefixes: bool = True
    remember_missing_seconds: float = 5.0
    verifies_loads: bool = True

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        options: Mapping[str, str] | None = None,
        concurrency: int = 16,
        timeout_seconds: float = 5.0,
    ) -> None:
        parts = urlsplit(url_text(url))
        if parts.scheme not in _SCHEMES or not parts.netloc:
            raise ConfigError(
                f"url is {without_query(url)!r}; it must be scheme://bucket/prefix",
                hint=f"the scheme is one of {', '.join(_SCHEMES)}",
            )
        if concurrency < 1:
            raise ConfigError(f"concurrency is {concurrency}; it must be at least 1")
        if not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds is {timeout_seconds}; it must be positive")
        self.url = without_query(url)
        self.max_concurrent = 4
        self._endpoint = endpoint
        self._config = dict(options or {})
        if endpoint is not None:
            self._config["base_url" if parts.scheme == "gs" else "endpoint"] = endpoint
        if region is not None:
            self._config["region"] = region
        self._allows_http = endpoint is not None and urlsplit(endpoint).scheme == "http"
        self._timeout = timedelta(seconds=timeout_seconds)
        self._concurrency = concurrency
        self._gate = asyncio.Semaphore(concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = StoreThreads("s3", 1)
        self._memory: StoreMemory | None = None
        self._index = BundleIndex(0)
        self._cuts = Cuts(1)
        self._client: _Client | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Return the store of ``s3://bucket/prefix?endpoint=https://minio:9000&concurrency=32``.

        Credentials are not options of the URL: they come from the environment.

        Raises:
            ConfigError: the URL has no bucket, or an option is unknown or out of range.
        """
        known: dict[str, Callable[[str], Any]] = {
            "endpoint": str,
            "region": str,
            "concurrency": int,
            "timeout_seconds": float,
        }
        return cls(without_query(url), **url_options(url, known))

    def for_group(self, group: str) -> S3Store:
        """Return a store of the same bucket and prefix; see :class:`Store`."""
        return S3Store(
            self.url,
            endpoint=self._endpoint,
            options=self._config,
            concurrency=self._concurrency,
            timeout_seconds=self._timeout.total_seconds(),
        )

    async def open(self, memory: StoreMemory) -> None:
        """Prepare the client; sends no request. See :class:`Store`.

        Raises:
            ConfigError: the package is missing, or it does not know an option.
        """
        self._client = _Client(self.url, self._config, self._timeout, allow_http=self._allows_http)
        self._gate = asyncio.Semaphore(self._concurrency)
        self._threads = StoreThreads("s3", min(_THREADS, self._concurrency))
        self._memory = memory
        self._index = BundleIndex(memory.num_blocks)
        self._cuts = Cuts(memory.object_bytes)

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each key whether the bucket has an object of the right length.

        Raises:
            StoreError: no request was answered, or access is denied.
        """
        client, memory = self._opened()
        wanted = split_keys(keys)

        async def ask(index: int) -> int:
            if self._index.find(wanted[index]) is not None:
                return Result.DONE
            size = await client.size(_name(wanted[index]))
            return Result.DONE if size == memory.object_bytes else Result.MISSING

        found: NDArray[np.bool_] = await self._all(len(wanted), ask, _LOOKUP_KEYS) == Result.DONE
        return found

    async def lookup_prefix(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each block of a prompt whether it is found; see :class:`Store`.

        Raises:
            StoreError: as for :meth:`lookup`.
        """
        client, _ = self._opened()
        walk = PrefixWalk(split_keys(keys), self._index, self._cuts, _LOOKUP_KEYS)
        while asked := walk.next_keys():
            await self._all(len(asked), partial(self._learn_one, client, asked), _LOOKUP_KEYS)
        return np.arange(len(keys) // KEY_BYTES) < walk.end

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Read objects into host blocks, consecutive ones of a bundle at once; see :class:`Store`.

        Raises:
            StoreError: no request was answered, or access is denied.

        Cancellation: ends when no thread writes into a block, after ``timeout_seconds`` at most.
        """
        client, memory = self._opened()
        wanted = split_keys(keys)
        results = np.full(len(wanted), Result.FAILED, np.uint8)
        runs = self._index.runs(wanted)

        async def get(index: int) -> int:
            run = slice(*runs[index])
            results[run] = await self._load_run(client, memory, wanted[run], blocks[run])
            return Result.DONE

        await self._all(len(runs), get, self._concurrency)
        return results

    async def _load_run(
        self, client: _Client, memory: StoreMemory, keys: list[bytes], blocks: NDArray[np.int32]
    ) -> NDArray[np.uint8] | Result:
        """Read consecutive objects of a bundle, or one object of its own; return their results."""
        for _ in range(2):  # again, if what was known of the object is wrong
            bundle, first = self._index.find(keys[0]) or (Bundle(keys[:1], memory.object_bytes), 0)
            if bundle.keys[first : first + len(keys)] != keys:
                return Result.MISSING  # another bundle has taken the name
            writer = _native.ObjectWriter(
                memory.address,
                memory.pitch_bytes,
                memory.payload_bytes,
                blocks,
                b"".join(keys),
                num_blocks=memory.num_blocks,
            )
            part = bundle.offset(first), bundle.offset(first + len(keys))
            request = _name(bundle.keys[0]), part, bundle.num_bytes, writer
            if part[1] - part[0] <= INLINE_BYTES:
                async with self._gate:
                    size = await client.read(*request)
            else:
                size = await self._threads.run(partial(client.read_in_thread, *request))
            results = writer.results()
            if not results.any():
                return results
            if size < 0 or await self._learn(client, bundle.keys[0]) == Result.MISSING:
                self._index.drop(bundle.keys[0])
                return Result.MISSING
            if (place := self._index.find(keys[0])) is None:
                return Result.WRONG if len(bundle.keys) == 1 else Result.MISSING
            if place[0] == bundle:
                return results
        return Result.MISSING

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Write objects from host blocks, each on its own; see :class:`Store`.

        Raises:
            StoreError: no request was answered, or access is denied.

        Cancellation: ends when the requests in flight have ended, which read the blocks.
        """
        return await self.save_chains(keys, blocks, np.zeros(len(blocks), np.bool_))

    async def save_chains(
        self, keys: bytes, blocks: NDArray[np.int32], follows: NDArray[np.bool_]
    ) -> NDArray[np.uint8]:
        """Write bundles from host blocks; see :class:`Store`. Existing objects are kept.

        Errors and cancellation: as for :meth:`save`.
        """
        client, memory = self._opened()
        wanted = split_keys(keys)
        results = np.full(len(wanted), Result.FAILED, np.uint8)
        runs = self._cuts.runs(wanted, follows)

        async def put(index: int) -> int:
            run = slice(*runs[index])
            views = [memory.object(block) for block in blocks[run].tolist()]
            async with self._gate:
                await self._save_run(client, wanted[run], views, results[run])
            return Result.DONE

        ends = await self._all(len(runs), put, self._concurrency)
        for run, end in zip(runs, ends, strict=True):
            if end == Result.REFUSED:
                results[slice(*run)] = np.minimum(results[slice(*run)], Result.REFUSED)
        return results

    async def _save_run(
        self,
        client: _Client,
        keys: list[bytes],
        views: list[memoryview],
        results: NDArray[np.uint8],
    ) -> None:
        """Write what the bucket lacks of consecutive blocks, as one bundle; set their results."""
        first, num_bytes = 0, len(views[0])
        for _ in range(len(keys) + 2):  # 2: other engines may write bundles meanwhile
            place = self._index.find(keys[first])
            name = keys[first] if place is None else place[0].keys[0]
            state = await self._learn(client, name)  # is it still there?
            if (place := self._index.find(keys[first])) is not None:
                stored = zip(place[0].keys[place[1] :], keys[first:], strict=False)
                same = next((i for i, (a, b) in enumerate(stored) if a != b), None)
                count = min(len(place[0].keys) - place[1], len(keys) - first)
                count = count if same is None else same
                results[first : first + count] = Result.PRESENT
                first += count
            elif name == keys[first]:
                bundle = Bundle(keys[first:], num_bytes)
                parts = [memoryview(bundle.header), *views[first:]]
                if await client.write(_name(name), parts, replace=state == Result.WRONG):
                    self._index.add(bundle)
                    results[first:] = Result.DONE
                    return
            if first == len(keys):
                return

    async def _learn_one(self, client: _Client, firsts: list[bytes], index: int) -> int:
        return await self._learn(client, firsts[index])

    async def _learn(self, client: _Client, first: bytes) -> int:
        """Remember the bundle of a name.

        Returns:
            ``MISSING`` if there is no object of this name, ``WRONG`` if it has none of our objects.
        """
        found = await client.head(_name(first))
        self._index.drop(first)
        if found is None:
            return Result.MISSING
        bundle = Bundle.parse(first, *found)
        if self._memory is None or bundle.object_bytes != self._memory.object_bytes:
            return Result.WRONG
        self._index.add(bundle)
        return Result.DONE

    async def remove(self, keys: bytes) -> NDArray[np.uint8]:
        """Remove objects, and bundles that have one of the blocks; see :class:`Store`.

        For a block that this process has seen in no bundle, and that has no object of its own, all
        bundles of its salt are listed.

        Raises:
            StoreError: no request was answered, or access is denied.
        """
        client, _ = self._opened()
        wanted = split_keys(keys)
        unseen = [key for key in wanted if self._index.find(key) is None]
        learn = partial(self._learn_one, client, unseen)
        learned = await self._all(len(unseen), learn, self._concurrency)
        states = dict(zip(unseen, learned, strict=True))
        places = {key: self._index.find(key) for key in wanted}
        lost = {key for key in unseen if states[key] == Result.MISSING}
        for label in {_salt_label(key) for key in lost}:
            async for found in self.stored_keys(label):
                keys_found = lost.intersection(split_keys(found))
                places |= {key: self._index.find(key) for key in keys_found}
        firsts = [key if (place := places[key]) is None else place[0].keys[0] for key in wanted]
        names = list(dict.fromkeys(firsts))

        async def delete(index: int) -> int:
            async with self._gate:
                await client.remove(_name(names[index]))
            self._index.drop(names[index])
            return Result.DONE

        ends = dict(zip(names, await self._all(len(names), delete, self._concurrency), strict=True))
        failed = [states.get(key) == Result.FAILED for key in wanted]
        return np.where(failed, Result.FAILED, [ends[first] for first in firsts]).astype(np.uint8)

    async def stored_keys(self, label: bytes = b"") -> AsyncIterator[bytes]:
        """Yield the keys of the objects of the prefix; see :class:`Store`.

        A request lists 1,000 names, and a further one reads the keys of each bundle. Names begin
        with the label of the salt, so listing those of a salt reads no other names.

        Raises:
            StoreError: no request was answered, or access is denied.
        """
        client, _ = self._opened()
        salt = label.hex() if len(label) == len(_salt_label(bytes(KEY_BYTES))) else ""
        async for names in client.names(salt):
            keys = [name for name in names if _KEY.fullmatch(name) and name.endswith(label.hex())]
            for part in (keys[i : i + _LOOKUP_KEYS] for i in range(0, len(keys), _LOOKUP_KEYS)):
                found: list[bytes] = []

                async def read(index: int) -> int:
                    first = bytes.fromhex(part[index])  # noqa: B023
                    if (head := await client.head(_name(first))) is not None:
                        bundle = Bundle.parse(first, *head)
                        self._index.add(bundle)
                        found.extend(bundle.keys)  # noqa: B023
                    return Result.DONE

                await self._all(len(part), read, _LOOKUP_KEYS)
                yield b"".join(found)

    async def purge(self, label: bytes) -> int:
        """Remove the bundles of a label; see :class:`Store`.

        Raises:
            StoreError: an object could not be read or removed.
        """
        removed = await super().purge(label)
        self._index.drop_label(label)
        return removed

    def statistics(self) -> StoreStatistics:
        """Return counters; the size of the bucket is not known here."""
        return StoreStatistics(
            details={"requests": 0 if self._client is None else self._client.requests}
        )

    async def aclose(self) -> None:
        """Cancel operations in flight, and close the connections. Idempotent.

        Cancellation: takes effect when no request accesses a block.
        """
        self._memory = None
        for task in self._tasks:
            task.cancel()
        try:
            if self._tasks:
                await all_ended(self._tasks)
        finally:
            try:
                await self._threads.aclose()
            finally:
                if self._client is not None:
                    self._client.close()
                    self._client = None

    def _opened(self) -> tuple[_Client, StoreMemory]:
        if self._client is None or self._memory is None:
            raise StoreError(f"{self.url} is not open")
        return self._client, self._memory

    async def _all(
        self, count: int, request: Callable[[int], Coroutine[Any, Any, int]], limit: int
    ) -> NDArray[np.uint8]:
        """Run ``request(index)`` for ``count`` indices, ``limit`` at a time; return their results.

        Raises:
            StoreError: all have failed, one was denied, or the store was closed.
        """
        results = np.full(count, Result.FAILED, np.uint8)
        errors: list[StoreError] = []
        left = iter(range(count))

        async def work() -> None:
            for index in left:
                try:
                    results[index] = await _translated(request, index)
                except StoreError as error:
                    errors.append(error)

        if not count:
            return results
        tasks = [asyncio.create_task(work()) for _ in range(min(limit, count))]
        self._tasks.update(tasks)
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await all_ended(tasks)
            raise
        finally:
            self._tasks.difference_update(tasks)
        if any(task.cancelled() for task in tasks):
            raise StoreError(f"{self.url} was closed")
        denied = [error for error in errors if isinstance(error, AccessDenied)]
        if denied or len(errors) == count:
            first = (denied or errors)[0]
            raise StoreError(f"{self.url}: {first}") from first
        return results


class AccessDenied(StoreError):
    """The server does not know the credentials, or they lack a right."""


class _Client:
    """Requests of the obstore package, with results and errors of a store."""

    def __init__(
        self, url: str, config: dict[str, str], timeout: timedelta, *, allow_http: bool
    ) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise ConfigError(
                "S3Store needs the package obstore", hint="pip install 'aiokv[s3]'"
            ) from error
        self.requests = 0
        self._creates = True
        self._api: Any = obstore
        self._reads: SignedReads | None = None
        is_direct = allow_http and not (getproxies() or "AWS_PROXY_URL" in os.environ)
        if is_direct and urlsplit(url).scheme == "s3":
            self._reads = SignedReads(self._signed, timeout.total_seconds())
        try:
            self._store: Any = from_url(
                url,
                config=config,
                client_options={
                    "allow_http": allow_http,
                    "connect_timeout": min(timeout, timedelta(seconds=1)),
                    "timeout": timeout,
                },
                retry_config={
                    "max_retries": 1,
                    "retry_timeout": timeout,
                    "backoff": {"init_backoff": timedelta(milliseconds=20)},
                },
            )
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"{url}: {_first_line(error)}") from error

    def _signed(self, name: str) -> str:
        return str(self._api.sign(self._store, "GET", name, _SIGNED_FOR))

    def close(self) -> None:
        """Close the connections that threads have kept, when none reads."""
        if self._reads is not None:
            self._reads.close()

    async def size(self, name: str) -> int:
        """Return the length of an object; -1 when there is none."""
        self.requests += 1
        try:
            meta = await self._api.head_async(self._store, name)
        except FileNotFoundError:
            return -1
        return int(meta["size"])

    async def head(self, name: str) -> tuple[bytes, int] | None:
        """Return the first ``MAX_HEADER_BYTES`` of an object, and its length; None without it."""
        answer = await self._get_async(name, (0, MAX_HEADER_BYTES))
        if answer is None or isinstance(answer, int):
            return None if answer is None else (b"", answer)
        return bytes(await answer.bytes_async()), int(answer.meta["size"])

    async def read(
        self, name: str, part: tuple[int, int], num_bytes: int, writer: ObjectWriter
    ) -> int:
        """Read a part of an object, unless its length is another one than ``num_bytes``.

        Returns:
            The length; -1 when there is no object, 0 when it ends before the part.
        """
        answer = await self._get_async(name, part)
        if answer is None or isinstance(answer, int):
            return -1 if answer is None else answer
        size = int(answer.meta["size"])
        if size == num_bytes:
            writer.write(await answer.bytes_async())
        return size

    def read_in_thread(
        self,
        name: str,
        part: tuple[int, int],
        num_bytes: int,
        writer: ObjectWriter,
        unwanted: threading.Event,
    ) -> int:
        """Read as ``read`` does, without the part in memory as a whole; blocks.

        Raises:
            StoreError: a response ended early.
        """
        self.requests += 1
        if self._reads and self._reads.read(name, part, num_bytes, writer, unwanted):
            return num_bytes
        try:
            answer = self._api.get(self._store, name, options={"range": part})
        except FileNotFoundError:
            return -1
        except Exception as error:
            return _length_behind(error)
        size = int(answer.meta["size"])
        if size == num_bytes:
            for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
                if unwanted.is_set():
                    break
                writer.write(chunk)
        return size

    async def _get_async(self, name: str, part: tuple[int, int]) -> Any:
        """Request a part of an object; return None without the object, 0 if it is shorter."""
        self.requests += 1
        try:
            return await self._api.get_async(self._store, name, options={"range": part})
        except FileNotFoundError:
            return None
        except Exception as error:
            return _length_behind(error)

    async def write(self, name: str, parts: list[memoryview], *, replace: bool) -> bool:
        """Write an object in one request; return False if there is one, unless ``replace`` is set.

        Servers that know no conditional writes replace it.

        Cancellation: takes effect when the request has ended: it reads the memory.
        """
        mode = "overwrite" if replace or not self._creates else "create"
        self.requests += 1
        request = asyncio.ensure_future(
            self._api.put_async(self._store, name, parts, use_multipart=False, mode=mode)
        )
        await all_ended([request])
        try:
            await request
        except self._api.exceptions.AlreadyExistsError:
            return False
        except (self._api.exceptions.NotSupportedError, NotImplementedError):
            if mode == "overwrite":
                raise
            self._creates = False
            return await self.write(name, parts, replace=True)
        except FileNotFoundError as error:
            raise StoreError("the bucket does not exist", hint="create it") from error
        return True

    async def names(self, folder: str) -> AsyncIterator[list[str]]:
        """Yield the last parts of the names of objects of a folder, or of all if it is empty.

        Raises:
            StoreError: the request failed.
        """
        try:
            async for page in self._api.list(self._store, folder or None):
                yield [str(meta["path"]).rpartition("/")[2] for meta in page]
        except Exception as error:
            raise _error_of(error) from error

    async def remove(self, name: str) -> None:
        """Remove an object, if there is one."""
        self.requests += 1
        try:
            await self._api.delete_async(self._store, name)
        except FileNotFoundError:
            return


async def _translated(request: Callable[[int], Coroutine[Any, Any, int]], index: int) -> int:
    """Return the result of a request, with errors in plain words.

    Raises:
        AccessDenied: the server refuses the credentials.
        StoreError: the request failed.
    """
    try:
        return await request(index)
    except StoreError:
        raise
    except Exception as error:
        if any(word in _first_line(error) for word in _NO_ROOM):
            return Result.REFUSED
        raise _error_of(error) from error


def _error_of(error: Exception) -> StoreError:
    """Return an error of obstore in plain words."""
    text = _first_line(error)
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return AccessDenied(
            f"access is denied: {text}",
            hint="check the credentials, and their rights to get, put, list and delete objects",
        )
    return StoreError(text)


def _first_line(error: Exception) -> str:
    """Return the message of an error of obstore without its source chain."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _length_behind(error: Exception) -> int:
    """Return 0 for the error that a range begins behind the end of an object; raise others."""
    if _NO_RANGE in _first_line(error):
        return 0
    raise error


def _name(key: bytes) -> str:
    return f"{_salt_label(key).hex()}/{key.hex()}"


def _salt_label(key: bytes) -> bytes:
    return key[KINDS["salt"]]
