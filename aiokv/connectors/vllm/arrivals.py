"""Arrivals: tells vLLM that loads have ended, before the output of a step does.

A worker reports the end of a load when it submits a step, and vLLM reads the report with the output
of this step, while it computes the next one. So a request begins up to two steps late. The
scheduler half sees the end of a load at once, and adds it to the report that vLLM reads next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.connectors.vllm.requests import CachedRequest


class Arrivals:
    """Loads of which vLLM was told, and of whose end the workers have yet to report."""

    def __init__(self) -> None:
        self._unreported: set[str] = set()

    def is_unreported(self, request_id: str) -> bool:
        """Return True if vLLM was told of a load whose end the workers have yet to report."""
        return request_id in self._unreported

    def add_to(
        self, reported: set[str] | None, loading: Mapping[str, CachedRequest]
    ) -> set[str] | None:
        """Return the requests whose loads have ended, each load once.

        A load that has failed is left to the workers, which report its blocks with it.

        Args:
            reported: requests that the workers have reported.
            loading: requests that wait for a load, or hold loaded blocks.
        """
        ended = set(reported or ())
        for request_id in ended:
            if request_id in loading and (onload := loading[request_id].onload) is not None:
                onload.is_told = True
        known = ended & self._unreported
        self._unreported -= known
        ended -= known
        for request_id, cached in loading.items():
            onload = cached.onload
            if onload is None or onload.is_told or onload.layers is None:
                continue
            if onload.layers.has_arrived:
                onload.is_told = True
                self._unreported.add(request_id)
                ended.add(request_id)
        return ended or None
