"""Labels: short hashes at the end of each key, for counting and purging the blocks of a store.

The last bytes of a key are the labels of the model, of the version of its weights, and of the salt.
Names are in no store. Labels of two names may be equal by chance: a purge then removes blocks of
both salts, which are computed again. Which block a key names depends on the rest of the key alone.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from aiokv import _native
from aiokv.base import checks
from aiokv.stores.base import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Kind = Literal["model", "version", "salt"]

KINDS: Final[Mapping[Kind, slice]] = {
    "model": slice(21, 24),
    "version": slice(24, 27),
    "salt": slice(27, 32),
}
"""Places of the labels in a key."""
MAX_LABELS: Final = 20
"""Number of labels of each kind that are counted, those with the most blocks; the others are
``"other"``."""


def label(kind: Kind, name: str) -> bytes:
    """Return the label of a salt, a model or a version of its weights.

    Raises:
        UsageError: ``name`` is not valid Unicode.
    """
    if kind == "salt":
        return _native.salt_label(checks.text("salt", name))
    place = KINDS[kind]
    text = checks.text(kind, name).encode()
    return hashlib.sha256(b"aiokv %b 1\0%b" % (kind.encode(), text)).digest()[
        : place.stop - place.start
    ]


def fingerprint_of(text: bytes, model: str, weights_version: str) -> bytes:
    """Return the fingerprint of a text: the beginning of its hash, and the labels for its keys."""
    labels = label("model", model) + label("version", weights_version)
    return hashlib.sha256(text).digest()[: KEY_BYTES - len(labels)] + labels


def digest_of(text: bytes, salt: str = "") -> bytes:
    """Return a digest of an object that has no tokens, with the label of its salt."""
    hashed, salt_label = hashlib.sha256(text).digest(), label("salt", salt)
    return hashed[:16] + salt_label + hashed[16 + len(salt_label) :]


def ends_with(keys: NDArray[np.uint8], label: bytes) -> NDArray[np.bool_]:
    """Return which keys, ``[N, KEY_BYTES]``, end with a label."""
    end = np.frombuffer(label, np.uint8)
    return np.asarray((keys[:, KEY_BYTES - len(label) :] == end).all(axis=1))


def has_label(keys: NDArray[np.uint8], kind: Kind, name: str) -> NDArray[np.bool_]:
    """Return which keys, ``[N, KEY_BYTES]``, have the label of a name."""
    return np.asarray(labels_of(keys, kind) == np.void(label(kind, name)))


def labels_of(keys: NDArray[np.uint8], kind: Kind) -> NDArray[np.void]:
    """Return the label of each key, ``[N]``.

    Args:
        keys: ``[N, KEY_BYTES]``.
        kind: kind of the label.
    """
    place = KINDS[kind]
    chosen = np.ascontiguousarray(keys[:, place])
    return chosen.view(f"V{place.stop - place.start}").reshape(-1)


def usage(counts: Mapping[str, Mapping[bytes, int]], total: int) -> dict[str, int]:
    """Return blocks by label, such as ``"salt:6e340b9cff"``: the largest ones, and the rest.

    Args:
        counts: blocks by label; those of the largest labels suffice.
        total: number of blocks.
    """
    blocks: dict[str, int] = {}
    for kind, by_label in counts.items():
        largest = sorted(by_label, key=lambda name: (-by_label[name], name))[:MAX_LABELS]
        blocks |= {f"{kind}:{name.hex()}": by_label[name] for name in largest}
        if rest := total - sum(by_label[name] for name in largest):
            blocks[f"{kind}:other"] = rest
    return blocks


def count_labels(keys: NDArray[np.uint8]) -> dict[str, int]:
    """Return the number of keys by label, as ``usage``; ``keys`` is ``[N, KEY_BYTES]``."""
    counts: dict[str, dict[bytes, int]] = {}
    for kind in KINDS:
        names, numbers = np.unique(labels_of(keys, kind), return_counts=True)
        counts[kind] = dict(zip((name.tobytes() for name in names), numbers.tolist(), strict=True))
    return usage(counts, len(keys))
