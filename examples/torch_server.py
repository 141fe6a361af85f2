"""A server of a torch model in one file: paged KV, continuous batching, a cache with host memory.

Eight clients ask a small transformer about the same document. Its KV is computed once. The answers
are compared with those of the model without a cache. On a GPU, replace ``host_wait`` by
``gpu_wait`` and pass ``engine.step`` an event: see the README.

Install: pip install . torch
Run:     python examples/torch_server.py
Output:
    8 answers of 24 tokens, all equal to those without a cache
    prompt tokens: 3216, of these from the cache: 2800
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F

import aiokv

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

VOCABULARY, HIDDEN, LAYERS, HEADS, HEAD_DIM = 256, 64, 3, 4, 16
MAX_TOKENS, BLOCK_TOKENS, DEVICE_BLOCKS = 1024, 16, 96


class Row(NamedTuple):
    """Positions of a request to compute: from ``first`` to the end of ``tokens``."""

    tokens: list[int]
    first: int
    block_table: NDArray[np.int32]


class Model:
    """A decoder with random weights. Its KV is in ``kv``, one tensor per layer, by block id."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) / rows**0.5

        self.embedding = matrix(VOCABULARY, HIDDEN) * VOCABULARY**0.5
        self.positions = matrix(MAX_TOKENS, HIDDEN) * MAX_TOKENS**0.5
        self.qkv = [matrix(HIDDEN, 3 * HIDDEN) for _ in range(LAYERS)]
        self.out = [matrix(HIDDEN, HIDDEN) * 2 for _ in range(LAYERS)]
        self.up = [matrix(HIDDEN, 4 * HIDDEN) for _ in range(LAYERS)]
        self.down = [matrix(4 * HIDDEN, HIDDEN) for _ in range(LAYERS)]
        shape = (DEVICE_BLOCKS, BLOCK_TOKENS, 2, HEADS, HEAD_DIM)
        self.kv = [torch.zeros(shape) for _ in range(LAYERS)]

    def step(self, rows: Sequence[Row], layers: aiokv.LayerView | None) -> list[int]:
        """Compute the rows, in a thread; return the next token of each."""
        counts = [len(row.tokens) - row.first for row in rows]
        x = self.embedding[[token for row in rows for token in row.tokens[row.first :]]]
        x = x + self.positions[[p for row in rows for p in range(row.first, len(row.tokens))]]
        for index in range(LAYERS):
            if layers is not None:
                layers.host_wait(index)  # until the cached blocks of this layer have arrived
            qkv = (_norm(x) @ self.qkv[index]).view(-1, 3, HEADS, HEAD_DIM).split(counts)
            mixed = [self._attend(index, *pair) for pair in zip(rows, qkv, strict=True)]
            x = x + torch.cat(mixed) @ self.out[index]
            x = x + F.gelu(_norm(x) @ self.up[index]) @ self.down[index]
        last = torch.tensor(counts).cumsum(0) - 1
        tokens: list[int] = (_norm(x[last]) @ self.embedding.T).argmax(-1).tolist()
        return tokens

    def _attend(self, index: int, row: Row, qkv: torch.Tensor) -> torch.Tensor:
        """Write the KV of a row into its blocks; return the attention to all its blocks."""
        kv, table = self.kv[index], torch.tensor(row.block_table)
        stop = len(row.tokens)
        positions = torch.arange(row.first, stop)
        kv[table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS] = qkv[:, 1:]
        keys, values = kv[table].flatten(0, 1)[:stop].permute(1, 2, 0, 3)  # [heads, stop, dim]
        mask = torch.arange(stop) <= positions[:, None]
        queries = qkv[:, 0].transpose(0, 1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return mixed.transpose(0, 1).flatten(1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (HIDDEN,))


@dataclass(eq=False)
class Request:
    """A request whose lease has blocks. They hold the KV of the first ``computed`` positions."""

    lease: aiokv.Lease
    tokens: list[int]  # the prompt, then the answer
    stop: int
    computed: int
    done: asyncio.Future[None] = field(default_factory=asyncio.Future)


class Server:
    """Computes all requests together, one step after the other."""

    def __init__(self, engine: aiokv.CacheEngine, model: Model) -> None:
        self.engine, self.model = engine, model
        self.running: list[Request] = []
        self.arrived = asyncio.Event()

    async def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Return the answer. Cancel the task when its client leaves: that frees the blocks."""
        stop = len(prompt) + max_tokens
        async with self.engine.match(prompt) as lease:
            # Blocks for the answer, too, so that no step lacks one. While another request computes
            # the same blocks, this one waits for them.
            await lease.allocate(stop, wait_pending=30.0)
            request = Request(lease, list(prompt), stop, lease.cached_tokens)
            self.running.append(request)
            self.arrived.set()
            try:
                await request.done
            finally:
                self.end(request)
        return request.tokens[len(prompt) :]

    def end(self, request: Request, error: Exception | None = None) -> None:
        """Compute a request no more, and wake its client if that has not left."""
        if request in self.running:
            self.running.remove(request)
        if request.done.done():
            return
        if error is None:
            request.done.set_result(None)
        else:
            request.done.set_exception(error)

    async def run(self) -> None:
        """Compute steps until the task is cancelled."""
        while True:
            if not self.running:
                self.arrived.clear()
                await self.arrived.wait()
            batch = list(self.running)
            try:
                await self.step(batch)
            except Exception as error:  # of the model, or of a copy: fails these requests only
                for request in batch:
                    self.end(request, RuntimeError(f"the step failed: {error!r}"))
            finally:
                self.engine.step()  # copies to host memory start now

    async def step(self, batch: list[Request]) -> None:
        leases = self.engine.batch([request.lease for request in batch])
        rows = [Row(r.tokens, r.computed, r.lease.block_table) for r in batch]
        with self.engine.computing(leases) as step:  # a client that leaves frees no block here
            tokens = await step.run(self.model.step, rows, self.engine.layers(leases))
        self.engine.advance(step, tokens)  # full blocks can be shared from now on
        for request, token in zip(batch, tokens, strict=True):
            request.computed = len(request.tokens)
            request.tokens.append(token)
            if len(request.tokens) == request.stop:
                self.end(request)


def answer_without_cache(model: Model, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the answer of the model alone, which computes all positions for each token."""
    tokens, table = list(prompt), torch.arange(DEVICE_BLOCKS, dtype=torch.int32).numpy()
    for _ in range(max_tokens):
        tokens += model.step([Row(tokens, 0, table)], None)
    return tokens[len(prompt) :]


async def main() -> None:
    model = Model()
    regions = aiokv.Regions(num_layers=LAYERS)
    regions.add("kv", layers=model.kv)
    config = aiokv.CacheConfig(
        block_tokens=BLOCK_TOKENS, device_blocks=DEVICE_BLOCKS, host_blocks=4 * DEVICE_BLOCKS
    )
    document = torch.randint(VOCABULARY, (400,), generator=torch.Generator().manual_seed(1))
    prompts = [[*document.tolist(), client, 7] for client in range(8)]
    async with aiokv.CacheEngine(config, regions, device="cpu") as engine:
        server = Server(engine, model)
        steps = asyncio.create_task(server.run())
        answers = await asyncio.gather(*(server.generate(prompt, 24) for prompt in prompts))
        steps.cancel()
        found = engine.statistics()
    assert answers == [answer_without_cache(Model(), prompt, 24) for prompt in prompts]
    print(len(answers), "answers of 24 tokens, all equal to those without a cache")
    hits = found.hit_device_tokens + found.hit_host_tokens
    print(f"prompt tokens: {sum(map(len, prompts))}, of these from the cache: {hits}")


if __name__ == "__main__":
    asyncio.run(main())
