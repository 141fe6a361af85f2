"""Tests of one-sided transports between two processes; each module of a transport inherits them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from aiokv.peers.wire import listen
from aiokv.testing import spin
from aiokv.testing.loops import run_until_idle
from tests.peers.transport_child import (
    NUM_SLOTS,
    ReceivingEnd,
    SendingEnd,
    transport_of,
)
from tests.peers.wires import HOST, SECRET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiokv.peers.wire import Connection


@asynccontextmanager
async def child(
    role: str, transport: str, mode: str = "", **environment: str
) -> AsyncIterator[tuple[subprocess.Popen[bytes], Connection]]:
    """A process at the other end of a connection; killed if it has not ended."""
    accepted: list[Connection] = []
    listener = await listen(HOST, 0, SECRET, accepted.append)
    command = [sys.executable, "-m", "tests.peers.transport_child", role, transport]
    command += [str(listener.address[1]), mode]
    process = subprocess.Popen(command, env=os.environ | environment)  # noqa: ASYNC220
    try:
        await run_until_idle(lambda: bool(accepted) or process.poll() is not None)
        assert accepted
        yield process, accepted[0]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for connection in accepted:
            connection.abort("the test ended")
        await listener.aclose()


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Return True for a process that SIGSTOP has stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def exited(process: subprocess.Popen[bytes]) -> int | None:
    """Wait for the end of a process; return its exit status."""
    await run_until_idle(lambda: process.poll() is not None)
    return process.returncode


class TransportProcesses:
    """Fragments between this process and another one."""

    transport: ClassVar[str]
    environments: ClassVar[dict[str, dict[str, str]]] = {"default": {}}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test with each environment of the class."""
        if "variables" in metafunc.fixturenames:
            names, variables = zip(*self.environments.items(), strict=True)
            metafunc.parametrize("variables", variables, ids=names)

    @pytest.fixture
    def environment(self, variables, monkeypatch) -> dict[str, str]:
        """Set the variables of both processes."""
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return variables

    @asynccontextmanager
    async def receiving(
        self, mode: str, environment: dict[str, str]
    ) -> AsyncIterator[tuple[ReceivingEnd, subprocess.Popen[bytes]]]:
        """This process receives from another one."""
        receiver = ReceivingEnd(transport_of(self.transport))
        await receiver.open()
        try:
            async with child("sender", self.transport, mode, **environment) as (process, accepted):
                receiver.start(accepted)
                yield receiver, process
        finally:
            await receiver.transport.aclose()

    @pytest.mark.asyncio
    async def test_fragments_arrive_from_another_process(self, environment):
        async with self.receiving("", environment) as (receiver, process):
            await run_until_idle(lambda: len(receiver.blocks) >= 200)
            receiver.gives = False
            await run_until_idle(lambda: receiver.ring.free_slots == NUM_SLOTS)
            assert receiver.wrong == []
            assert sorted(receiver.blocks) == list(range(len(receiver.blocks)))
            receiver.connection.close()
            await receiver.closed
            assert receiver.ring.revoke(receiver.connection, may_write=True) == []
            await receiver.transport.fence(receiver.connection, may_write=False)
            assert await exited(process) == 0

    @pytest.mark.asyncio
    async def test_slots_of_a_killed_sender_can_be_used_again(self, environment):
        async with self.receiving("", environment) as (receiver, process):
            await run_until_idle(lambda: len(receiver.blocks) >= 20)
            process.kill()
            await receiver.closed
            receiver.ring.revoke(receiver.connection, may_write=True)
            await receiver.transport.fence(receiver.connection, may_write=True)
            receiver.ring.confirm(receiver.connection)
            assert receiver.ring.free_slots == NUM_SLOTS
            receiver.slots.blocks[:] = 0
            await exited(process)
            await spin(100)
            assert not receiver.slots.blocks.any()
            assert receiver.wrong == []

    @pytest.mark.asyncio
    async def test_late_write_of_a_stopped_sender_reaches_only_quarantined_slots(self, environment):
        """I11: the sender stops before a write, is given up, and continues."""
        async with self.receiving("stop", environment) as (receiver, process):
            receiver.ring.want("another", 3)
            others = [credit.slot for _, slots in receiver.ring.grant() for credit in slots]
            await run_until_idle(lambda: is_stopped(process))
            receiver.connection.abort("the peer sent nothing for 6.0 s")
            quarantined = receiver.ring.revoke(receiver.connection, may_write=True)
            assert quarantined
            assert not set(others) & set(quarantined)
            fence = asyncio.create_task(
                receiver.transport.fence(receiver.connection, may_write=True)
            )
            await spin(100)
            assert not fence.done()  # the write may still come
            process.send_signal(signal.SIGCONT)
            await fence
            written = {slot for slot in range(NUM_SLOTS) if receiver.slots.blocks[slot].any()}
            assert written <= set(quarantined)
            receiver.slots.blocks[:] = 0
            assert await exited(process) == 0
            assert not receiver.slots.blocks.any()

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
    @pytest.mark.asyncio
    async def test_write_to_a_receiver_that_fails_ends(self, how, environment):
        async with child("receiver", self.transport, **environment) as (process, connection):
            sender = SendingEnd(transport_of(self.transport), connection)
            await sender.open()
            await run_until_idle(lambda: sender.block >= 20)
            process.send_signal(how)
            if how is signal.SIGSTOP:
                await run_until_idle(lambda: is_stopped(process))
                connection.abort("the peer sent nothing for 6.0 s")
            await sender.closed
            await sender.aclose()
            assert sender.free == set(range(NUM_SLOTS))
            sender.slots.blocks[:] = 0  # nothing reads them any more
