"""Handshake: both sides prove that they know the secret, without sending it.

::

    client                                    server
    magic, nonce of the client ─────────────►           40 bytes
           ◄───────────────────────────────── magic, nonce of the server
    proof of the client ────────────────────►           32 bytes, checked before any reply
           ◄───────────────────────────────── proof of the server

A proof is an HMAC-SHA256 with the secret over the role and both nonces. Each role has another text
in its proof: a proof that is sent back to its author is never right. The server reveals a proof
only to a client that knows the secret, so that an unauthenticated client cannot test guesses
offline.

The client proves first: a listener that does not know the secret gets a proof of each client that
connects to it, and can test guesses offline. Use random secrets; guessing one of 16 random bytes is
infeasible.

The keys of the frames are derived from the secret and both nonces, one key per direction: frames of
another connection, or of the other direction, have a wrong MAC.

The fragments themselves are neither encrypted nor authenticated; the trailers detect damage, not an
attacker who changes packets on the way.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final, Literal

from aiokv.base.checks import shown
from aiokv.errors import ConfigError
from aiokv.wire.connection import SessionKeys
from aiokv.wire.sockets import HandshakeError

Role = Literal["client", "server"]

MAGIC: Final = b"aiokv\x00p1"
NONCE_BYTES: Final = 32
GREETING_BYTES: Final = len(MAGIC) + NONCE_BYTES
PROOF_BYTES: Final = 32
MIN_SECRET_BYTES: Final = 16


class Handshake:
    """One side of a handshake: bytes in, bytes out, no I/O.

    Args:
        secret: at least ``MIN_SECRET_BYTES``.
        role: role of this side.

    Raises:
        ConfigError: the secret is not bytes, or is too short.

    Attributes:
        greeting: first bytes of this side.
    """

    def __init__(self, secret: bytes, role: Role) -> None:
        check_secret(secret)
        self._secret = secret
        self._role: Role = role
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""  # nonce of the client, then that of the server
        self.greeting = MAGIC + self._nonce

    def read_greeting(self, greeting: bytes) -> None:
        """Note the greeting of the other side.

        Raises:
            HandshakeError: the other side does not speak this protocol.
        """
        if len(greeting) != GREETING_BYTES or not greeting.startswith(MAGIC):
            raise HandshakeError("the other side does not speak the protocol of aiokv peers")
        other = greeting[len(MAGIC) :]
        if self._role == "client":
            self._nonces = self._nonce + other
        else:
            self._nonces = other + self._nonce

    def proof(self) -> bytes:
        """Return the proof of this side."""
        return self._derived(f"proof of the {self._role}")

    def check_proof(self, proof: bytes) -> None:
        """Check the proof of the other side, in constant time.

        Raises:
            HandshakeError: the proof is wrong.
        """
        other = "server" if self._role == "client" else "client"
        if not hmac.compare_digest(proof, self._derived(f"proof of the {other}")):
            raise HandshakeError("the other side does not know the secret", may_be_secret=True)

    def keys(self) -> SessionKeys:
        """Return the keys of the frames; both proofs have been checked."""
        of_client = self._derived("frames of the client")
        of_server = self._derived("frames of the server")
        if self._role == "client":
            return SessionKeys(sending=of_client, receiving=of_server)
        return SessionKeys(sending=of_server, receiving=of_client)

    def _derived(self, purpose: str) -> bytes:
        message = MAGIC + purpose.encode() + b"\0" + self._nonces
        return hmac.digest(self._secret, message, "sha256")


def check_secret(secret: object) -> None:
    """Check the secret of a peer.

    Raises:
        ConfigError: it is not bytes, or shorter than ``MIN_SECRET_BYTES``. The secret is not shown.
    """
    if not isinstance(secret, bytes):
        raise ConfigError(f"secret is a {shown(type(secret).__name__)}; it must be bytes")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"secret has {len(secret)} bytes; it must have at least {MIN_SECRET_BYTES}",
            hint='python -c "import secrets; print(secrets.token_urlsafe(32))" prints one',
        )
