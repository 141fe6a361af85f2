"""Operations of the Paddle model's layers: products in tiles, norms, rotary embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aiokv.demo.row_tiles import largest_alike_tile
from aiokv.frameworks.paddle import import_paddle

if TYPE_CHECKING:
    from aiokv.demo.weights import Array, Weights

paddle = import_paddle()

# Elementwise kernels treat a partial vector register differently: rows are padded to this.
PADDING_ROWS: Final = 16
TILE_CANDIDATES: Final = (16, 8, 4, 2, 1)


def compute_on_one_cpu_thread() -> None:
    """For the whole process: products this small gain nothing from more, and the event loop wants
    the other cores."""
    paddle.set_device("cpu")
    paddle.base.core.set_num_threads(1)


class Products:
    """Products of rows with weights; a row's result does not depend on other rows."""

    def __init__(self, weights: Weights) -> None:
        """Find the largest tile that treats all rows of products with ``weights`` alike."""
        self.tile = largest_alike_tile(weights, _product, TILE_CANDIDATES)

    def matmul(self, x: Any, weight: Any) -> Any:
        """``[rows, k] @ [k, n]`` as products of one shape; rows is a multiple of PADDING_ROWS."""
        starts = range(0, x.shape[0], self.tile)
        return paddle.concat([product(x[row : row + self.tile], weight) for row in starts])

    def matmul_heads(self, x: Any, weights: Any) -> Any:
        """``[rows, heads, k]`` and ``[heads, k, n]`` as ``[rows, heads, n]``, head by head."""
        heads = [self.matmul(x[:, head], weights[head]) for head in range(weights.shape[0])]
        return paddle.stack(heads, axis=1)


def product(left: Any, right: Any) -> Any:
    """A matrix product whose left side is copied to where Paddle's allocator aligns it.

    A slice begins anywhere, and a BLAS may choose its kernel by the alignment of its operands.
    """
    return paddle.matmul(left.clone(), right)


def padded_rows(rows: int) -> int:
    return -(-rows // PADDING_ROWS) * PADDING_ROWS


def pad(x: Any) -> Any:
    """Append rows of zeros to ``x``."""
    rows, *shape = x.shape
    return paddle.concat([x, paddle.zeros([padded_rows(rows) - rows, *shape])])


def rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    mean_square = (x * x).mean(-1, keepdim=True)
    return x / paddle.sqrt(mean_square + epsilon) * weight


def masked_softmax(scores: Any, hidden: Any) -> Any:
    """Softmax over the last axis in which hidden numbers have a weight of exactly 0.

    Paddle's softmax on the cpu clips its input at 64 below the maximum, so that a masked score of
    minus infinity gets the weight exp(-64) / sum. Times the value at a hidden position, which may
    be any bytes, that is enough to break a tie when a product is rounded.

    Args:
        scores: float32, its last axis a multiple of CONTEXT_STEP_TOKENS.
        hidden: bool, broadcast to the scores.
    """
    weights = paddle.nn.functional.softmax(scores.masked_fill(hidden, float("-inf")), axis=-1)
    return weights.masked_fill(hidden, 0.0)


def rotate(heads: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding of ``[rows, heads, rotary_dim]`` by tables ``[rows, 1, rotary_dim / 2]``."""
    first, second = paddle.chunk(heads, 2, axis=-1)
    return paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _product(x: Array, weight: Array) -> Array:
    found: Array = paddle.matmul(paddle.to_tensor(x), paddle.to_tensor(weight)).numpy()
    return found
