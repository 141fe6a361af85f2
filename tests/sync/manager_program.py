"""A program, run by a test: an engine with one rank that it does not start."""

from __future__ import annotations

import sys
from pathlib import Path

from aiokv import CacheConfig
from aiokv.ranks import RankGroup
from aiokv.sync import SyncEngine, SyncLease
from tests.sync.served_ranks import BLOCKS, PROMPT, TOKENS


def main(folder: str) -> None:
    engine = SyncEngine(
        CacheConfig(block_tokens=TOKENS, device_blocks=BLOCKS, host_blocks=BLOCKS),
        ranks=RankGroup(1, path=Path(folder) / "ranks"),
    )
    held: list[SyncLease] = []

    def answer(word: str) -> object:
        if word == "open":
            engine.open()
            return "open"
        if word == "compute":
            with engine.match(PROMPT) as lease:
                lease.allocate(len(PROMPT)).result()
                lease.commit(len(PROMPT))
            return f"step {engine.step()}"
        if word == "evict":
            engine.call(engine.cache.drain)
            engine.call(engine.cache.evict, BLOCKS)
            return "evicted"
        lease = engine.match(PROMPT)
        lease.allocate(len(PROMPT)).result()
        held.append(lease)
        (transfer_id,) = lease.layers.transfer_ids
        return transfer_id

    for line in sys.stdin:
        print(answer(line.strip()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
