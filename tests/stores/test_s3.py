"""S3Store with a moto server: conformance and failures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from aiokv.stores import S3Store
from tests.stores.conformance import Blocks, Medium, StoreConformance, keys_of, opened
from tests.stores.moto_server import BUCKET, MotoServer, why_absent

if TYPE_CHECKING:
    from collections.abc import Iterator

REASON = why_absent()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class S3Medium(Medium):
    def __init__(self, server: MotoServer) -> None:
        self.server = server

    def store(self) -> S3Store:
        return S3Store(
            f"s3://{BUCKET}/models/kv",
            endpoint=self.server.endpoint,
            region="us-east-1",
            options={"access_key_id": "test", "secret_access_key": "test"},
        )

    async def restart(self) -> bool:
        self.server.kill()
        self.server.start()
        return True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    server = MotoServer(tmp_path_factory.mktemp("moto"))
    try:
        server.start()
        asyncio.run(use_once(S3Medium(server)))
        yield server
    finally:
        server.kill()


async def use_once(medium: S3Medium) -> None:
    """Let the runtime of obstore open descriptors that it keeps until the process ends."""
    async with opened(medium, Blocks()) as store:
        await store.lookup(keys_of([0]))


@pytest.fixture
def medium(server: MotoServer) -> S3Medium:
    if not server.is_running:
        server.start()
    server.clear()
    return S3Medium(server)


@pytest.mark.loop("uvloop")  # the server takes milliseconds per request
class TestConformance(StoreConformance):
    pass
