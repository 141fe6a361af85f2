"""Requests of FastDeploy, read by the names of their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from aiokv import Item
from aiokv.base.logs import Log
from aiokv.base.types import as_tokens
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

log = Log(__name__)

_MEDIA: Final = (
    *("images", "videos", "audios"),
    *("image_features", "video_features", "audio_features"),
    *("image_feature_urls", "video_feature_urls", "audio_feature_urls"),
)


class Request(Protocol):
    """Fields of a request that the connector reads; FastDeploy's ``Request`` has them.

    Attributes:
        request_id: unique name of the request.
        prompt_token_ids: tokens of the prompt.
        output_token_ids: generated tokens so far; the KV of the last one is not computed yet.
        block_tables: device blocks that the scheduler has taken for the request.
        num_computed_tokens: positions that are computed when all batches have been computed that
            were scheduled so far.
    """

    request_id: str
    prompt_token_ids: Any
    output_token_ids: list[int]
    block_tables: list[int]
    num_computed_tokens: int


class UnknownRequest:
    """A request with a known id and unknown tokens, so its blocks are never shared.

    Args:
        request_id: as given by the scheduler.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.prompt_token_ids = (0,)
        self.output_token_ids: list[int] = []
        self.block_tables: list[int] = []
        self.num_computed_tokens = 0


def tokens_of(request: Request) -> NDArray[np.int32]:
    """Return the prompt and the tokens that were generated so far.

    Raises:
        UsageError: the prompt is empty, or not a flat sequence of int32.
    """
    prompt = as_tokens(request.prompt_token_ids)
    if not prompt.size:
        raise UsageError(f"request {request.request_id!r} has no prompt_token_ids")
    outputs = list(request.output_token_ids)  # another thread appends to it
    return np.concatenate((prompt, as_tokens(outputs))) if outputs else prompt


def prompt_length(request: Request) -> int:
    """Return the number of tokens of the prompt."""
    return len(request.prompt_token_ids)


def items_of(request: Request) -> Sequence[Item] | None:
    """Return the multimodal items of a request.

    Returns:
        Items in order of their positions. None when the request has images, video or audio without
        a hash per item: equal tokens may stand for different content, so no block of the request
        may be shared.

    Raises:
        UsageError: the multimodal inputs do not have FastDeploy's form.
    """
    inputs = getattr(request, "multimodal_inputs", None)
    if not inputs:
        return ()
    try:
        return _items(inputs)
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"request {request.request_id!r}: multimodal_inputs cannot be read: {error}"
        ) from error


def _items(inputs: Any) -> Sequence[Item] | None:
    positions, hashes = inputs.get("mm_positions"), inputs.get("mm_hashes")
    positions = () if positions is None else positions
    hashes = () if hashes is None else hashes
    if len(positions) != len(hashes):
        return None
    if not len(positions):
        return None if any(_is_given(inputs.get(name)) for name in _MEDIA) else ()
    items = [
        Item(_as_bytes(content_hash), int(position.offset), int(position.length))
        for position, content_hash in zip(positions, hashes, strict=True)
    ]
    return sorted(items, key=lambda item: item.offset)


def _is_given(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _as_bytes(content_hash: Any) -> bytes:
    if isinstance(content_hash, bytes):
        return content_hash
    return str(content_hash).encode()


def log_unshared(request: Request, error: BaseException) -> None:
    """Log why a request shares no blocks from now on."""
    log.warning("fastdeploy.request_not_shared", request_id=request.request_id, reason=str(error))
