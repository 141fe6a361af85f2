"""RedisStore: blocks in Valkey or Redis, on a single server or on a cluster.

| module | part |
|---|---|
| ``store.py`` | ``RedisStore``: arguments, batches of keys, results |
| ``options.py`` | arguments and URL; the password stays in it |
| ``nodes.py`` | keys to the nodes that have them; redirections and fail-overs of a cluster |
| ``slots.py`` | the node that has a key |
| ``pool.py`` | connections per node, jobs on them in threads, cancellation |
| ``connection.py`` | one socket: requests and replies of RESP, values read into host blocks |
| ``commands.py`` | lookup, load, save and remove of the keys of one node, on one connection |
"""

from aiokv.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
