"""Interrupts (Ctrl-C) in callbacks of the engine's part of peers: each transfer ends once."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import uvloop

import aiokv.engine
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.peers.engines import Side, prompt, two_engines

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import FrameType

ENGINE = Path(aiokv.engine.__file__).parent
FILES = {str(ENGINE / f"{name}.py") for name in ("peers", "flow", "receiving", "sending")}
PARTS = range(6)  # a play for each line takes longer than one test may, on a busy machine
TOKENS = prompt(22)


class Interrupter:
    """Tracer that raises KeyboardInterrupt before the n-th line of callbacks in ``FILES``.

    Lines that a task executes do not count: there, the interrupt ends the user's own code.
    """

    def __init__(self, at: int = 0) -> None:
        self.lines = 0
        self._at = at

    def __enter__(self) -> Self:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        loop = asyncio._get_running_loop()
        if loop is None or asyncio.current_task(loop) is not None:
            return None
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                raise KeyboardInterrupt
        return self._on_line


def run(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, None]) -> int:
    """Run a coroutine to its end, also after interrupts; return the number of interrupts."""
    task = loop.create_task(main)
    loop.call_later(PATIENCE_SECONDS, task.cancel)
    interrupts = 0
    while not task.done():
        try:
            loop.run_until_complete(task)
        except KeyboardInterrupt:
            interrupts += 1
    task.result()
    return interrupts


async def move() -> None:
    """Send a prompt, of which both engines have a part; compare all bytes."""
    async with two_engines(Side(listen=None), Side()) as (p, d):
        await p.serve(TOKENS[:9])
        async with await d.granted(TOKENS) as lease:
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                assert await p.prefill(TOKENS, receiving.ticket) == (22, None)
                assert await receiving.wait() == 22
            d.check(lease, TOKENS)
            assert lease.usage.received_tokens <= 22  # an interrupt may lose a count
        assert d.engine.statistics().peers.complete_receives <= 1
        assert p.engine.statistics().peers.complete_sends <= 1


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_interrupt_at_any_line_of_a_callback_loses_no_transfer(
    new_loop: Callable[[], asyncio.AbstractEventLoop], part: int
) -> None:
    def play(at: int) -> int:
        loop = new_loop()
        with Interrupter(at) as interrupter:
            interrupts = run(loop, move())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        assert interrupts == (0 < at <= interrupter.lines), at
        return interrupter.lines

    lines = play(0)
    assert lines > 50
    for at in range(1 + 3 * part, lines, 3 * len(PARTS)):
        play(at)


@pytest.mark.parametrize("part", PARTS)
def test_interrupted_receive_that_is_left_gives_its_blocks_back(part: int) -> None:
    async def leave() -> None:
        async with (
            two_engines(Side(listen=None), Side()) as (p, d),
            await d.granted(TOKENS) as lease,
        ):
            async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
                sending = asyncio.create_task(p.prefill(TOKENS, receiving.ticket, step=4))
                arrived = await receiving.wait(8)
            assert arrived >= 8
            await sending
            d.check(lease, TOKENS, arrived)

    def play(at: int) -> int:
        loop = asyncio.new_event_loop()
        with Interrupter(at) as interrupter:
            run(loop, leave())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        return interrupter.lines

    for at in range(1 + 5 * part, play(0), 5 * len(PARTS)):
        play(at)
