"""Engines in processes of their own, which a test kills, stops and restarts.

::

    test ──► Nursery: a process that has imported all ──fork──► Child: an engine with peers
     └──────────────────── commands and replies, a line of JSON each ─────────┘
"""

from __future__ import annotations

import asyncio
import base64
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import uvloop

from aiokv.errors import AiokvError
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.leftovers import open_descriptors, running_threads
from tests.peers.engines import Side, prompt
from tests.peers.ranked import RankedSide, run_rank

if TYPE_CHECKING:
    import numpy as np

_MAX_REQUEST = 4096  # bytes of the options of a child


class Nursery:
    """Forks engines: the imports take longer than all else of a short test."""

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        self._process.wait()

    def child(self, **options: Any) -> Child:
        """Start a process; the options are ``loop``, and those of an engine or a rank.

        Of a ``Side``; with ``num_ranks``, of a ``RankedSide``; with ``rank``, too, of its rank.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            request = json.dumps(options).encode()
            socket.send_fds(self._socket, [request], [theirs.fileno()])
        return Child(int(self._socket.recv(64)), ours)


class Child:
    """An engine in another process.

    Attributes:
        pid: of the process.
        port: that it listens at, once it is open; 0 when it only sends.
    """

    def __init__(self, pid: int, connected: socket.socket) -> None:
        self.pid = pid
        self.port = 0
        self._socket = connected
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tickets: dict[int, asyncio.Future[bytes]] = {}
        self._last = 0

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self.port = json.loads(await self._reader.readline())["port"]
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, exc_type: object, *error: object) -> None:
        """End the process; unless it was killed, check that it leaves nothing behind."""
        try:
            if exc_type is None and not self._task.done():
                left = await self.ask("end")
                assert left == {"left": []}, left
        finally:
            self.signal(signal.SIGKILL)
            await self._task
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; after ``SIGKILL``, replies are errors."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def killed(self) -> None:
        """Kill the process, and wait until it has ended."""
        self.signal(signal.SIGKILL)
        await asyncio.wait([self._task])

    async def ended(self) -> None:
        """Wait until the process has ended by itself."""
        await asyncio.wait([self._task])
        await self.__aexit__(None)

    async def ask(self, verb: str, **options: Any) -> dict[str, Any]:
        """Return the reply to a command; raises ``ConnectionError`` when the process has ended."""
        return await self._ask(verb, options)[1]

    def receive(
        self, seed: int, length: int, timeout: float = PATIENCE_SECONDS
    ) -> tuple[asyncio.Future[bytes], asyncio.Future[dict[str, Any]]]:
        """Return the ticket of a prompt, and how its receive ended."""
        number, reply = self._ask("receive", {"seed": seed, "length": length, "timeout": timeout})
        return self._tickets[number], reply

    def send(
        self, seed: int, length: int, ticket: bytes, step: int = 16, *, committed: int = -1
    ) -> Any:
        """Return how the send of a prompt ended.

        With ``committed``, the child computes all layers of all positions, commits only so many,
        and waits for the end of the send.
        """
        options = {"seed": seed, "length": length, "step": step, "committed": committed}
        return self._ask("send", {"ticket": base64.b64encode(ticket).decode(), **options})[1]

    def _ask(self, verb: str, options: Any) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        self._last += 1
        loop = asyncio.get_running_loop()
        reply = self._replies[self._last] = loop.create_future()
        ticket = self._tickets[self._last] = loop.create_future()
        for future in (reply, ticket):
            future.add_done_callback(_retrieve)
        if self._task.done():
            self._fail()
        else:
            self._writer.write(json.dumps({"verb": verb, "id": self._last, **options}).encode())
            self._writer.write(b"\n")
        return self._last, reply

    async def _read(self) -> None:
        with suppress(ConnectionError):
            while line := await self._reader.readline():
                reply = json.loads(line)
                number = reply.pop("id")
                if "ticket" in reply:
                    self._tickets[number].set_result(base64.b64decode(reply["ticket"]))
                else:
                    self._replies.pop(number).set_result(reply)
                    self._tickets.pop(number).cancel()
        self._fail()

    def _fail(self) -> None:
        futures: list[asyncio.Future[Any]] = [*self._replies.values(), *self._tickets.values()]
        for future in futures:
            if not future.done():
                future.set_exception(ConnectionError("the process has ended"))


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


# --- in the child ---------------------------------------------------------------------------------


class _Server:
    """Serves the commands of a test with an engine."""

    def __init__(self, side: Side, writer: asyncio.StreamWriter) -> None:
        self.side = side
        self._writer = writer

    def reply(self, number: int, **values: Any) -> None:
        self._writer.write(json.dumps({"id": number, **values}).encode() + b"\n")

    async def serve(self, command: dict[str, Any]) -> None:
        number, verb = command.pop("id"), command.pop("verb")
        try:
            values = await getattr(self, verb)(number, **command)
        except AiokvError as error:
            values = {"error": str(error), "kind": type(error).__name__}
        self.reply(number, **values)

    async def receive(self, number: int, seed: int, length: int, timeout: float) -> dict[str, Any]:
        """Receive a prompt, compute what is missing, and check all bytes."""
        tokens = prompt(length, seed)
        async with await self.side.granted(tokens) as lease:
            async with lease.receive(timeout=timeout) as receiving:
                self.reply(number, ticket=base64.b64encode(receiving.ticket).decode())
                first = await receiving.wait()
            self.side.finish(lease, tokens, first)
            return {"first": first, "failure": receiving.failure}

    async def send(
        self, number: int, seed: int, length: int, ticket: str, step: int, committed: int
    ) -> dict[str, Any]:
        blob = base64.b64decode(ticket)
        if committed >= 0:
            return await self._send_uncommitted(prompt(length, seed), blob, committed)
        delivered, failure = await self.side.prefill(prompt(length, seed), blob, step=step)
        return {"delivered": delivered, "failure": failure}

    async def _send_uncommitted(
        self, tokens: np.ndarray, blob: bytes, committed: int
    ) -> dict[str, Any]:
        async with (
            await self.side.granted(tokens) as lease,
            self.side.engine.send(lease, blob) as sending,
        ):
            self.side.compute_layers(lease, tokens, range(len(tokens)), sending)
            lease.commit(committed)
            await sending.ended()
        return {"delivered": sending.delivered_tokens, "failure": sending.failure}

    async def rest(self, number: int) -> dict[str, Any]:
        """Check that nothing is held."""
        await self.side.at_rest(empty=True)
        return {}


def _side(options: dict[str, Any]) -> Side:
    if "gpu" not in options:
        return RankedSide(**options) if "num_ranks" in options else Side(**options)
    from tests.gpu.sides import GpuSide  # imports CuPy

    return GpuSide(**options)


async def _run(options: dict[str, Any], connected: socket.socket) -> None:
    before = running_threads()
    reader, writer = await asyncio.open_connection(sock=connected)
    if "rank" in options:
        await run_rank(options.pop("rank"), options, writer)
        writer.close()
        return
    descriptors = open_descriptors()
    tasks: set[asyncio.Task[None]] = set()
    has_gpu = "gpu" in options
    async with _side(options) as side:
        server = _Server(side, writer)
        endpoints = side.engine.inspect.parts.worker.tickets.endpoints
        writer.write(json.dumps({"port": endpoints[0].port if endpoints else 0}).encode() + b"\n")
        while line := await reader.readline():
            command = json.loads(line)
            if command["verb"] == "end":
                break
            task = asyncio.create_task(server.serve(command))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        for task in list(tasks):
            await task
        await side.at_rest(empty=True)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    left = [str(task) for task in others]
    if not has_gpu:  # its driver opens some of both
        left += running_threads() - before
        # libuv opens a timer with its first timeout.
        left += [name for name in open_descriptors() - descriptors if "timerfd" not in name]
    if line:
        server.reply(command["id"], left=left)
        await writer.drain()
    writer.close()


def _serve_child(request: bytes, connected: socket.socket) -> None:
    options = json.loads(request)
    loop = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    with asyncio.Runner(loop_factory=loop[options.pop("loop", "uvloop")]) as runner:
        runner.run(_run(options, connected))


def _reap(*_: object) -> None:
    """Say how a child ended, unless the test has killed it."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (status := os.waitstatus_to_exitcode(ended[1])) not in (0, -signal.SIGKILL):
                print(f"child {ended[0]} ended with status {status}", file=sys.stderr)


def _main(descriptor: int) -> None:
    signal.signal(signal.SIGCHLD, _reap)
    uvloop.run(asyncio.sleep(0))  # libuv opens a pipe for the whole process with its first loop
    with socket.socket(fileno=descriptor) as commands:
        while True:
            request, descriptors, _, _ = socket.recv_fds(commands, _MAX_REQUEST, 1)
            if not request:
                return
            connected = socket.socket(fileno=descriptors[0])
            if pid := os.fork():
                connected.close()
                commands.send(str(pid).encode())
                continue
            commands.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            faulthandler.enable()
            try:
                _serve_child(request, connected)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
