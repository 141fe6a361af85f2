"""Ticket: where to send the blocks of one prompt, and which blocks; a msgpack blob.

The receiving engine makes a ticket, and the user's own request carries it to the sending engine. A
ticket is not a secret: a reader learns addresses and hashes, but cannot connect without the secret
that the engines share. Its last 32 bytes are a MAC with a key that is derived from the secret, so
a request with a forged ticket cannot let the sending engine connect to an address of its choice.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from aiokv.base import checks
from aiokv.errors import PeerError, UsageError

VERSION: Final = 1
ID_BYTES: Final = 16
DIGEST_BYTES: Final = 32
MAC_BYTES: Final = 32
MAX_TICKET_BYTES: Final = 64 * 1024
MAX_LAYOUT_BYTES: Final = 16 * 1024
MAX_ENDPOINTS: Final = 1024
MAX_WINDOWS: Final = 16
MAX_TIMEOUT_SECONDS: Final = 86_400.0

_Id = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
_Name = Annotated[str, Meta(max_length=1024)]
_Transport = Annotated[str, Meta(min_length=1, max_length=64)]
_Positions = Annotated[int, Meta(ge=0, le=checks.MAX_INT32)]


class Endpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Address at which one rank of the receiving engine listens, and the layout of its blocks.

    Attributes:
        host: name or address that the sending engine connects to.
        port: TCP port.
        rank: number of the rank; 0 without ranks.
        num_ranks: number of ranks; 1 without ranks.
        layout: blocks of the rank, as ``aiokv.layout.mapping`` encodes them.
        transport: name of the transport, such as ``"tcp"``.
    """

    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    rank: Annotated[int, Meta(ge=0, lt=MAX_ENDPOINTS)] = 0
    num_ranks: Annotated[int, Meta(ge=1, le=MAX_ENDPOINTS)] = 1
    layout: Annotated[bytes, Meta(max_length=MAX_LAYOUT_BYTES)] = b""
    transport: _Transport = "tcp"


class Ticket(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True
):
    """Blocks that a receiving engine waits for.

    Attributes:
        version: version of this format.
        ticket_id: random; names the ticket in plans and messages.
        generation: random; names one opening of the receiving engine.
        model: ``CacheConfig.model`` of the receiving engine.
        weights_version: version of its weights.
        prompt_digest: digest of the first ``num_tokens`` positions with salt, adapter and items.
        first_position: first position that the receiving engine does not have.
        num_tokens: position after the last that it waits for.
        timeout_seconds: time until the receiving engine computes what is missing.
        block_tokens: positions per block of the receiving engine.
        transport: name of the transport of all endpoints.
        endpoints: endpoints of all its ranks, in the order of their numbers.
        windows: ``window_tokens`` and ``sink_tokens`` of its window groups, by name.
    """

    version: Annotated[int, Meta(ge=VERSION, le=VERSION)] = VERSION
    ticket_id: _Id
    generation: _Id
    model: _Name
    weights_version: _Name
    prompt_digest: _Digest
    first_position: _Positions
    num_tokens: Annotated[int, Meta(ge=1, le=checks.MAX_INT32)]
    timeout_seconds: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_SECONDS)]
    block_tokens: Annotated[int, Meta(ge=1, le=checks.MAX_INT32)]
    transport: _Transport
    endpoints: Annotated[list[Endpoint], Meta(min_length=1, max_length=MAX_ENDPOINTS)]
    windows: Annotated[
        dict[_Name, tuple[_Positions, _Positions]], Meta(max_length=MAX_WINDOWS)
    ] = {}


class _Version(msgspec.Struct, array_like=True):
    """Beginning of a ticket of any version."""

    version: int


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Ticket)
_version_decoder: Final = msgspec.msgpack.Decoder(_Version)


def ticket_key(secret: bytes) -> bytes:
    """Return the key of tickets that is derived from the secret of the engines."""
    return hmac.digest(secret, b"aiokv ticket", "sha256")


def encode(ticket: Ticket, key: bytes) -> bytes:
    """Return the blob of a ticket.

    Args:
        ticket: any.
        key: result of ``ticket_key``.

    Raises:
        UsageError: a value is out of range, or the blob has more than 64 KiB.
    """
    body = _encoder.encode(ticket)
    blob = body + hmac.digest(key, body, "sha256")
    decode(blob, key)  # check that the sending engine can read it
    return blob


def decode(blob: bytes, key: bytes) -> Ticket:
    """Return the ticket in a blob from another process; nothing in the blob is trusted.

    Args:
        blob: result of ``encode``.
        key: result of ``ticket_key``; compared in constant time.

    Raises:
        UsageError: the blob is not ``bytes``, has more than 64 KiB, is malformed, has a value out
            of range, or is of another version.
        PeerError: the ticket was changed, or was made with another secret.
    """
    if not isinstance(blob, bytes | bytearray | memoryview):
        raise UsageError(f"ticket is {checks.shown(blob)}; it must be bytes")
    if (num_bytes := memoryview(blob).nbytes) > MAX_TICKET_BYTES:
        raise UsageError(f"ticket has {num_bytes} bytes; it must have at most {MAX_TICKET_BYTES}")
    body, mac = bytes(blob)[:-MAC_BYTES], bytes(blob)[-MAC_BYTES:]
    try:
        version = _version_decoder.decode(body).version
        ticket = _decoder.decode(body) if version == VERSION else None
        if ticket is not None:
            _check(ticket)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise UsageError(
            f"ticket is malformed: {error}",
            hint="pass the bytes of receiving.ticket unchanged",
        ) from None
    if ticket is None:
        raise UsageError(
            f"ticket has version {version}; this aiokv reads version {VERSION}",
            hint="run the same version of aiokv on both servers",
        )
    if not hmac.compare_digest(mac, hmac.digest(key, body, "sha256")):
        raise PeerError(
            "the ticket was changed, or an engine with another secret made it",
            hint="give all engines the same Peers(secret=...), and pass the bytes of "
            "receiving.ticket unchanged",
        )
    return ticket


def _check(ticket: Ticket) -> None:
    """Check conditions on several fields.

    Raises:
        ValueError: the fields contradict one another.
    """
    if ticket.first_position >= ticket.num_tokens:
        raise ValueError(
            f"first_position is {ticket.first_position}; it must be less than num_tokens, "
            f"{ticket.num_tokens}"
        )
    if any(endpoint.transport != ticket.transport for endpoint in ticket.endpoints):
        raise ValueError(f"an endpoint has another transport than {ticket.transport!r}")
    ranks = [(endpoint.rank, endpoint.num_ranks) for endpoint in ticket.endpoints]
    if ranks != [(rank, len(ranks)) for rank in range(len(ranks))]:
        raise ValueError(f"the endpoints are of (rank, num_ranks) {ranks[:8]}; one per rank")
