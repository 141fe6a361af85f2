"""A worker process of the tests: synchronous code, which does what the lines of its input say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from aiokv import Regions
from aiokv.sync import RankThread
from aiokv.testing.loops import PATIENCE_SECONDS

LAYERS = 2


def main(folder: str, number: int) -> None:
    kv = [np.zeros((8, 64), np.int8) for _ in range(LAYERS)]
    regions = Regions(num_layers=LAYERS)
    regions.add("kv", layers=kv)
    rank = RankThread(Path(folder) / "ranks", number, regions, connect_timeout=PATIENCE_SECONDS)

    def answer(*words: str) -> object:
        match words:
            case ["start"]:
                rank.start()
                return "started"
            case ["compute", blocks]:
                for layer, tensor in enumerate(kv):
                    for position, block in enumerate(map(int, blocks.split(","))):
                        tensor[block] = 50 * number + 10 * layer + position
                return "computed"
            case ["step", step]:
                rank.step(int(step))
                return "closed"
            case ["saved", transfer_id]:
                rank.wait_done([int(transfer_id)], 60.0)
                return rank.is_done([int(transfer_id)])
            case ["clear"]:
                for tensor in kv:
                    tensor[:] = 99
                return "cleared"
            case ["load", transfer_id, blocks]:
                layers = rank.layers([int(transfer_id)])
                good = []
                for layer, tensor in enumerate(kv):
                    layers.wait(layer, 60.0)
                    for position, block in enumerate(map(int, blocks.split(","))):
                        good.append((tensor[block] == 50 * number + 10 * layer + position).all())
                layers.raise_for_error()
                return all(good)
        rank.close()
        return "ended"

    for line in sys.stdin:
        print(answer(*line.split()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
