"""aiokv.connectors.fastdeploy: aiokv behind FastDeploy's cache managers.

What changes in FastDeploy with its cache manager v1 (``ENABLE_V1_KVCACHE_MANAGER=1``) is the patch
``docs/guide/fastdeploy.patch``:

1. The resource manager makes ``self.cache_manager`` with ``CacheManager.for_workers``.
2. ``ResourceManagerV1.schedule()`` calls ``issue_pending_backup_to_batch_request`` at its end each
   time, not only when ``len(batch_request) > 0``.
3. The loop that calls ``schedule()`` sends a batch that has ``cache_evict_metadata`` to the workers
   even if it has no requests.
4. The model runner makes ``self.cache_controller`` with ``CacheController.for_worker``, before its
   attention backend.
5. ``ResourceManagerV1.add_request()`` calls ``begin_fetch(request)`` at its end.
6. The loop of the worker process calls ``cache_controller.submit_swap_tasks`` for a batch without
   requests, too. For a batch with requests, the model runner calls it.
7. On decode servers, ``ResourceManagerV1.schedule()`` ends what ``expired_requests`` returns.
8. With peers, the answer of a decode server has the ticket of ``begin_receive``, with which the
   prefill server calls ``begin_send``.
9. With peers, first tokens wait for ``finished_sends``, and then for ``has_received``.

FastDeploy's requests and its ``BatchRequest`` stay as they are, and so does ``wait_for_layer`` in
the attention layers.

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
