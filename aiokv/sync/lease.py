"""SyncLease: a lease whose methods any thread may call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Self

from aiokv.base.checks import Unique
from aiokv.errors import LeaseError, UsageError
from aiokv.sync.layers import SyncLayers
from aiokv.sync.verbs import LeaseVerbs

if TYPE_CHECKING:
    from aiokv.base.types import Hit
    from aiokv.engine.lease import Lease
    from aiokv.sync.port import Port


class SyncLease(LeaseVerbs, Unique):
    """Blocks of one request: an :class:`aiokv.Lease` for threads; only the engine makes leases.

    Any thread may call any method. Each one crosses to the engine's thread and returns its answer,
    except ``block_table``, ``window_table`` and ``layers``, which do not cross: :class:`Calls` has
    the same methods for many leases in one crossing. Parameters, results and errors are those of
    the method of :class:`aiokv.Lease`. Methods that may wait return an :class:`EngineFuture`.

    A lease that is garbage-collected unreleased is released on the engine's loop, whichever thread
    collects it.

    Attributes:
        inner: the :class:`aiokv.Lease`, for functions that run on the engine's loop. Before the
            match, it raises ``UsageError``; after a failed match, ``LeaseError``.
        hit: cached prefix in tokens by tier that the match has found; raises as ``inner`` does.
        cached_tokens: number of leading positions of the grant that need no computing; 0 before the
            grant. ``recompute_from`` decreases it after a failed onload.
        match_error: error of the match; None without one.
    """

    __slots__ = ("__weakref__", "_port", "cached_tokens", "hit", "inner", "match_error")

    inner: Lease
    hit: Hit

    def __init__(self, port: Port) -> None:
        self._port = port
        self.match_error: BaseException | None = None
        self.cached_tokens = 0

    # --- without a crossing -----------------------------------------------------------------------

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise the error of ``inner`` and ``hit`` before the match, which sets them."""
            if name not in ("inner", "hit"):
                raise AttributeError(f"SyncLease has no attribute {name!r}")
            if self.match_error is None:
                raise UsageError("this lease is not matched yet", hint="call run() first")
            raise LeaseError(
                f"this lease was not matched: {self.match_error}"
            ) from self.match_error

    @property
    def layers(self) -> SyncLayers:
        """Layers of the transfers that this lease waits for."""
        return SyncLayers(self._port, self.inner.layers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        try:
            return f"<Sync{repr(self.inner)[1:]}"
        except UsageError:
            return f"<SyncLease, not matched{'' if self.match_error else ' yet'}>"
