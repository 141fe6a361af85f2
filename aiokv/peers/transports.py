"""Make the transport of an engine from its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiokv.peers.tcp import TcpTransport

if TYPE_CHECKING:
    from aiokv.peers.options import Peers
    from aiokv.peers.transport import Transport

LOOPBACK: Final = "127.0.0.1"


def make_transport(peers: Peers | None) -> Transport:
    """Return the transport that ``peers`` names, not open; ``tcp`` without peers.

    The module of a transport is imported when it is first named, its package when it is opened.
    """
    if peers is None or peers.transport == "tcp":
        return TcpTransport()
    from aiokv.peers.one_sided import OneSidedTransport

    if peers.transport == "nixl":
        from aiokv.peers.nixl import NixlBackend

        return OneSidedTransport(NixlBackend(peers.transport_options))
    if peers.transport == "cuda_ipc":
        from aiokv.peers.cuda_ipc import CudaIpcBackend

        return OneSidedTransport(CudaIpcBackend())
    from aiokv.peers.mooncake import MooncakeBackend

    # No other engine connects to an engine that only sends.
    host = LOOPBACK if peers.listen is None else peers.advertised(0)[0]
    return OneSidedTransport(MooncakeBackend(host, peers.transport_options))
