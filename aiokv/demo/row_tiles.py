"""Matrix products whose rows do not depend on their place in a batch.

BLAS picks a kernel by the shape of a product, and within a product by the place of a row, and
kernels add up in different orders. A cached token was computed in another batch than its recomputed
twin, so both must go through products of one shape that treats its rows alike: a batch is cut into
tiles of a few rows, and every product is ``[tile, k] @ [k, n]``.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.linalg import _umath_linalg

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.demo.weights import Array, Weights

# Tried in this order: with OpenBLAS on AVX2, 8 rows give equal results; 1 always works, at about
# half the speed.
CANDIDATES: Final = (8, 4, 2, 1)

# names in numpy's own OpenBLAS (2.x, 1.26) and in a system's OpenBLAS
_SET_BLAS_THREADS: Final = (
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


class RowTiles:
    """Cuts batches into tiles of ``tile`` rows; the caller pads them to :meth:`padded` rows."""

    def __init__(self, tile: int) -> None:
        self.tile = tile

    @classmethod
    def for_weights(cls, weights: Weights) -> RowTiles:
        """Return tiles of the largest size that numpy's BLAS allows. Limits BLAS to one thread."""
        _use_one_blas_thread()
        return cls(largest_alike_tile(weights, np.matmul, CANDIDATES))

    def padded(self, rows: int) -> int:
        return -(-rows // self.tile) * self.tile

    def matmul(self, x: Array, weight: Array) -> Array:
        """Return ``[rows, k] @ [k, n]`` by ``rows / tile`` equal products; rows is a multiple."""
        rows, k = x.shape
        stacked: Array = x.reshape(rows // self.tile, self.tile, k) @ weight
        return stacked.reshape(rows, weight.shape[1])


def largest_alike_tile(
    weights: Weights, product: Callable[[Array, Array], Array], candidates: Sequence[int]
) -> int:
    """Return the first tile in which ``product`` treats all rows alike, on this machine.

    Args:
        weights: weights of the model; the shapes of its matrices are tried.
        product: computes ``[tile, k] @ [k, n]``.
        candidates: tiles to try, in this order.
    """
    arrays = [weights.unembedding, *(array for layer in weights.layers for array in layer.values())]
    shapes = {array.shape[-2:] for array in arrays if array.ndim > 1}
    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal(shape, dtype=np.float32) for shape in sorted(shapes)]
    for tile in candidates:
        if all(_rows_are_alike(weight, tile, product, rng) for weight in drawn):
            return tile
    raise ArithmeticError("this BLAS gives different results for equal one-row products")


def _rows_are_alike(
    weight: Array, tile: int, product: Callable[[Array, Array], Array], rng: np.random.Generator
) -> bool:
    k = len(weight)
    row = rng.standard_normal(k, dtype=np.float32)
    results = []
    for place in range(tile):
        # Begin one element off, to find kernels that depend on the alignment.
        x = np.empty(tile * k + place % 2, dtype=np.float32)[place % 2 :].reshape(tile, k)
        x[:] = rng.standard_normal((tile, k), dtype=np.float32)
        x[place] = row
        results.append(product(x, weight)[place])
    return all(np.array_equal(results[0], result) for result in results)


def _use_one_blas_thread() -> None:
    """Keep an OpenBLAS on the calling thread, for the whole process.

    Products this small gain nothing from more threads, and OpenBLAS's threads spin while they wait
    for work: on two cores they starve the event loop for seconds.
    """
    numpy_blas = ctypes.CDLL(_umath_linalg.__file__)  # its symbols include those it links to
    for name in _SET_BLAS_THREADS:
        if hasattr(numpy_blas, name):
            getattr(numpy_blas, name)(ctypes.c_int(1))
            return
