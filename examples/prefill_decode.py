"""Prefill in one process and decode in another one: blocks arrive while the prompt is computed.

The decode server allocates blocks and sends the prompt with a ticket to the prefill server, here as
a line on a pipe. That server computes the prompt in chunks, and sends the blocks of each over TCP.
If it fails, the decode server computes what is missing.

Install: pip install .
Run:     python examples/prefill_decode.py
Output:
    2000 prompt tokens, 1999 of them computed by the other process
    answer: [68, 204, 20, 140, 260, 860, 180, 700]
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from asyncio.subprocess import PIPE
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

import aiokv

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYERS, BLOCK_TOKENS, DEVICE_BLOCKS, CHUNK_TOKENS = 2, 16, 256, 256


class Server:
    """An engine and a stand-in for a model, whose tokens depend on the KV of all positions."""

    def __init__(self, secret: str, listen: str | None) -> None:
        self.kv = [np.zeros((DEVICE_BLOCKS, BLOCK_TOKENS), np.int64) for _ in range(LAYERS)]
        regions = aiokv.Regions(num_layers=LAYERS)
        regions.add("kv", layers=self.kv)
        config = aiokv.CacheConfig(
            block_tokens=BLOCK_TOKENS, device_blocks=DEVICE_BLOCKS, model="stand-in@1"
        )
        peers = aiokv.Peers(secret=bytes.fromhex(secret), listen=listen)
        self.engine = aiokv.CacheEngine(config, regions, peers=peers)

    def model(self, tokens: list[int], first: int, table: NDArray[np.int32]) -> int:
        """Compute the positions from ``first`` on; return the next token."""
        positions = np.arange(first, len(tokens))
        total = 0
        for kv in self.kv:
            kv[table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS] = tokens[first:]
            total += int(kv[table].ravel()[: len(tokens)] @ np.arange(1, len(tokens) + 1))
        return total % 1000

    async def compute(self, lease: aiokv.Lease, tokens: list[int], first: int) -> int:
        with self.engine.computing([lease]) as step:
            token = await step.run(partial(self.model, tokens, first, lease.block_table))
        lease.commit(len(tokens))  # sends the blocks, while this lease has a ticket
        self.engine.step()
        return token

    async def prefill(self, tokens: list[int], ticket: bytes) -> None:
        """Compute a prompt, and send its blocks to the server that has made the ticket."""
        async with self.engine.match(tokens) as lease:
            await lease.allocate(len(tokens))
            async with self.engine.send(lease, ticket):
                for first in range(lease.cached_tokens, len(tokens), CHUNK_TOKENS):
                    await self.compute(lease, tokens[: first + CHUNK_TOKENS], first)

    async def generate(
        self, prompt: list[int], max_tokens: int, prefiller: asyncio.StreamWriter | None = None
    ) -> list[int]:
        """Return the answer to a prompt, which ``prefiller`` computes but for its last position."""
        tokens = list(prompt)
        async with self.engine.match(prompt) as lease:
            await lease.allocate(len(prompt) + max_tokens)
            first = lease.cached_tokens
            if prefiller is not None:
                async with lease.receive(len(prompt) - 1, timeout=10.0) as receiving:
                    request = {"tokens": tokens, "ticket": receiving.ticket.hex()}
                    prefiller.write(json.dumps(request).encode() + b"\n")
                    first = await receiving.wait()  # less after a failure; never an error
                print(f"{len(prompt)} prompt tokens, {first} of them computed by the other process")
            for _ in range(max_tokens):
                token = await self.compute(lease, tokens, first)
                first = len(tokens)
                tokens.append(token)
                lease.append([token])
        return tokens[len(prompt) :]


async def prefill_server() -> None:
    """Serve the requests on standard input until it ends."""
    server = Server(os.environ["PEERS_SECRET"], listen=None)  # only sends: it opens no port
    async with server.engine, asyncio.TaskGroup() as requests:
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            ticket = bytes.fromhex(request["ticket"])
            requests.create_task(server.prefill(request["tokens"], ticket))


async def decode_server() -> None:
    prompt = np.random.default_rng(1).integers(1000, size=2000).tolist()
    secret = secrets.token_hex(32)  # the same on all servers
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "prefill", stdin=PIPE, env=os.environ | {"PEERS_SECRET": secret}
    )
    assert child.stdin is not None
    server = Server(secret, listen="127.0.0.1")
    async with server.engine:
        answer = await server.generate(prompt, 8, child.stdin)
    child.stdin.close()
    await child.wait()
    alone = Server(secret, listen=None)
    async with alone.engine:
        assert answer == await alone.generate(prompt, 8)
    print("answer:", answer)


if __name__ == "__main__":
    asyncio.run(prefill_server() if sys.argv[1:] == ["prefill"] else decode_server())
