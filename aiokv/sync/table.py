"""Table of the verbs that threads may call.

Each row names the async verb, which has the parameters, the types and the docstring. Run
``make stubs`` after a change: ``verbs.pyi`` has the types of the methods that are made from it.
"""

from __future__ import annotations

from typing import Final

from aiokv.engine import CacheEngine
from aiokv.engine.lease import Lease
from aiokv.sync import on_loop
from aiokv.sync.computing import SyncComputing
from aiokv.sync.layers import SyncLayers
from aiokv.sync.making import Verb
from aiokv.sync.transfers import SyncReceiving, SyncSending
from aiokv.sync.weights import SyncWeightsUpdate

_PREEMPT: Final = """Give the device blocks back; ``allocate`` takes blocks again.

See ``Lease.preempt``; ``swap_out`` does the same with ``swap=True``."""
_SWAP_OUT: Final = """Move the whole block table to host memory and keep it there.

See ``Lease.preempt`` with ``swap=True``. The future ends with the copy."""

VERBS: Final = (
    # Prompts
    Verb(CacheEngine.match, "lease", run=on_loop.match),
    Verb(CacheEngine.would_hit),
    Verb(CacheEngine.retain),
    Verb(CacheEngine.demote),
    Verb(CacheEngine.forget),
    Verb(Lease.hit_blocks),
    Verb(Lease.pending_tokens),
    # Capacity
    Verb(Lease.allocate, "future", run=on_loop.allocate),
    Verb(Lease.try_allocate, refreshes=("cached_tokens",)),
    Verb(Lease.can_allocate),
    Verb(CacheEngine.allocatable_blocks),
    Verb(CacheEngine.extendable_blocks),
    Verb(CacheEngine.extend),
    Verb(Lease.preempt, fixed={"swap": False}, text=_PREEMPT),
    Verb(Lease.preempt, "future", name="swap_out", fixed={"swap": True}, text=_SWAP_OUT),
    Verb(Lease.expire_after),
    Verb(Lease.keep),
    Verb(Lease.fork, wraps=on_loop.forked),
    Verb(Lease.release, "return", run=on_loop.release),
    # External device blocks
    Verb(Lease.assign),
    Verb(Lease.commit_blocks),
    Verb(Lease.retire),
    Verb(Lease.transfer_ids),
    Verb(Lease.is_idle, "direct"),
    Verb(Lease.idle, "future", run=on_loop.idle),
    # Computed positions
    Verb(Lease.commit),
    Verb(Lease.append),
    Verb(Lease.truncate),
    Verb(Lease.snapshot),
    Verb(Lease.recompute_from, refreshes=("cached_tokens",)),
    Verb(Lease.state),
    Verb(Lease.num_tokens),
    Verb(Lease.usage),
    Verb(Lease.missed),
    # Other engines
    Verb(Lease.receive, "block", wraps=SyncReceiving),
    Verb(CacheEngine.send, "block", wraps=SyncSending),
    # Batches of the model
    Verb(CacheEngine.computing, "block", wraps=SyncComputing),
    Verb(CacheEngine.advance),
    Verb(CacheEngine.step),
    Verb(CacheEngine.note_prefill),
    Verb(CacheEngine.layers, wraps=SyncLayers),
    Verb(CacheEngine.block_tables),
    Verb(CacheEngine.lengths),
    Verb(Lease.block_table, "direct"),
    Verb(Lease.window_table, "direct"),
    # The engine
    Verb(CacheEngine.updating_weights, "block", wraps=SyncWeightsUpdate),
    Verb(CacheEngine.purge, "future"),
    Verb(CacheEngine.health),
)
