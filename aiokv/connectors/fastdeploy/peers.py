"""Peers of FastDeploy's workers, which send prompts to decode servers, or receive them."""

from __future__ import annotations

import os
from typing import Any, Final

from aiokv import Peers

SECRET_VARIABLE: Final = "AIOKV_PEERS_SECRET"
TRANSPORT_VARIABLE: Final = "AIOKV_PEERS_TRANSPORT"

LAYER_RANGES: Final = 4  # parts of the layers that move while the model computes the others


def peers_of(config: Any) -> Peers | None:
    """Return the peers of a server for prefill only, or for decoding only.

    Args:
        config: the ``FDConfig``, or any object with its fields. Its ``host_ip`` is the address at
            which decode servers listen.

    Returns:
        None without ``AIOKV_PEERS_SECRET``, and with the role "mixed".

    Raises:
        ConfigError: the secret is too short, or the transport unknown; see :class:`aiokv.Peers`.
    """
    role = getattr(getattr(config, "scheduler_config", None), "splitwise_role", "mixed")
    secret = os.environ.get(SECRET_VARIABLE)
    if not secret or role not in ("prefill", "decode"):
        return None
    transport: Any = os.environ.get(TRANSPORT_VARIABLE, "tcp")
    return Peers(
        secret=secret,
        listen=config.host_ip if role == "decode" else None,
        transport=transport,
        layer_ranges=1 if transport == "cuda_ipc" else LAYER_RANGES,
    )


def layer_ends(num_layers: int) -> tuple[int, ...]:
    """Return the ends of the ranges of layers, but for the last one.

    The last range is sent when the positions are committed. ``cuda_ipc`` sends whole blocks only.
    """
    if os.environ.get(TRANSPORT_VARIABLE) == "cuda_ipc":
        return ()
    ranges = min(LAYER_RANGES, num_layers)
    return tuple(number * num_layers // ranges for number in range(1, ranges))
