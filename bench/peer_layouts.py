"""Speed of cutting fragments out of host blocks, and of placing them, on one core.

The blocks are those of 32 layers of keys and values, 8 heads of 128 bfloat16 elements. Each case
names the sender and the receiver: tokens per block, order of axes (``thd`` is [tokens, heads, dim],
``htd`` is [heads, tokens, dim], ``hdt`` is [heads, dim, tokens], where no two elements stay
together), ranks. ``memcpy`` is one copy per block of the same bytes; a ratio
of 1 is its speed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.layout.mapping import BlockLayout, BlockMapping
from aiokv.layout.regions import Regions

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, HEADS, DIM = 32, 8, 128
AXES = {
    "thd": ("tokens", "heads", "dim"),
    "htd": ("heads", "tokens", "dim"),
    "hdt": ("heads", "dim", "tokens"),
}

# (block_tokens, axes, ranks) of the sender and of the receiver
CASES = (
    ((16, "thd", 1), (16, "thd", 1)),
    ((16, "thd", 1), (64, "thd", 1)),
    ((64, "thd", 1), (16, "thd", 1)),
    ((16, "htd", 1), (64, "htd", 1)),
    ((64, "htd", 1), (16, "htd", 1)),
    ((16, "thd", 1), (16, "htd", 1)),
    ((64, "htd", 1), (64, "thd", 1)),
    ((16, "thd", 1), (16, "thd", 2)),
    ((16, "thd", 2), (16, "thd", 1)),
    ((16, "htd", 1), (16, "htd", 2)),
    ((64, "htd", 2), (64, "htd", 1)),
    ((64, "thd", 2), (16, "htd", 4)),
    ((16, "thd", 1), (16, "hdt", 1)),
)


def run(quick: bool) -> dict[str, Any]:
    arena_bytes = (64 if quick else 256) << 20
    return {
        f"{_name(*ours)}_to_{_name(*theirs)}": _case(ours, theirs, arena_bytes)
        for ours, theirs in CASES
    }


def _name(block_tokens: int, order: str, ranks: int) -> str:
    return f"{block_tokens}{order}{'' if ranks == 1 else f'_tp{ranks}'}"


def _layout(block_tokens: int, order: str, ranks: int) -> BlockLayout:
    lengths = {"tokens": block_tokens, "heads": HEADS // ranks, "dim": DIM}
    shape = [lengths[axis] for axis in AXES[order]]
    layer = np.zeros((1, *shape), np.uint16)
    regions = Regions(num_layers=LAYERS)
    for name in ("k", "v"):
        regions.add(name, layers=[layer] * LAYERS, dtypes=["bfloat16"] * LAYERS, axes=AXES[order])
    return BlockLayout.of(regions, block_tokens, 0, ranks)


def _case(
    ours: tuple[int, str, int], theirs: tuple[int, str, int], arena_bytes: int
) -> dict[str, float]:
    mapping = BlockMapping(_layout(*ours), _layout(*theirs))
    block_bytes = mapping.sender.pool().block_bytes
    num_blocks = arena_bytes // block_bytes // 4 * 4  # whole blocks of the receiver
    num_kept = num_blocks * ours[0] // theirs[0]
    blocks, fragments = _rows(num_blocks, block_bytes), _rows(num_blocks, mapping.fragment_bytes)
    kept = _rows(num_kept, mapping.receiver.pool().block_bytes)
    sources, targets = _addresses(blocks), _addresses(fragments)
    by_index = dict(enumerate(_addresses(kept)))
    indices = range(num_blocks)
    moved = fragments.nbytes / 1e9
    cut = moved / _best_seconds(lambda: mapping.cut(sources, targets))
    place = moved / _best_seconds(lambda: mapping.place(targets, indices, by_index))
    same_size = _rows(num_blocks, mapping.fragment_bytes)

    def memcpy() -> None:
        for i in indices:
            np.copyto(same_size[i], fragments[i])

    plain = moved / _best_seconds(memcpy)
    return {
        "memcpy_gbps": plain,
        "cut_gbps": cut,
        "place_gbps": place,
        "cut_ratio": cut / plain,
        "place_ratio": place / plain,
    }


def _rows(count: int, size_bytes: int) -> np.ndarray:
    """Return memory that has been written, at whole cache lines, as slots of an arena are."""
    memory = np.ones(count * size_bytes + 64, np.uint8)
    begin = -int(memory.ctypes.data) % 64
    return memory[begin : begin + count * size_bytes].reshape(count, size_bytes)


def _addresses(rows: np.ndarray) -> list[int]:
    first, size_bytes = int(rows.ctypes.data), rows.shape[1]
    return [first + i * size_bytes for i in range(len(rows))]


def _best_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best
