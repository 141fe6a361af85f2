"""A program with an engine in a thread, that forks or ends without closing it: run by a test."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np

from aiokv import CacheConfig, Regions
from aiokv.errors import ClosedError
from aiokv.sync import SyncEngine
from aiokv.testing.loops import PATIENCE_SECONDS


def open_engine(folder: str) -> SyncEngine:
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[np.zeros((8, 64), np.int8)])
    config = CacheConfig(
        block_tokens=4, device_blocks=8, host_blocks=8, drain_timeout_seconds=60.0, model="m"
    )
    engine = SyncEngine(config, regions, stores=[f"disk:{folder}?bytes=1MiB"])
    engine.open()
    return engine


def hold_everything(engine: SyncEngine) -> object:
    lease = engine.match(range(17))
    lease.allocate(32).result()
    lease.commit(17)
    engine.step()
    return lease


def leave(engine: SyncEngine) -> None:
    """End with a lease held, and with daemon and other threads that wait in the engine."""
    held = hold_everything(engine)
    refused = []

    def wait() -> None:
        try:
            engine.match([1]).allocate(32).result()
        except ClosedError as error:
            refused.append(error)
            print("the wait has ended", flush=True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    threading.Thread(target=engine.call, args=(threading.Event().wait, 0.0), daemon=True).start()
    while not engine.statistics().waiting:
        pass
    globals()["held"] = held  # until the interpreter frees the modules
    print("main ends", flush=True)


def is_refused(call) -> bool:
    try:
        call()
    except ClosedError as error:
        return "parent process" in str(error)
    return False


def fork(engine: SyncEngine) -> None:
    held = hold_everything(engine)
    waiting = engine.match([1]).allocate(32)
    gate = threading.Event()
    engine.submit(gate.wait)
    posted = engine.calls()
    posted.step()
    posted.post()
    pid = os.fork()
    gate.set()
    if pid == 0:
        verbs = (
            posted.run,
            lambda: engine.match([1]),
            lambda: held.commit(16),
            engine.step,
            engine.health,
            waiting.result,
            waiting.cancel,
            lambda: held.allocate(4).result(),
            engine.open,
        )
        try:
            ok = all(is_refused(verb) for verb in verbs)
        except BaseException as error:
            print(repr(error), flush=True)
            ok = False
        held.release()
        engine.close()
        print("child", ok, flush=True)
        sys.exit(0 if ok else 1)
    _, status = os.waitpid(pid, 0)
    print("child status", os.waitstatus_to_exitcode(status), flush=True)
    held.release()
    waiting.result(PATIENCE_SECONDS).release()
    engine.close()
    print("parent", engine.cache.statistics().leases, flush=True)


if __name__ == "__main__":
    {"leave": leave, "fork": fork}[sys.argv[1]](open_engine(sys.argv[2]))
