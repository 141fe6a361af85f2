"""A program with a rank in a thread, that forks or ends without closing it: run by a test."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np

from aiokv import CacheConfig, ClosedError, Regions
from aiokv.ranks import RankGroup
from aiokv.sync import RankThread, SyncEngine


def started(folder: str) -> RankThread:
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[np.zeros((8, 64), np.int8)])
    rank = RankThread(Path(folder) / "ranks", 0, regions)
    rank.start()
    return rank


def leave(folder: str) -> None:
    """End with a thread that waits for a transfer of a rank without a group."""
    rank = started(folder)
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        try:
            rank.layers([1]).wait(0)
        except ClosedError:
            print("the wait has ended", flush=True)

    threading.Thread(target=wait).start()
    begun.wait()
    print("main ends", flush=True)


def is_refused(call) -> bool:
    try:
        call()
    except ClosedError as error:
        return "parent process" in str(error)
    return False


def fork(folder: str) -> None:
    rank = started(folder)
    engine = SyncEngine(
        CacheConfig(block_tokens=4, device_blocks=8),
        ranks=RankGroup(1, path=Path(folder) / "ranks"),
    )
    engine.open()
    layers = rank.layers([1])
    pid = os.fork()
    if pid == 0:
        verbs = (
            rank.start,
            rank.wait_ready,
            lambda: rank.layers([1]),
            lambda: rank.is_done([1]),
            lambda: rank.wait_done([1]),
            lambda: rank.step(1),
            lambda: layers.wait(0),
            lambda: layers.is_done,
        )
        try:
            ok = all(is_refused(verb) for verb in verbs)
        except BaseException as error:
            print(repr(error), flush=True)
            ok = False
        rank.close()
        print("child", ok, flush=True)
        sys.exit(0 if ok else 1)
    _, status = os.waitpid(pid, 0)
    print("child status", os.waitstatus_to_exitcode(status), flush=True)
    print("parent", rank.is_ready, flush=True)
    engine.close()
    rank.close()


if __name__ == "__main__":
    {"leave": leave, "fork": fork}[sys.argv[1]](sys.argv[2])
