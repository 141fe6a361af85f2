"""PageStore on a Redis server that is killed."""

from __future__ import annotations

from tests.connectors.test_pages import HostPool, digests, opened, saved
from tests.stores.servers_redis import needs_server, running_server

pytestmark = needs_server


def test_killed_server_is_a_miss(tmp_path):
    with running_server(tmp_path / "redis") as server, opened(server.url) as pages:
        assert saved(pages, range(4)) == [True] * 4
        pool = HostPool()
        assert pages.load(digests(range(4)), pool.places(range(4))) == 4
        assert pool.has(range(4), range(4)) == [True] * 4
        server.kill()
        unchanged = HostPool()
        assert pages.lookup(digests(range(4))) == 0
        assert pages.load(digests(range(4)), unchanged.places(range(4))) == 0
        assert not any(part.any() for part in unchanged.parts)
        assert saved(pages, range(4, 8)) == [False] * 4
