"""Cached requests: a request of vLLM, as the scheduler half of the connector follows it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Self

from aiokv.base import checks
from aiokv.base.logs import Log
from aiokv.base.types import Item
from aiokv.connectors.vllm.groups import BlockTables
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from aiokv.sync import SyncLayers, SyncLease
    from aiokv.sync.futures import EngineFuture

log = Log(__name__)

PARAMETERS: Final = "aiokv"  # key of the parameters of a request for this connector


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Wishes of one request: ``kv_transfer_params["aiokv"]``, or else an action of vLLM's KV hints.

    Attributes:
        read: False to load nothing.
        write: False to save nothing.
        max_load_tokens: most tokens to load; None for no limit.
        load_priority: of the loads that wait for their turn, those with lower numbers are copied
            first; at least 0.
        returns: label of the request; see ``SyncLease.release``.
    """

    read: bool = True
    write: bool = True
    max_load_tokens: int | None = None
    load_priority: int = 0
    returns: str = ""

    @classmethod
    def parse(cls, values: object) -> Self:
        """Return the wishes of a request.

        Raises:
            UsageError: names the key, its value and the limit.
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or not values.keys() <= set(known):
            raise UsageError(
                f"kv_transfer_params[{PARAMETERS!r}] is {checks.shown(values)}; it must be an "
                f"object with keys of {', '.join(known)}"
            )
        parameters = cls(**values)
        checks.flag("read", parameters.read)
        checks.flag("write", parameters.write)
        for name in ("max_load_tokens", "load_priority"):
            if (value := getattr(parameters, name)) is not None or name == "load_priority":
                checks.integer(name, value, minimum=0)
        checks.label("returns", parameters.returns)
        return parameters

    @classmethod
    def of(cls, request: Request) -> Parameters:
        """Return the wishes of a request of vLLM; neither read nor write if they are wrong.

        A connector cannot refuse a request: an exception would end the server.
        """
        values = (request.kv_transfer_params or {}).get(PARAMETERS, _hinted(request))
        if values is None:
            return NO_WISHES
        try:
            return cls.parse(values)
        except UsageError as error:
            log.warning("vllm.wrong_parameters", request=request.request_id, error=str(error))
            return cls(read=False, write=False)


NO_WISHES: Final = Parameters()


def _hinted(request: Request) -> object:
    """Return the payload of the ``aiokv`` action in vLLM's KV hints, from vLLM 0.32 on; or None."""
    hints = getattr(request, "kv_hints", None)
    actions = () if hints is None else hints.actions
    return next((each.payload for each in actions if each.action_type == PARAMETERS), None)


@dataclass(slots=True)
class Onload:
    """Positions of a request that host memory has.

    Attributes:
        first: first position, which follows vLLM's own hit.
        end: position behind the last one.
        in_step: with ``"layerwise"``, True if the first step of the request waits for the blocks,
            and its workers report no end of the load.
        after_step: last step that was sent to the workers before vLLM has given the blocks.
        started: True after the transfers have begun.
        layers: the transfers; None before they have begun, and if they could not.
        is_told: True after vLLM was told that the load has ended, or ends with the next step.
    """

    first: int
    end: int
    in_step: bool
    after_step: int = 0
    started: bool = False
    layers: SyncLayers | None = None
    is_told: bool = False


@dataclass(slots=True, eq=False)
class CachedRequest:
    """A request from its match until it finishes or is preempted.

    Attributes:
        request: vLLM's request.
        request_id: its id.
        local: positions that vLLM's own cache had at the last match.
        preemptions: the request's count at the match.
        parameters: the wishes of the request.
        uses_cache: False if the request is computed without the cache.
        matched_at: time of the match.
        asked_after: the last step that was built before vLLM last asked for the request.
        lease: the lease; None without the cache, and after a failure or a reset.
        known_tokens: tokens that the lease knows.
        granting: the wait for blocks of the stores; None when the lease is granted.
        loads_in_step: True if, as of the last match, the step that vLLM schedules then should
            compute the request, and wait for the load.
        onload: the load that the request waits for or has waited for.
        missing_blocks: while the request holds loaded blocks, those that its prompt needs further.
        tables: vLLM's blocks of the request.
        kept_tokens: vLLM has the blocks that computing behind this many positions needs; it may
            have freed others, of windows and states.
        saving: blocks of windows and states that the last commit saves.
        assigned: leading blocks of the table that the lease knows.
        committed: leading blocks of the table that were committed.
        computed: leading positions whose steps have ended.
        due: a step has to be recorded if it ends at this position or behind; 0 in prefill.
        due_step: first step that may do so; 0 for none.
        ended: True after the request has finished, or was preempted.
    """

    request: Request
    request_id: str
    local: int
    preemptions: int
    parameters: Parameters
    uses_cache: bool = False
    matched_at: float = 0.0
    asked_after: int = 0
    lease: SyncLease | None = None
    known_tokens: int = 0
    granting: EngineFuture[Any] | None = None
    loads_in_step: bool = False
    onload: Onload | None = None
    missing_blocks: int = 0
    tables: BlockTables = field(default_factory=BlockTables)
    kept_tokens: int = 0
    saving: list[int] = field(default_factory=list)
    assigned: int = 0
    committed: int = 0
    computed: int = 0
    due: int = 0
    due_step: int = 0
    ended: bool = False

    @property
    def table(self) -> list[int]:
        """vLLM's blocks of the request in the main group."""
        return self.tables.main

    @property
    def was_preempted(self) -> bool:
        """True if vLLM has taken the blocks of the request since the match."""
        return bool(self.request.num_preemptions != self.preemptions)

    @property
    def queued_tokens(self) -> int:
        """Number of tokens that the next steps have to compute; 0 before it has blocks."""
        if not self.table:
            return 0
        if self.due:
            return 1
        loaded = 0 if self.onload is None else self.onload.end
        return int(max(self.request.num_tokens - max(self.computed, self.local, loaded), 0))


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
