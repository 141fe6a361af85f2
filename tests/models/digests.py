"""Digests, keys, checksums and trailers, from their definitions alone.

``python -m tests.models.digests`` prints the test vectors of ``tests/vectors/digests.json``: with
them and with the definitions here, another implementation can check itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct

U64 = 2**64
PRIME = 2**127 - 1
CHUNK_BYTES = 1024
MAGIC, VERSION = b"aikv", 1


def sha256(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def salt_label(context):
    """Return the label of the salt of a context, such as ``7:tenant1adapter``."""
    found = re.match(r"([0-9]+):(.*)", context, re.DOTALL)
    salt = found[2][: int(found[1])] if found else ""
    return sha256(b"aiokv salt 1\0", salt.encode())[:5]


def with_label(digest, label):
    return digest[:16] + label + digest[21:]


def root_digest(block_tokens, context):
    text = context.encode()
    root = sha256(b"aiokv root 2\0", struct.pack("<II", block_tokens, len(text)), text)
    return with_label(root, salt_label(context))


def item_key(items, first, block_tokens):
    """Return the key bytes of the block that begins at position ``first``; empty without items."""
    key = b""
    for content_hash, offset, length in items:
        if offset < first + block_tokens and offset + length > first:
            key += struct.pack("<q", len(content_hash)) + content_hash
            key += struct.pack("<qq", offset - first, length)
    return key


def block_digests(root, tokens, block_tokens, items=()):
    """Return the digests of the whole blocks of a prompt."""
    digests, parent = [], root
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[first : first + block_tokens]
        key = item_key(items, first, block_tokens)
        tail = struct.pack("<I", len(key)) + key if key else b""
        digest = sha256(parent, struct.pack(f"<{block_tokens}i", *block), tail)
        parent = with_label(digest, parent[16:21])
        digests.append(parent)
    return digests


def derive_key(fingerprint, digest):
    return sha256(fingerprint, digest)[:21] + fingerprint[-6:] + digest[16:21]


def _constants():
    stream = b"".join(sha256(b"aiokv checksum 1\0", struct.pack("<I", i)) for i in range(33))
    return words_of(stream[:CHUNK_BYTES]), int.from_bytes(stream[1024:1040], "little") & PRIME


def words_of(data):
    data += bytes(-len(data) % 16)
    return struct.unpack(f"<{len(data) // 8}Q", data)


def checksum(*parts):
    """Return the checksum, 16 bytes, of parts that each begin a new chunk."""
    keys, factor = _constants()
    total = 0
    for part in parts:
        for begin in range(0, len(part), CHUNK_BYTES):
            words = words_of(part[begin : begin + CHUNK_BYTES])
            nh = sum(
                (words[i] + keys[i]) % U64 * ((words[i + 1] + keys[i + 1]) % U64)
                for i in range(0, len(words), 2)
            )
            total = (total * factor + nh % 2**128) % PRIME
    return total.to_bytes(16, "little")


def trailer(payload, key):
    header = MAGIC + struct.pack("<IQ", VERSION, len(payload)) + key
    return header + checksum(payload, header)


def pattern(num_bytes):
    """Return the payload of the vectors: byte ``i`` is ``(i * i + 7 * i) % 251``."""
    return bytes((i * i + 7 * i) % 251 for i in range(num_bytes))


PROMPTS = (
    (16, "", range(40), ()),
    (16, "7:tenant1adapter", range(32), ()),
    (4, "2:éß", [-1, 2**31 - 1, -(2**31), 0] * 3, ()),
    (1, "", [5, 6], ()),
    (16, "", [7] * 64, [(bytes(32), 3, 20), (b"second", 30, 2), (b"x", 47, 1)]),
    (64, "", range(64), ()),
)
PAYLOADS = (0, 1, 16, 24, 1023, 1024, 1025, 4096, 10_000)


def vectors():
    prompts, keys = [], []
    fingerprint = sha256(b"a fingerprint")
    for block_tokens, context, tokens, items in PROMPTS:
        root = root_digest(block_tokens, context)
        digests = block_digests(root, list(tokens), block_tokens, items)
        prompts.append(
            {
                "block_tokens": block_tokens,
                "context": context,
                "tokens": list(tokens),
                "items": [[content.hex(), offset, length] for content, offset, length in items],
                "root": root.hex(),
                "digests": [digest.hex() for digest in digests],
            }
        )
        keys.append(
            {
                "fingerprint": fingerprint.hex(),
                "digest": digests[0].hex(),
                "key": derive_key(fingerprint, digests[0]).hex(),
            }
        )
    objects = [
        {
            "payload_bytes": size,
            "key": sha256(b"key %d" % size).hex(),
            "trailer": trailer(pattern(size), sha256(b"key %d" % size)).hex(),
        }
        for size in PAYLOADS
    ]
    return {"prompts": prompts, "keys": keys, "objects": objects}


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=1, ensure_ascii=False))
