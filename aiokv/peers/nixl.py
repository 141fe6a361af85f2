"""NixlBackend: fragments through NIXL and UCX, from and to host memory or the memory of GPUs.

UCX chooses the way: RDMA, shared memory, NVLink or TCP. It listens without authentication, and
writes what arrives into memory: use a network that only the engines reach.
"""

from __future__ import annotations

import importlib
import os
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import ConfigError
from aiokv.peers.one_sided import WRITE_BYTES, EndpointError, WritePiece, rdma_devices

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from aiokv.peers.transport import PeerMemory

# Longest sleep of an agent's pump thread, which wakes when UCX has an event. With less, an idle
# agent takes more CPU time: 2 % of a core with 1 ms, half a core with 0.
PUMP_MICROSECONDS: Final = 50_000
WRITE_SECONDS: Final = 10.0  # longest write; its agent is closed after that
MAX_PAUSE_SECONDS: Final = 0.0005  # longest pause between two queries of a write
_PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
_BACKEND: Final = "UCX"


class NixlBackend:
    """See :class:`~aiokv.peers.one_sided.Backend`.

    Args:
        options: parameters of the UCX backend.
    """

    name = "nixl"
    is_reused = False
    write_bytes = WRITE_BYTES

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._library: Any = None

    def load(self) -> None:
        """Import the bindings of NIXL; see ``Backend.load``."""
        if not rdma_devices():
            # These modules load the RDMA libraries of the system beside those of the package,
            # which makes the process crash when it exits.
            os.environ.setdefault("UCX_MODULES", "^ib")
        self._library = import_bindings()

    def create(self, memory: PeerMemory, *, receives: bool) -> NixlEndpoint:
        """Return an agent that has registered ``memory``; see ``Backend.create``."""
        return NixlEndpoint(self._library, self._options, memory, receives=receives)


def import_bindings() -> Any:
    """Return the module of bindings of the installed package.

    The public module does not let the pump thread sleep.

    Raises:
        ConfigError: no package is installed, or it cannot be loaded, or is too old.
    """
    for package in _PACKAGES:
        try:
            bindings = importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.partition(".")[0].startswith("nixl"):
                continue
            raise ConfigError(
                f"{package} cannot be imported: {error}", hint="install this module"
            ) from error
        except ImportError as error:
            raise ConfigError(f"{package} cannot be loaded: {error}") from error
        if not hasattr(bindings.nixlAgentConfig, "pthrDelay"):
            raise ConfigError(f"{package} is too old", hint="pip install 'nixl>=1.5'")
        return bindings
    raise ConfigError(
        "the transport 'nixl' needs the package nixl", hint="pip install 'aiokv[nixl]'"
    )


class NixlEndpoint:
    """An agent of NIXL; see :class:`~aiokv.peers.one_sided.Endpoint`.

    Only the agent of a receiver has a pump thread, which UCX needs where it emulates remote writes,
    such as over TCP. The agent of a sender makes progress while it waits for a write.
    """

    def __init__(
        self, library: Any, options: Mapping[str, str], memory: PeerMemory, *, receives: bool
    ) -> None:
        self._library = library
        config = library.nixlAgentConfig()
        config.useProgThread = receives
        config.useListenThread = False
        config.pthrDelay = PUMP_MICROSECONDS
        config.syncMode = library.NIXL_THREAD_SYNC_STRICT
        self._segment = self._segment_of(memory.device)
        self._device = memory.device or 0
        self._remote = ""
        place = (memory.address, memory.num_bytes, self._device, b"")
        try:
            self._agent: Any = library.nixlAgent(uuid.uuid4().hex, config)
            self._check(options)
            self._backend = self._agent.createBackend(_BACKEND, dict(options))
            registered = library.nixlRegDList(self._segment, [place])
            self._agent.registerMem(registered, [self._backend])
        except EndpointError:
            self._agent = None
            raise
        except Exception as error:
            self._agent = None
            kind = "host memory" if memory.device is None else f"the memory of GPU {memory.device}"
            raise EndpointError(
                f"NIXL cannot start UCX, or register {memory.num_bytes} bytes of {kind}: {error}"
            ) from error

    def _check(self, options: Mapping[str, str]) -> None:
        """Raise for a parameter that the plugin would ignore."""
        # The plugin reads its parameter for devices by another name than the one that it lists.
        known = {*self._agent.getPluginParams(_BACKEND)[0], "device_list"} - {"ucx_devices"}
        if unknown := sorted(set(options) - known):
            raise EndpointError(
                f"transport_options has {unknown[0]!r}; UCX has the parameters "
                f"{', '.join(map(repr, sorted(known)))}"
            )

    def metadata(self) -> bytes:
        """Return the address of the agent, and the keys of its memory."""
        try:
            description: bytes = self._agent.getLocalMD()
        except Exception as error:
            raise EndpointError(f"NIXL: {error}") from error
        return description

    def _segment_of(self, device: int | None) -> Any:
        return self._library.DRAM_SEG if device is None else self._library.VRAM_SEG

    def connect(self, metadata: bytes, device: int | None) -> None:
        """Load the description of a receiver's agent."""
        self._remote_segment = self._segment_of(device)
        self._remote_device = device or 0
        try:
            self._remote = self._agent.loadRemoteMD(metadata).decode()
            self._agent.makeConnection(self._remote, [self._backend])
        except Exception as error:
            raise EndpointError(f"NIXL cannot connect: {error}") from error

    def write(self, pieces: Sequence[WritePiece], unwanted: threading.Event) -> None:
        """Write pieces; a short call of the library may execute all of it."""
        library, agent = self._library, self._agent
        try:
            request = agent.createXferReq(
                library.NIXL_WRITE,
                library.nixlXferDList(
                    self._segment, [(p.source, p.num_bytes, self._device) for p in pieces]
                ),
                library.nixlXferDList(
                    self._remote_segment,
                    [(p.target, p.num_bytes, self._remote_device) for p in pieces],
                ),
                self._remote,
                "",
                [self._backend],
            )
            try:
                self._wait(request, agent.postXferReq(request, ""), unwanted)
            finally:
                agent.releaseXferReq(request)
        except EndpointError:
            raise
        except Exception as error:
            raise EndpointError(f"NIXL: {error}") from error

    def _wait(self, request: Any, state: Any, unwanted: threading.Event) -> None:
        began, pause = time.monotonic(), 0.00002
        while state == self._library.NIXL_IN_PROG:
            if unwanted.wait(pause):
                raise EndpointError("the connection ended")
            if time.monotonic() - began > WRITE_SECONDS:
                raise EndpointError(f"a write did not end within {WRITE_SECONDS:g} s")
            pause = min(pause * 2, MAX_PAUSE_SECONDS)
            state = self._agent.getXferStatus(request)
        if state != self._library.NIXL_SUCCESS:
            raise EndpointError(f"NIXL: {state}")

    def close(self) -> None:
        """Destroy the agent, with its connections and its pump thread."""
        agent, self._agent = self._agent, None
        if agent is not None and self._remote:
            with suppress(Exception):
                agent.invalidateRemoteMD(self._remote)
        del agent
