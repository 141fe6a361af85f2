"""aiokv.connectors.fastdeploy: aiokv behind FastDeploy's cache managers.

What changes in FastDeploy, with its cache manager v1 (``ENABLE_V1_KVCACHE_MANAGER=1``):

1. Where the resource manager makes ``self.cache_manager``::

       ranks = RankGroup(tensor_parallel_size, path=socket)
       self.cache_manager = aiokv.connectors.fastdeploy.CacheManager(config, ranks=ranks)

2. At the end of ``ResourceManagerV1.schedule()``: call ``issue_pending_backup_to_batch_request``
   each time, not only when ``len(batch_request) > 0``.
3. In the loop that calls ``schedule()``: send a batch that has ``cache_evict_metadata`` to the
   workers even if it has no requests.
4. Where the model runner makes ``self.cache_controller``::

       self.cache_controller = aiokv.connectors.fastdeploy.CacheController(
           fd_config, local_rank, device_id, path=socket, device="cuda", step_event=record_event
       )

5. At the end of ``ResourceManagerV1.add_request()``, with stores: call ``begin_fetch(request)``.
6. In the loop of the worker process: call ``cache_controller.submit_swap_tasks`` for a batch
   without requests, too. For a batch with requests, the model runner calls it.

``socket`` is the same path on both sides, in a directory of this user. ``record_event`` returns a
new event, recorded on the stream of the model. FastDeploy's requests and its ``BatchRequest`` stay
as they are, and so does ``wait_for_layer`` in the attention layers.

Without cache manager v1, :class:`PrefixCacheManager` replaces FastDeploy's class in 1. Changes 2 to
6 are the same: ``schedule()`` then has to call ``issue_pending_backup_to_batch_request``, too.
"""

from aiokv.connectors.fastdeploy.controller import CacheController
from aiokv.connectors.fastdeploy.layers import LayerDoneCounter, LayerSwapTimeoutError
from aiokv.connectors.fastdeploy.manager import CacheManager
from aiokv.connectors.fastdeploy.metadata import (
    BatchRequest,
    CacheLevel,
    CacheSwapMetadata,
    MatchResult,
)
from aiokv.connectors.fastdeploy.metrics import CacheMetrics
from aiokv.connectors.fastdeploy.prefix import PrefixCacheManager

__all__ = [
    "BatchRequest",
    "CacheController",
    "CacheLevel",
    "CacheManager",
    "CacheMetrics",
    "CacheSwapMetadata",
    "LayerDoneCounter",
    "LayerSwapTimeoutError",
    "MatchResult",
    "PrefixCacheManager",
]
