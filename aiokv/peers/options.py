"""Peers: how an engine listens for other engines, and connects to them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from aiokv.base import checks
from aiokv.errors import ConfigError
from aiokv.stores.options import parse_bytes

TransportName = Literal["tcp", "nixl", "mooncake", "cuda_ipc"]

MIN_SECRET_BYTES: Final = 16
MAX_SECRET_BYTES: Final = 4096
CHUNK_BLOCKS: Final = 16
MAX_CHUNK_BLOCKS: Final = 4096
MAX_LAYER_RANGES: Final = 64


@checks.arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Connections of an engine to engines on other servers.

    ::

        CacheEngine(config, regions, peers=Peers(listen="10.0.0.5", secret=secret))

    All engines that exchange blocks have the same ``secret`` and ``transport``. The secret proves
    who connects, and that no message was changed; the bytes are not encrypted: use a network that
    others cannot read.

    Attributes:
        secret: at least 16 bytes, e.g. of ``secrets.token_bytes(32)``; a str is encoded as UTF-8.
            Logs and ``repr`` do not show it.
        listen: ``"host"`` or ``"host:port"`` of this server, ``"[address]:port"`` for IPv6; without
            a port the system chooses one. None for an engine that only sends.
        advertise: ``"host"`` or ``"host:port"`` that other engines connect to; None if it is
            ``listen``. Required when ``listen`` is the wildcard address.
        transport: ``"tcp"``, ``"nixl"`` (package ``nixl``), ``"mooncake"`` (package
            ``mooncake-transfer-engine``), or ``"cuda_ipc"`` from one GPU to another in one server,
            between processes in one IPC namespace (one container, or ``--ipc=host``), for blocks
            of equal layouts. ``"nixl"`` and ``"mooncake"`` also listen on ports that the system
            chooses, without authentication, and write what arrives there into the memory of the
            slots or, with UCX over TCP, of the process: use them only in a network that no other
            program reaches.
        transport_options: for ``"nixl"``, parameters of its UCX plugin, such as
            ``{"device_list": "mlx5_0"}``; for ``"mooncake"``, ``"protocol"`` (``"tcp"``, the
            default, or ``"rdma"``) and ``"devices"`` (names of RDMA devices, separated by commas).
        ring_bytes: host memory in which received blocks arrive, such as ``"256MiB"``, or memory of
            the GPU with ``"cuda_ipc"``; an int once the object is made. At least one block must
            fit; with recurrent state, each slot of this memory is as large as a state slot, if that
            is larger than a block. Unused by an engine that only sends.
        outgoing_bytes: memory from which blocks are sent; likewise.
        chunk_blocks: most blocks of one transfer. A received chunk is cached when all of it has
            arrived.
        layer_ranges: parts into which the layers of the model are divided, so that the layers that
            ``Sending.layers_done`` names are sent while the model computes the others; at most one
            per layer. 1: blocks are sent when they are committed. A receiver takes blocks from
            senders with 1, or with as many as it has itself. Each part costs as much as a block
            besides its bytes: it should have at least 64 KiB on each rank.

    Raises:
        ConfigError: a value is out of range; ``listen`` is the wildcard address, and ``advertise``
            is None.
    """

    secret: str | bytes = field(repr=False)
    listen: str | None = None
    advertise: str | None = None
    transport: TransportName = "tcp"
    transport_options: Mapping[str, str] = field(default_factory=dict)
    ring_bytes: int | str = "256MiB"
    outgoing_bytes: int | str = "256MiB"
    chunk_blocks: int = CHUNK_BLOCKS
    layer_ranges: int = 1

    def __post_init__(self) -> None:
        _check_secret(self.secret)
        checks.choice("transport", self.transport, get_args(TransportName), ConfigError)
        _check_transport_options(self.transport, self.transport_options)
        for name in ("ring_bytes", "outgoing_bytes"):
            object.__setattr__(self, name, _size(name, getattr(self, name)))
        checks.integer(
            "chunk_blocks", self.chunk_blocks, minimum=1, maximum=MAX_CHUNK_BLOCKS,
            error=ConfigError,
        )  # fmt: skip
        checks.integer(
            "layer_ranges", self.layer_ranges, minimum=1, maximum=MAX_LAYER_RANGES,
            error=ConfigError,
        )  # fmt: skip
        if self.slots_on_device and self.layer_ranges > 1:
            raise ConfigError(
                f"layer_ranges is {self.layer_ranges}; the transport 'cuda_ipc' moves whole blocks",
                hint="set layer_ranges=1, or use another transport",
            )
        if self.advertise is not None:
            if self.listen is None:
                raise ConfigError("advertise is given, but listen is None", hint="set listen")
            _check_advertised("advertise", self.advertise)
        elif self.listen is not None:
            _check_advertised("listen", self.listen)
        if self.listen is not None:
            split_address("listen", self.listen)

    @property
    def key(self) -> bytes:
        """The secret as bytes."""
        return self.secret.encode() if isinstance(self.secret, str) else self.secret

    @property
    def slots_on_device(self) -> bool:
        """True if blocks arrive in, and are sent from, the memory of the device."""
        return self.transport == "cuda_ipc"

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Host and port to listen at, port 0 for any; None for an engine that only sends."""
        return None if self.listen is None else split_address("listen", self.listen)

    def advertised(self, port: int) -> tuple[str, int]:
        """Return host and port that other engines connect to.

        Args:
            port: port that this engine listens at.

        Raises:
            ConfigError: ``listen`` is None.
        """
        if self.listen is None:
            raise ConfigError("listen is None: an engine that only sends has no address")
        name = "listen" if self.advertise is None else "advertise"
        host, advertised_port = split_address(name, self.advertise or self.listen)
        return host, (advertised_port if self.advertise is not None else 0) or port


def split_address(name: str, text: object) -> tuple[str, int]:
    """Return host and port of ``"host"``, ``"host:port"`` or ``"[address]:port"``.

    Args:
        name: name of the option, for errors.
        text: its value.

    Returns:
        The host without brackets, and the port, 0 without one.

    Raises:
        ConfigError: the text is none of these, or the port is out of range.
    """
    problem = ConfigError(
        f"{name} is {checks.shown(text)}; it must be 'host', 'host:port' or '[address]:port'"
    )
    if not isinstance(text, str) or not text.isascii() or any(c.isspace() for c in text):
        raise problem
    if text.startswith("["):
        host, bracket, behind = text[1:].partition("]")
        colon, port = behind[:1], behind[1:]
        if not bracket or not _is_ip6(host) or colon not in ("", ":"):
            raise problem
    elif _is_ip6(text):
        host, colon, port = text, "", ""
    else:
        host, colon, port = text.partition(":")
    if not host or "/" in host or (colon and not (port.isdigit() and len(port) <= 5)):
        raise problem
    if colon and int(port) > 65535:
        raise ConfigError(f"{name} is {text!r}; its port must be between 0 and 65535")
    return host, int(port) if colon else 0


def _check_transport_options(transport: str, options: object) -> None:
    if not isinstance(options, Mapping) or not all(
        isinstance(text, str) for item in options.items() for text in item
    ):
        raise ConfigError(
            f"transport_options is {checks.shown(options)}; it must be a dict of str to str"
        )
    if transport in ("tcp", "cuda_ipc") and options:
        raise ConfigError(
            f"transport_options is {dict(options)}; the transport {transport!r} has no options"
        )


def _check_secret(secret: object) -> None:
    """Check the secret without showing it.

    Raises:
        ConfigError: neither str nor bytes, too short or too long.
    """
    if not isinstance(secret, str | bytes):
        raise ConfigError(f"secret is of type {type(secret).__name__}; it must be str or bytes")
    try:
        num_bytes = len(secret.encode() if isinstance(secret, str) else secret)
    except UnicodeEncodeError:
        raise ConfigError("secret is a str that is not valid Unicode") from None
    if not MIN_SECRET_BYTES <= num_bytes <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"secret has {num_bytes} bytes; it must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}",
            hint="make one with secrets.token_bytes(32), and give all engines the same",
        )


def _check_advertised(name: str, text: object) -> None:
    """Raise unless other engines can connect to the address."""
    host, _ = split_address(name, text)
    if _is_wildcard(host):
        raise ConfigError(
            f"{name} is {text!r}, the address of all interfaces, which no other engine can "
            "connect to",
            hint="name one address of this server, or set advertise to what other engines "
            "connect to",
        )


def _is_wildcard(host: str) -> bool:
    if _is_ip6(host):
        address = ipaddress.IPv6Address(host)
        return address.is_unspecified or address.ipv4_mapped == ipaddress.IPv4Address(0)
    try:  # "0" and "0x0" are caught here, too: the system takes them for 0.0.0.0
        return host == "*" or socket.inet_aton(host) == bytes(4)
    except OSError:
        return False


def check_peers(peers: object) -> None:
    """Check the argument ``peers`` of an engine or a rank.

    Raises:
        ConfigError: it is neither None nor a :class:`Peers`.
    """
    if peers is not None and not isinstance(peers, Peers):
        raise ConfigError(
            f"peers is of type {type(peers).__name__}; it must be an aiokv.Peers",
            hint="peers=Peers(listen='10.0.0.5', secret=...)",
        )


def _is_ip6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name} is {checks.shown(value)}; it must be a number of bytes")
    try:
        return parse_bytes(value)
    except ConfigError:
        raise ConfigError(
            f"{name} is {value!r}; it must be a positive number of bytes",
            hint="write it as 4096, '400MiB' or '1.5GB'",
        ) from None
