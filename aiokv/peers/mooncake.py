"""MooncakeBackend: fragments through the Transfer Engine of Mooncake.

An endpoint listens on two ports of all interfaces, without authentication, and writes what arrives
into registered memory: use a network that only the engines reach.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import ConfigError
from aiokv.peers.one_sided import WRITE_BYTES, EndpointError, WritePiece, rdma_devices
from aiokv.stores.mooncake.client import ENVIRONMENT

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from aiokv.peers.transport import PeerMemory

TRANSFER_SECONDS: Final = 5  # longest write in the library
_METADATA: Final = "P2PHANDSHAKE"
_PROTOCOLS: Final = ("tcp", "rdma")
_OPTIONS: Final = ("protocol", "devices")


class MooncakeBackend:
    """See :class:`~aiokv.peers.one_sided.Backend`.

    To destroy an endpoint holds the interpreter lock for a second, so endpoints are reused unless
    their sender failed.

    Args:
        host: name or address of this server that senders connect to.
        options: ``protocol`` and ``devices``.

    Raises:
        ConfigError: an option is unknown, or the protocol is.
    """

    name = "mooncake"
    is_reused = True
    write_bytes = WRITE_BYTES

    def __init__(self, host: str, options: Mapping[str, str]) -> None:
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise ConfigError(
                f"transport_options has {unknown[0]!r}; mooncake has the options "
                f"{' and '.join(map(repr, _OPTIONS))}"
            )
        self._host = host
        self._protocol = options.get("protocol", _PROTOCOLS[0])
        if self._protocol not in _PROTOCOLS:
            raise ConfigError(
                f"transport_options['protocol'] is {self._protocol!r}; it must be one of "
                f"{', '.join(map(repr, _PROTOCOLS))}"
            )
        self._devices = options.get("devices", "")
        self._library: Any = None

    def load(self) -> None:
        """Set the timeouts of the library, and import it; see ``Backend.load``."""
        if self._protocol == "rdma":
            self._check_devices()
        self._library = import_engine()

    def _check_devices(self) -> None:
        """Raise unless the RDMA devices exist: the library starts without them."""
        present = rdma_devices()
        wanted = [name for name in self._devices.split(",") if name] or ["any"]
        if not present or not set(wanted) <= {*present, "any"}:
            raise ConfigError(
                f"the protocol 'rdma' needs the RDMA device {', '.join(wanted)}; this machine has "
                f"{', '.join(present) or 'none'}",
                hint="correct transport_options['devices'], or set the protocol 'tcp'",
            )

    def create(self, memory: PeerMemory, *, receives: bool) -> MooncakeEndpoint:
        """Return a transfer engine that has registered ``memory``; see ``Backend.create``."""
        return MooncakeEndpoint(self._library, self._host, self._protocol, self._devices, memory)


def import_engine() -> Any:
    """Return the module ``mooncake.engine``, with short timeouts.

    Raises:
        ConfigError: the package, or a library that it needs, is not installed.
    """
    for name, value in (ENVIRONMENT | {"MC_TRANSFER_TIMEOUT": str(TRANSFER_SECONDS)}).items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import engine
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the transport 'mooncake' needs the package mooncake-transfer-engine",
            hint="pip install 'aiokv[mooncake]', or 'aiokv[mooncake-cpu]' without CUDA",
        ) from error
    except ImportError as error:
        has_no_verbs = "libibverbs" in str(error)
        hint = "apt-get install libibverbs1" if has_no_verbs else "install this library"
        raise ConfigError(f"mooncake.engine cannot be loaded: {error}", hint=hint) from error
    return engine


class MooncakeEndpoint:
    """A transfer engine; see :class:`~aiokv.peers.one_sided.Endpoint`."""

    def __init__(
        self, library: Any, host: str, protocol: str, devices: str, memory: PeerMemory
    ) -> None:
        self._host = f"[{host}]" if ":" in host else host
        self._memory = memory
        self._remote = ""
        self._engine: Any = library.TransferEngine()
        if code := self._engine.initialize(self._host, _METADATA, protocol, devices):
            self._engine = None
            raise EndpointError(
                f"Mooncake cannot start with protocol {protocol!r} and devices {devices!r} "
                f"(code {code})"
            )
        if code := self._engine.register_memory(memory.address, memory.num_bytes):
            self._engine = None
            kind = "host memory" if memory.device is None else f"the memory of GPU {memory.device}"
            raise EndpointError(
                f"Mooncake cannot register {memory.num_bytes} bytes of {kind} (code {code})"
            )

    def metadata(self) -> bytes:
        """Return host and port of the engine."""
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def connect(self, metadata: bytes, device: int | None) -> None:
        """Note the engine to write to; the first write connects."""
        try:
            self._remote = metadata.decode()
        except UnicodeDecodeError as error:
            raise EndpointError("the address of the receiver's engine is malformed") from error

    def write(self, pieces: Sequence[WritePiece], unwanted: threading.Event) -> None:
        """Write pieces; the library ends the call after its timeouts, which are some seconds."""
        code = self._engine.batch_transfer_sync_write(
            self._remote,
            [piece.source for piece in pieces],
            [piece.target for piece in pieces],
            [piece.num_bytes for piece in pieces],
        )
        if code:
            raise EndpointError(f"Mooncake: a write to {self._remote} failed (code {code})")

    def close(self) -> None:
        """Destroy the engine, with its connections and threads."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.unregister_memory(self._memory.address)
        del engine
