"""Cached requests: a request of vLLM, as the scheduler half of the connector follows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.base.types import Item
from aiokv.connectors.vllm.groups import BlockTables

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from aiokv.sync import SyncLease
    from aiokv.sync.futures import EngineFuture


@dataclass(slots=True)
class Onload:
    """Positions of a request that host memory has.

    Attributes:
        first: first position, which follows vLLM's own hit.
        end: position behind the last one.
        in_step: True if the first step of the request waits for the blocks layer by layer.
        after_step: last step that was sent to the workers before vLLM has given the blocks.
        started: True after the transfers have begun.
    """

    first: int
    end: int
    in_step: bool
    after_step: int = 0
    started: bool = False


@dataclass(slots=True, eq=False)
class CachedRequest:
    """A request from its match until it finishes or is preempted.

    Attributes:
        request: vLLM's request.
        local: positions that vLLM's own cache had at the last match.
        preemptions: the request's count at the match.
        lease: the lease; None if the request is computed without the cache.
        known_tokens: tokens that the lease knows.
        granting: the wait for blocks of the stores; None when the lease is granted.
        loads_in_step: True if, as of the last match, the first step should wait for the load.
        onload: the load that the request waits for or has waited for.
        tables: vLLM's blocks of the request.
        kept_tokens: vLLM has the blocks that computing behind this many positions needs; it may
            have freed others, of windows and states.
        saving: blocks of windows and states that the last commit saves.
        assigned: leading blocks of the table that the lease knows.
        committed: leading blocks of the table that were committed.
        computed: leading positions whose steps have ended.
        last_step: the last step that computes the request.
        ended: True after the request has finished, or was preempted.
    """

    request: Request
    local: int
    preemptions: int
    lease: SyncLease | None = None
    known_tokens: int = 0
    granting: EngineFuture[Any] | None = None
    loads_in_step: bool = False
    onload: Onload | None = None
    tables: BlockTables = field(default_factory=BlockTables)
    kept_tokens: int = 0
    saving: list[int] = field(default_factory=list)
    assigned: int = 0
    committed: int = 0
    computed: int = 0
    last_step: int = 0
    ended: bool = False

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    @property
    def table(self) -> list[int]:
        """vLLM's blocks of the request in the main group."""
        return self.tables.main

    @property
    def was_preempted(self) -> bool:
        """True if vLLM has taken the blocks of the request since the match."""
        return bool(self.request.num_preemptions != self.preemptions)


def prompt_of(request: Request) -> NDArray[np.int32]:
    """Return the prompt tokens of a request, and then its generated tokens."""
    return np.array(list(request.all_token_ids), dtype=np.int32)


def names_of(request: Request) -> dict[str, Any]:
    """Return the arguments of ``match`` that separate requests with equal tokens.

    The salt is that of the request. A LoRA adapter is named by its name and its path. An item of a
    prompt is named by the hash of its content, as in vLLM's own cache.
    """
    lora = request.lora_request
    return {
        "salt": request.cache_salt or "",
        "adapter": "" if lora is None else f"{lora.lora_name}\0{lora.lora_path}",
        "items": [
            Item(
                feature.identifier.encode(),
                feature.mm_position.offset,
                feature.mm_position.length,
            )
            for feature in request.mm_features
        ],
    }


def is_cacheable(request: Request) -> bool:
    """Return False for requests whose tokens do not name their content.

    Prompts of embeddings have no tokens, and a session of streamed input replaces tokens that were
    computed.
    """
    return not (
        request.prompt_embeds is not None
        or request.prompt_token_ids is None
        or request.resumable
        or not len(request.all_token_ids)
    )
