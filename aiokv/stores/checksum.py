"""Checksum of what stores keep beside blocks: headers of bundles, and files of a write budget."""

from __future__ import annotations

import hashlib
from typing import Final

CHECKSUM_BYTES: Final = 16


def checksum(body: bytes) -> bytes:
    """Return the checksum of some bytes; it detects damage, and is not a signature."""
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest()
