"""S3Store: blocks as objects of S3, Google Cloud Storage or Azure Blob Storage."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import numpy as np

from aiokv.base.statistics import StoreStatistics
from aiokv.errors import ConfigError, StoreError
from aiokv.stores.base import KEY_BYTES, Result, Store, StoreMemory, split_keys
from aiokv.stores.labels import KINDS
from aiokv.stores.options import url_options, url_text, without_query
from aiokv.stores.threads import StoreThreads
from aiokv.stores.waiting import all_ended

if TYPE_CHECKING:
    import threading
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

    from numpy.typing import NDArray

_SCHEMES: Final = ("s3", "gs", "az")
INLINE_BYTES: Final = 256 << 10  # larger objects are copied into blocks by threads
_THREADS: Final = 8
_CHUNK_BYTES: Final = 64 << 10
_LOOKUP_KEYS: Final = 64  # requests of a lookup in flight
_KEY: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_NO_ROOM: Final = ("507", "StorageFull", "InsufficientStorage", "QuotaExceeded")


class S3Store(Store):
    """Blocks as objects of a bucket: one request per block, over HTTPS.

    Credentials come from ``options``, from the environment (``AWS_ACCESS_KEY_ID`` and the like), or
    from the role of the machine. The bucket must exist. Its lifecycle rules remove old objects:
    this store has no limit of its own.

    A lookup sends one request per key, 64 at a time. An engine finds the stored part of a long
    prompt with few of them: see :mod:`aiokv.stores.search`.

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
        self._requests = 0
        self._memory: StoreMemory | None = None
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

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each key whether the bucket has an object of the right length.

        Raises:
            StoreError: no request was answered, or access is denied.
        """
        client, memory = self._opened()
        names = _names(keys)

        async def ask(index: int) -> int:
            size = await client.size(names[index])
            return Result.DONE if size == memory.object_bytes else Result.MISSING

        found: NDArray[np.bool_] = await self._all(len(names), ask, _LOOKUP_KEYS) == Result.DONE
        return found

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Read objects into host blocks; see :class:`Store`.

        Raises:
            StoreError: no request was answered, or access is denied.

        Cancellation: ends when no thread writes into a block, after ``timeout_seconds`` at most.
        """
        client, memory = self._opened()
        threads = self._threads
        names = _names(keys)

        async def get(index: int) -> int:
            view = memory.object(int(blocks[index]))
            if memory.object_bytes <= INLINE_BYTES:
                async with self._gate:
                    size = await client.read(names[index], view)
            else:
                size = await threads.run(partial(client.read_in_thread, names[index], view))
            if size < 0:
                return Result.MISSING
            return Result.DONE if size == memory.object_bytes else Result.WRONG

        return await self._all(len(names), get, self._concurrency)

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Write objects from host blocks; see :class:`Store`. Existing objects are kept.

        Raises:
            StoreError: no request was answered, or access is denied.

        Cancellation: ends when the requests in flight have ended, which read the blocks.
        """
        client, memory = self._opened()
        names = _names(keys)

        async def put(index: int) -> int:
            async with self._gate:
                if await client.size(names[index]) == memory.object_bytes:
                    return Result.PRESENT
                await client.write(names[index], memory.object(int(blocks[index])))
            return Result.DONE

        return await self._all(len(names), put, self._concurrency)

    async def remove(self, keys: bytes) -> NDArray[np.uint8]:
        """Remove objects; see :class:`Store`.

        Raises:
            StoreError: no request was answered, or access is denied.
        """
        client, _ = self._opened()
        names = _names(keys)

        async def delete(index: int) -> int:
            async with self._gate:
                await client.remove(names[index])
            return Result.DONE

        return await self._all(len(names), delete, self._concurrency)

    async def stored_keys(self, label: bytes = b"") -> AsyncIterator[bytes]:
        """Yield the keys of the objects of the prefix, 1,000 per request; see :class:`Store`.

        Names begin with the label of the salt, so listing those of a salt reads no other names.

        Raises:
            StoreError: no request was answered, or access is denied.
        """
        client, _ = self._opened()
        salt = label.hex() if len(label) == len(_folder(bytes(KEY_BYTES))) // 2 else ""
        async for names in client.names(salt):
            keys = [name for name in names if _KEY.fullmatch(name) and name.endswith(label.hex())]
            if keys:
                yield bytes.fromhex("".join(keys))

    def statistics(self) -> StoreStatistics:
        """Return counters; the size of the bucket is not known here."""
        return StoreStatistics(details={"requests": self._requests})

    async def aclose(self) -> None:
        """Cancel operations in flight, and close the connections. Idempotent.

        Cancellation: takes effect when no request accesses a block.
        """
        self._client = self._memory = None
        for task in self._tasks:
            task.cancel()
        try:
            if self._tasks:
                await all_ended(self._tasks)
        finally:
            await self._threads.aclose()

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
        self._requests += count
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
        self._api: Any = obstore
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

    async def size(self, name: str) -> int:
        """Return the length of an object; -1 when there is none."""
        try:
            meta = await self._api.head_async(self._store, name)
        except FileNotFoundError:
            return -1
        return int(meta["size"])

    async def read(self, name: str, view: memoryview) -> int:
        """Read an object; return its length, -1 when there is none.

        An object of another length than the memory's is not read.
        """
        try:
            answer = await self._api.get_async(self._store, name)
        except FileNotFoundError:
            return -1
        size = int(answer.meta["size"])
        if size != len(view):
            return size
        content = memoryview(await answer.bytes_async())
        view[: len(content)] = content
        return len(content)

    def read_in_thread(self, name: str, view: memoryview, unwanted: threading.Event) -> int:
        """Read an object as ``read`` does, without an intermediate copy; blocks."""
        try:
            answer = self._api.get(self._store, name)
        except FileNotFoundError:
            return -1
        size = int(answer.meta["size"])
        if size != len(view):
            return size
        position = 0
        for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):
            if unwanted.is_set():
                break
            content = memoryview(chunk)
            view[position : position + len(content)] = content
            position += len(content)
        return position

    async def write(self, name: str, view: memoryview) -> None:
        """Write an object in one request.

        Cancellation: takes effect when the request has ended: it reads the memory.
        """
        request = asyncio.ensure_future(
            self._api.put_async(self._store, name, view, use_multipart=False)
        )
        await all_ended([request])
        try:
            await request
        except FileNotFoundError as error:
            raise StoreError("the bucket does not exist", hint="create it") from error

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


def _names(keys: bytes) -> list[str]:
    return [f"{_folder(key)}/{key.hex()}" for key in split_keys(keys)]


def _folder(key: bytes) -> str:
    """Return the label of the salt of a key."""
    return key[KINDS["salt"]].hex()
