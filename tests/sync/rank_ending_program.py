"""A program with a rank in a thread, that forks or ends without closing it: run by a test."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np

from aiokv import CacheConfig, Regions
from aiokv.errors import ClosedError
from aiokv.sync import RankThread, SyncEngine
from aiokv.sync import thread as thread_module
from aiokv.testing.manual import ManualStream
from tests.sync.served_ranks import LONG, Device, Served


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
    device = Device()
    served = Served(Path(folder), [device])
    with served:
        rank = served.ranks[0]
        served.fill_host()
        lease = served.load()
        copy = device.taken.get(timeout=LONG)
        moving = rank.layers(lease.layers.transfer_ids)
        moving.gpu_wait(0, ManualStream())  # its plan has arrived
        absent = rank.layers([99])
        pid = os.fork()
        if pid == 0:
            verbs = (
                rank.start,
                rank.wait_ready,
                rank.raise_for_error,
                lambda: rank.layers([1]),
                lambda: rank.is_done([1]),
                lambda: rank.wait_done([1]),
                lambda: rank.step(1),
                rank.statistics,
                rank.store_statistics,
                rank.peer_statistics,
                lambda: absent.wait(0),
                lambda: absent.is_done,
                lambda: moving.wait(1),
                moving.wait_all,
                lambda: moving.gpu_wait(1, ManualStream()),
                lambda: moving.gpu_wait_all(ManualStream()),
                lambda: moving.is_done,
                moving.raise_for_error,
                moving.failures,
                lambda: lease.layers.wait(0),
                lambda: lease.layers.gpu_wait(0, ManualStream()),
                lambda: lease.layers.gpu_wait_all(ManualStream()),
            )
            try:
                refused = [is_refused(verb) for verb in verbs]
            except BaseException as error:
                print(repr(error), flush=True)
                refused = []
            rank.close()
            print("child", set(refused), rank.is_ready, repr(rank.failure)[:11], flush=True)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print("child status", os.waitstatus_to_exitcode(status), flush=True)
        copy.complete_all()
        moving.wait_all(LONG)
        lease.release()
        print("parent", rank.is_ready, flush=True)


def interrupt(folder: str) -> None:
    """Exit after Ctrl-C before the threads of a rank and an engine have begun."""
    thread_module.EXIT_SECONDS = 1000.0  # longer than the test waits
    start = threading.Thread.start

    def interrupted_start(*args: object) -> None:
        raise KeyboardInterrupt

    threading.Thread.start = interrupted_start
    engines = [SyncEngine(CacheConfig(block_tokens=4, device_blocks=8)) for _ in range(2)]
    close = thread_module.LoopThread.close
    for begin in (lambda: started(folder), engines[0].open, engines[1].open):
        try:
            begin()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        thread_module.LoopThread.close = interrupted_start  # close is interrupted, too
    threading.Thread.start = start
    thread_module.LoopThread.close = close
    globals()["kept"] = engines  # until the interpreter frees the modules


if __name__ == "__main__":
    {"leave": leave, "fork": fork, "interrupt": interrupt}[sys.argv[1]](sys.argv[2])
