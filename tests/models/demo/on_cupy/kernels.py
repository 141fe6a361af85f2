"""CUDA kernels of the demo's transformer, written for equal bits rather than for speed.

A library picks its kernel by the shape of a batch; here every number comes from one thread, or one
tree of fixed shape, that looks at nothing but its own row. So a row's bits depend on its tokens up
to its position only, not on the other rows of its batch, and no padding is needed.
"""

from __future__ import annotations

from typing import Any, Final

from aiokv.errors import ConfigError

THREADS: Final = 128  # of a block that works on one row; the trees below are of this size
MAX_CONTEXT_TOKENS: Final = 8192  # its scores take 32 KiB of shared memory

SOURCE: Final = r"""
constexpr int kThreads = 128;

template <bool kMax>
__device__ float reduce(float value, float* scratch) {
    scratch[threadIdx.x] = value;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            const float other = scratch[threadIdx.x + half];
            scratch[threadIdx.x] = kMax ? fmaxf(scratch[threadIdx.x], other)
                                        : scratch[threadIdx.x] + other;
        }
        __syncthreads();
    }
    const float result = scratch[0];
    __syncthreads();
    return result;
}

// out[row, column] = x[row] . w[:, column] (+ bias[column]) (+ out[row, column] when adding)
extern "C" __global__ void product(const float* x, const float* w, const float* bias, float* out,
                                   int k, int n, bool add) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = blockIdx.y;
    if (column >= n) return;
    float sum = bias != nullptr ? bias[column] : 0.0f;
    for (int i = 0; i < k; ++i) sum = fmaf(x[row * k + i], w[(long long)i * n + column], sum);
    float* to = out + row * n + column;
    *to = add ? *to + sum : sum;
}

// A block a vector: out = x / sqrt(mean(x * x) + epsilon) * weight. In and out may be the same.
// Vector i begins at (i / per_row) * row_stride + first + (i % per_row) * size.
extern "C" __global__ void rms_norm(const float* x, const float* weight, float* out, int size,
                                    int per_row, int row_stride, int first, float epsilon) {
    __shared__ float scratch[kThreads];
    const long long begin = (long long)(blockIdx.x / per_row) * row_stride + first +
                            (long long)(blockIdx.x % per_row) * size;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < size; i += kThreads) {
        squares = fmaf(x[begin + i], x[begin + i], squares);
    }
    const float root = sqrtf(reduce<false>(squares, scratch) / size + epsilon);
    for (int i = threadIdx.x; i < size; i += kThreads) {
        out[begin + i] = x[begin + i] / root * weight[i];
    }
}

// A block a head of a row, queries first, then keys, in place: rotary embedding.
extern "C" __global__ void rotate(float* qkv, const float* cos, const float* sin,
                                  const int* positions, int row_stride, int head_dim) {
    const long long row = blockIdx.y;
    const int half = head_dim / 2;
    float* head = qkv + row * row_stride + (long long)blockIdx.x * head_dim;
    const long long table = (long long)positions[row] * half;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cos[table + i] - second * sin[table + i];
        head[i + half] = second * cos[table + i] + first * sin[table + i];
    }
}

// A block a row: its keys and values go to the place that its block table names.
extern "C" __global__ void store(const float* qkv, const long long* slots, float* keys,
                                 float* values, int row_stride, int heads_size, int kv_size) {
    const float* from = qkv + (long long)blockIdx.x * row_stride + heads_size;
    const long long to = slots[blockIdx.x] * kv_size;
    for (int i = threadIdx.x; i < kv_size; i += blockDim.x) {
        keys[to + i] = from[i];
        values[to + i] = from[kv_size + i];
    }
}

// A block a head of a row: causal attention over the paged cache.
extern "C" __global__ void attend(const float* qkv, const float* keys, const float* values,
                                  const int* tables, const int* positions, float* out,
                                  int row_stride, int table_stride, int block_tokens, int heads,
                                  int kv_heads, int head_dim, float scale) {
    extern __shared__ float scores[];
    __shared__ float scratch[kThreads];
    const int head = blockIdx.x, kv_head = head / (heads / kv_heads);
    const long long row = blockIdx.y;
    const int tokens = positions[row] + 1;
    const float* query = qkv + row * row_stride + (long long)head * head_dim;
    const int* table = tables + row * table_stride;
    const auto place = [&](int token) {
        const long long slot =
            (long long)table[token / block_tokens] * block_tokens + token % block_tokens;
        return (slot * kv_heads + kv_head) * head_dim;
    };
    float largest = __int_as_float(0xff800000);
    for (int token = threadIdx.x; token < tokens; token += kThreads) {
        const float* key = keys + place(token);
        float score = 0.0f;
        for (int i = 0; i < head_dim; ++i) score = fmaf(query[i], key[i], score);
        scores[token] = score * scale;
        largest = fmaxf(largest, scores[token]);
    }
    largest = reduce<true>(largest, scratch);
    float total = 0.0f;
    for (int token = threadIdx.x; token < tokens; token += kThreads) {
        scores[token] = expf(scores[token] - largest);
        total += scores[token];
    }
    total = reduce<false>(total, scratch);
    for (int i = threadIdx.x; i < head_dim; i += kThreads) {
        float mixed = 0.0f;
        for (int token = 0; token < tokens; ++token) {
            mixed = fmaf(scores[token], values[place(token) + i], mixed);
        }
        out[(row * heads + head) * head_dim + i] = mixed / total;
    }
}

// out = silu(gate) * up of [rows, 2 * ffn], gate and up side by side.
extern "C" __global__ void swiglu(const float* gate_up, float* out, int ffn) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = blockIdx.y;
    if (i >= ffn) return;
    const float gate = gate_up[row * 2 * ffn + i];
    out[row * ffn + i] = gate / (expf(-gate) + 1.0f) * gate_up[row * 2 * ffn + ffn + i];
}
"""


def import_cupy() -> Any:
    """Return CuPy, on a machine that has a GPU.

    Raises:
        ConfigError: it is not installed, or it sees no GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"the demo's transformer on a GPU needs CuPy: {error}",
            hint="pip install 'aiokv[cuda12]' or 'aiokv[cuda13]', or take --device cpu",
        ) from error
    try:
        cupy.cuda.Device().compute_capability  # noqa: B018 (queries the driver)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(f"no GPU: {error}", hint="take --device cpu") from error
    return cupy


class Kernels:
    """Return the kernels, compiled for this GPU; launches go to CuPy's current stream."""

    def __init__(self, cupy: Any) -> None:
        module = cupy.RawModule(code=SOURCE, options=("--std=c++17",))
        self.product = module.get_function("product")
        self.rms_norm = module.get_function("rms_norm")
        self.rotate = module.get_function("rotate")
        self.store = module.get_function("store")
        self.attend = module.get_function("attend")
        self.swiglu = module.get_function("swiglu")


def blocks_for(count: int) -> int:
    """Return the number of thread blocks for ``count`` threads."""
    return -(-count // THREADS)
