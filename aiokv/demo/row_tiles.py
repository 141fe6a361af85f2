"""Matrix products whose rows do not depend on where in a batch they stand.

BLAS picks a kernel by the shape of a product, and within a product by the place of a row, and
kernels add up in different orders. A cached token was computed in another batch than its recomputed
twin, so both must go through products of one shape that treats its rows alike: a batch is cut into
tiles of a few rows, and every product is ``[tile, k] @ [k, n]``.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from numpy.linalg import _umath_linalg
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Array = NDArray[np.float32]

# Tried largest first: OpenBLAS keeps 8 rows alike on AVX2; 1 always holds, at about half the speed.
TILE_CANDIDATES = (8, 4, 2, 1)

# numpy's own OpenBLAS (2.x, 1.26), a system's OpenBLAS
_SET_BLAS_THREADS = (
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def use_one_blas_thread() -> None:
    """Keep BLAS on the calling thread, for the whole process, where it is an OpenBLAS.

    Products this small gain nothing from more threads, and OpenBLAS's spin while they wait for
    work: on two cores they starve the event loop (seconds of it).
    """
    numpy_blas = ctypes.CDLL(_umath_linalg.__file__)  # its symbols include those it links to
    for name in _SET_BLAS_THREADS:
        if hasattr(numpy_blas, name):
            getattr(numpy_blas, name)(ctypes.c_int(1))
            return


def largest_alike_tile(
    shapes: Iterable[tuple[int, int]],
    product: Callable[[Array, Array], Array],
    *,
    candidates: Sequence[int] = TILE_CANDIDATES,
    seed: int = 0,
) -> int:
    """The largest tile in which ``product`` treats all rows alike, on this machine.

    Args:
        shapes: ``(k, n)`` of the weights that will be used.
        product: ``[tile, k] @ [k, n]``.
        candidates: tiles to try, in this order.
    """
    rng = np.random.default_rng(seed)
    weights = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    for tile in candidates:
        if all(_rows_are_alike(weight, tile, product, rng) for weight in weights):
            return tile
    raise ArithmeticError("this BLAS gives different results for equal one-row products")


class RowTiles:
    """Cuts batches into tiles of ``tile`` rows; the caller pads them to :meth:`padded` rows."""

    def __init__(self, tile: int) -> None:
        self.tile = tile

    @classmethod
    def for_shapes(cls, shapes: Iterable[tuple[int, int]]) -> RowTiles:
        """With the largest tile that numpy's BLAS allows; ``shapes`` are those of the weights."""
        return cls(largest_alike_tile(shapes, np.matmul))

    def padded(self, rows: int) -> int:
        return -(-rows // self.tile) * self.tile

    def matmul(self, x: Array, weight: Array) -> Array:
        """``[rows, k] @ [k, n]`` as ``rows / tile`` equal products; rows is a multiple."""
        rows, k = x.shape
        stacked = x.reshape(rows // self.tile, self.tile, k) @ weight
        return stacked.reshape(rows, weight.shape[1])


def _rows_are_alike(
    weight: Array, tile: int, product: Callable[[Array, Array], Array], rng: np.random.Generator
) -> bool:
    k, n = weight.shape
    row = rng.standard_normal(k, dtype=np.float32)
    expected: Array | None = None
    for place in range(tile):
        # one float off, so that a kernel that looks at alignment is found out
        x = np.empty(tile * k + place % 2, dtype=np.float32)[place % 2 :].reshape(tile, k)
        x[:] = rng.standard_normal((tile, k), dtype=np.float32)
        x[place] = row
        found = product(x, weight)[place]
        if expected is None:
            expected = found
        elif not np.array_equal(expected, found):
            return False
    return expected is not None and expected.shape == (n,)
