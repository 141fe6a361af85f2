"""Replay of a trace by users who wait for each answer: a closed loop with a model of the time."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv import CacheEngine
from aiokv.base.percentiles import percentile
from aiokv.config.cache_config import ADMISSION_ORDERS, AdmissionOrder
from aiokv.errors import UsageError
from aiokv.testing.clock import running_clock
from aiokv.trace.format import MAX_HASH_ID
from aiokv.trace.loops import Replayer
from aiokv.trace.report import OrderPoint, UsersReport
from aiokv.trace.server_model import ServerModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from aiokv.trace.format import TraceRequest
    from aiokv.trace.replay import ReplayOptions, Stages, Workload

_FIRST_SECONDS: Final = 60.0  # the users begin within this time
_STEPS: Final = 100  # of the progress


class UserOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Users of a replay, and the times of the model.

    A request that is granted waits for the link, if it hits host memory, and then for the model,
    which serves one request at a time: prefill and decode are speeds of the whole server.

    Attributes:
        users: number of users. Each one takes the next session of the trace and sends its requests,
            each one after the answer to the request before and the pause of the trace.
        admission: orders to compare, each on a new engine.
        max_overtake_seconds: see ``CacheConfig``.
        seconds: simulated time.
        prefill_tokens_per_second: prompt tokens that the model computes per second.
        decode_tokens_per_second: output tokens per second, of all requests in a batch together.
        link_bytes_per_second: bytes per second from host memory to the device.
        max_pause_seconds: longer pauses of the trace are shortened to this time.
    """

    users: int
    admission: tuple[AdmissionOrder, ...] = ADMISSION_ORDERS
    max_overtake_seconds: float = 600.0
    seconds: float = 4 * 3600.0
    prefill_tokens_per_second: float = 47_000.0  # Llama 3 8B on an H100
    decode_tokens_per_second: float = 500.0
    link_bytes_per_second: float = 25e9
    max_pause_seconds: float = 600.0


class Turn(msgspec.Struct, frozen=True):
    """Request of a session, and the pause before it in seconds."""

    request: TraceRequest
    pause: float


async def replay_users(
    workload: Workload, options: ReplayOptions, users: UserOptions, stages: Stages
) -> UsersReport:
    """Serve the users on a new engine per order of admission, on a loop of ``clocked_loop()``.

    At most ``options.concurrency`` leases are held at once; further requests wait in ``allocate``.

    Raises:
        UsageError: no request fits the device, or ``options`` has a speed, bytes or a disk.
    """
    if options.speed is not None or options.execute or options.disk is not None:
        raise UsageError(
            "users is set with speed, execute or disk: the times of users are simulated, with a "
            "device and a host tier",
            hint="leave out --speed, --execute and --disk-blocks",
        )
    fitting = workload.fitting(options.device_blocks * options.block_tokens)
    sessions = sessions_of(fitting.requests, users)
    points = [await _run(sessions, options, users, order, stages) for order in users.admission]
    return UsersReport(
        trace=workload.trace,
        config=msgspec.to_builtins(options) | msgspec.to_builtins(users),
        sessions=len(sessions),
        rejected_requests=len(workload.requests) - len(fitting.requests),
        orders=points,
    )


def sessions_of(requests: Iterable[TraceRequest], users: UserOptions) -> list[list[Turn]]:
    """Divide requests in order of arrival into sessions.

    A request continues the session that had its deepest known block last, if these blocks are at
    least half of that session's last prompt. The pause before it is the time between both arrivals,
    without the time that the model decodes the answer.
    """
    sessions: list[list[Turn]] = []
    session_of: dict[int, int] = {}  # by block
    for request in requests:
        known = next((i for i in reversed(request.hash_ids) if i in session_of), None)
        index, pause = len(sessions), 0.0
        if known is not None:
            last = sessions[session_of[known]][-1].request
            if 2 * (request.hash_ids.index(known) + 1) >= len(last.hash_ids):
                index = session_of[known]
                answer = last.output_tokens / users.decode_tokens_per_second
                pause = (request.timestamp_ms - last.timestamp_ms) / 1e3 - answer
        if index == len(sessions):
            sessions.append([])
        sessions[index].append(Turn(request, min(max(pause, 0.0), users.max_pause_seconds)))
        session_of.update(dict.fromkeys(request.hash_ids, index))
    return sessions


def _endless(sessions: Sequence[Sequence[Turn]]) -> Iterator[Iterator[tuple[TraceRequest, float]]]:
    """Yield the sessions again and again, each time with blocks that no earlier round had."""
    ids = 1 + max(max(turn.request.hash_ids) for turns in sessions for turn in turns)
    for number in itertools.count():
        for turns in sessions:
            yield (
                (_shifted(turn.request, number * ids) if number else turn.request, turn.pause)
                for turn in turns
            )


def _shifted(request: TraceRequest, offset: int) -> TraceRequest:
    hash_ids = [(block + offset) % (MAX_HASH_ID + 1) for block in request.hash_ids]
    return msgspec.structs.replace(request, hash_ids=hash_ids)


async def _run(
    sessions: Sequence[Sequence[Turn]],
    options: ReplayOptions,
    users: UserOptions,
    order: AdmissionOrder,
    stages: Stages,
) -> OrderPoint:
    config = dataclasses.replace(
        options.cache_config,
        admission=order,
        max_overtake_seconds=users.max_overtake_seconds,
        max_running_leases=options.concurrency,
    )
    clock = running_clock()
    model = ServerModel(
        prefill_tokens_per_second=users.prefill_tokens_per_second,
        decode_tokens_per_second=users.decode_tokens_per_second,
        link_tokens_per_second=users.link_bytes_per_second
        * options.block_tokens
        / options.block_bytes,
    )
    async with CacheEngine(config) as engine:
        replayer = Replayer(engine, block_tokens=options.block_tokens, model=model)
        left = _endless(sessions)
        tasks = [
            asyncio.create_task(replayer.user(left, _FIRST_SECONDS * number / users.users))
            for number in range(users.users)
        ]
        settle = engine.drain if options.host_blocks else None
        progress = stages(f"{order}, {users.users} users", _STEPS)
        try:
            for _ in range(_STEPS):
                await clock.advance(users.seconds / _STEPS, settle)
                for task in tasks:
                    if task.done():
                        task.result()  # raises: no user ends
                progress(1)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return _point(order, users.seconds, model)


def _point(order: AdmissionOrder, seconds: float, model: ServerModel) -> OrderPoint:
    waits = sorted(model.waits)
    return OrderPoint(
        admission=order,
        requests=model.requests,
        requests_per_hour=model.requests * 3600 / seconds,
        prompt_tokens=model.prompt_tokens,
        hit_tokens=model.hit_tokens,
        hit_rate=model.hit_tokens / max(1, model.prompt_tokens),
        wait_p50_seconds=percentile(waits, 50) if waits else 0.0,
        wait_p95_seconds=percentile(waits, 95) if waits else 0.0,
        wait_max_seconds=waits[-1] if waits else 0.0,
        longest_overtaken_seconds=model.longest_overtaken,
        model_busy=model.busy_seconds / seconds,
    )
