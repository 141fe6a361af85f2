"""Engines of one process that exchange blocks, over bytes that identify their prompts."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from aiokv import CacheConfig, CacheEngine, Peers
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.peers.slots import device_slot_bytes
from aiokv.peers.ticket import ticket_key
from aiokv.testing import ManualDevice, run_until_idle
from tests.harness.closing import close, complete_during
from tests.harness.side_memory import SideMemory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from aiokv import Lease, WindowGroup
    from aiokv.engine.sending import Sending
    from aiokv.peers.options import TransportName
    from aiokv.worker.device.base import Device

SECRET = "0123456789abcdef"
KEY = ticket_key(SECRET.encode())
BLOCK_TOKENS = 4


def prompt(length: int, seed: int = 1) -> np.ndarray:
    """Return tokens of a prompt; prompts of different seeds share none."""
    return np.arange(length, dtype=np.int32) + 100_000 * seed


class Side:
    """An engine with peers; checks at its end that it holds what it must, and no more.

    Args:
        device: cpu, or one whose copies the test completes.
        listen: as for ``Peers``.
        secret: as for ``Peers``.
        chunk_blocks: as for ``Peers``.
        transport: as for ``Peers``; ``default_transport`` by default.
        ring_blocks: landing slots, and outgoing slots.
        state_slots: of recurrent state, whose bytes identify the computed positions.
        windows: groups of sliding windows; ``compute`` checks that each position sees its window.
        layers: of the model.
        layer_ranges: as for ``Peers``.
        config: fields of the configuration.

    Attributes:
        default_transport: of the sides that a test makes.
    """

    default_transport: ClassVar[TransportName] = "tcp"

    def __init__(
        self,
        device: Device | None = None,
        *,
        listen: str | None = "127.0.0.1",
        secret: str = SECRET,
        chunk_blocks: int = 2,
        transport: TransportName | None = None,
        ring_blocks: int = 8,
        device_blocks: int = 64,
        host_blocks: int = 64,
        block_tokens: int = BLOCK_TOKENS,
        state_slots: int = 0,
        windows: Mapping[str, WindowGroup] | None = None,
        layers: int = 2,
        layer_ranges: int = 1,
        **config: Any,
    ) -> None:
        self.memory = self.new_memory(
            device_blocks,
            block_tokens,
            state_slots=state_slots,
            windows=windows or {},
            layers=layers,
        )
        self.device = device
        self.is_layered = layer_ranges > 1
        self.block_tokens = block_tokens
        slot_bytes = self.memory.largest_block_bytes + TRAILER_BYTES
        if (transport or self.default_transport) == "cuda_ipc":
            slot_bytes = device_slot_bytes(self.memory.largest_block_bytes)
        sizes = {"device_blocks": device_blocks, "host_blocks": host_blocks}
        sizes["state_slots"] = state_slots
        fields = {"model": "m", "block_tokens": block_tokens, **sizes, **config}
        fields["windows"] = windows or {}
        self.engine = CacheEngine(
            CacheConfig(**fields),
            self.memory.regions,
            device,
            peers=Peers(
                secret=secret,
                listen=listen,
                chunk_blocks=chunk_blocks,
                layer_ranges=layer_ranges,
                transport=transport or self.default_transport,
                ring_bytes=ring_blocks * slot_bytes,
                outgoing_bytes=ring_blocks * slot_bytes,
            ),
        )

    def new_memory(self, device_blocks: int, block_tokens: int, **sides: Any) -> SideMemory:
        """Return the tensors of the engine; ``sides`` as for ``SideMemory``."""
        return SideMemory(device_blocks, block_tokens, **sides)

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        if exc is None:
            await self.at_rest()
        await close(self.engine, self.device, exc)

    async def at_rest(self, *, empty: bool = False) -> None:
        """Wait until nothing moves; check that no lease and no slot is held.

        Args:
            empty: reset the cache, and check that all pools are full.
        """
        await run_until_idle(self.is_at_rest)
        if empty:
            await complete_during(self.engine.reset(), self.device)
            statistics = self.engine.statistics()
            assert statistics.attention.device.free == statistics.attention.device.blocks
            assert statistics.attention.host.free == statistics.attention.host.blocks
            assert not statistics.leases
        assert self.engine.check_invariants() == []
        assert self.engine.inspect.parts.worker.tickets.violations() == []  # type: ignore[attr-defined]
        (rank,) = self.engine.statistics().peers.ranks
        assert rank.free_slots == rank.landing_slots

    def is_at_rest(self) -> bool:
        """Return True if nothing moves and all slots are free."""
        if isinstance(self.device, ManualDevice):
            self.device.complete_all()
        statistics = self.engine.statistics()
        peers = self.engine.statistics().peers
        (rank,) = peers.ranks
        return (
            not statistics.releasing_leases
            and not peers.receiving + peers.sending
            and rank.free_slots == rank.landing_slots
        )

    # --- requests -------------------------------------------------------------------------------

    async def granted(self, tokens: np.ndarray, **names: Any) -> Lease:
        """Return a granted lease of a prompt."""
        lease = self.engine.match(tokens, **names)
        await lease.allocate(len(tokens))
        return lease

    def compute(self, lease: Lease, tokens: np.ndarray, first: int, end: int) -> None:
        """Write positions, as a model would, and commit them."""
        while first < end:
            stop = min(end, lease.max_extend_tokens)
            words = self.memory.position_words(tokens[:stop], lease.salt)
            self.memory.write(self._places(lease, first, stop), words[first:])
            self.memory.compute_sides(lease, words, first, stop)
            lease.commit(stop)
            first = stop

    def compute_layers(
        self,
        lease: Lease,
        tokens: np.ndarray,
        positions: range,
        sending: Sending,
        layers: range | None = None,
    ) -> None:
        """Write positions layer by layer, and name each layer; ``commit`` is the caller's.

        Args:
            lease: that is sent.
            tokens: of its prompt.
            positions: that are computed.
            sending: of the lease.
            layers: that are written; None for all.
        """
        words = self.memory.position_words(tokens[: positions.stop], lease.salt)
        places = self._places(lease, positions.start, positions.stop)
        for layer in layers or range(self.memory.layers):
            self.memory.write(places, words[positions.start :], range(layer, layer + 1))
            self.note_layers(sending.layers_done(positions.stop, layer + 1))

    def note_layers(self, mark: bytes) -> None:
        """Do nothing: without ranks, ``layers_done`` has noted the mark."""

    def finish(self, lease: Lease, tokens: np.ndarray, first: int) -> None:
        """Check the positions before ``first``, compute the others, and check all."""
        self.check(lease, tokens, first)
        if first < len(tokens):
            with self.engine.computing([lease]):
                self.compute(lease, tokens, first, len(tokens))
        self.check(lease, tokens)

    def check(self, lease: Lease, tokens: np.ndarray, end: int | None = None) -> None:
        """Compare the leading positions of a lease, all by default, with those of its prompt."""
        end = len(tokens) if end is None else end
        words = self.memory.position_words(tokens[:end], lease.salt)
        self.memory.check(self._places(lease, 0, end), words, lease.owner)

    def check_sides(self, lease: Lease, tokens: np.ndarray) -> None:
        """Compare the state and the windows of a lease that has computed, or received, a prompt."""
        words = self.memory.position_words(tokens, lease.salt)
        self.memory.check_sides(lease, words, len(tokens))

    def _places(self, lease: Lease, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(first, end)
        return lease.block_table[positions // self.block_tokens], positions % self.block_tokens

    async def serve(self, tokens: np.ndarray, **names: Any) -> None:
        """Compute and commit a prompt, and release it."""
        lease = await self.granted(tokens, **names)
        await lease.layers.wait_all()
        self.check(lease, tokens, lease.cached_tokens)
        self.compute(lease, tokens, lease.cached_tokens, len(tokens))
        lease.release()

    async def prefill(
        self,
        tokens: np.ndarray,
        ticket: bytes,
        *,
        step: int = 8,
        by_layer: bool | None = None,
        **names: Any,
    ) -> tuple[int, str | None]:
        """Compute a prompt and send it; return what was delivered, and the failure.

        Args:
            tokens: of the prompt.
            ticket: of the receiver.
            step: positions that are computed at once.
            by_layer: name each layer when it is computed; by default, with ``layer_ranges``.
            names: as for ``granted``.
        """
        by_layer = self.is_layered if by_layer is None else by_layer
        async with await self.granted(tokens, **names) as lease:
            async with self.engine.send(lease, ticket) as sending:
                await lease.layers.wait_all()
                done = lease.cached_tokens
                while done < len(tokens):
                    end = min(done + step, len(tokens))
                    for layer in range(self.memory.layers) if by_layer else ():
                        layers = range(layer, layer + 1)
                        self.compute_layers(lease, tokens, range(done, end), sending, layers)
                        await asyncio.sleep(0)
                    self.compute(lease, tokens, done, end)
                    done = end
                    await asyncio.sleep(0)
            return sending.delivered_tokens, sending.failure


@asynccontextmanager
async def two_engines(
    prefill: Side | None = None, decode: Side | None = None
) -> AsyncIterator[tuple[Side, Side]]:
    """Open a sending and a receiving engine."""
    async with prefill or Side(listen=None) as p, decode or Side() as d:
        yield p, d
        await run_until_idle(lambda: p.is_at_rest() and d.is_at_rest())
