"""Memory of a worker: the device tensors and the host arena, allocated or asleep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from aiokv.errors import ClosedError, LayoutError, UsageError
from aiokv.plan import FETCH_ROUTES, SAVE_ROUTES, STATE_ROUTES
from aiokv.stores.base import KEY_BYTES, StoreMemory, store_pitch_bytes
from aiokv.worker.arena import HostArena
from aiokv.worker.base import UNLIMITED_BLOCKS
from aiokv.worker.device.cpu import device_blocks
from aiokv.worker.ids import check_ids

if TYPE_CHECKING:
    from aiokv.plan import Pool, TransferPlan
    from aiokv.types import Tier
    from aiokv.worker.checksums import Checksums
    from aiokv.worker.device.base import Device
    from aiokv.worker.regions import Regions


_devices: Final[WeakValueDictionary[int, WorkerMemory]] = WeakValueDictionary()  # by id()
_tensors: Final[WeakValueDictionary[int, WorkerMemory]] = WeakValueDictionary()  # by address


class WorkerMemory:
    """Memory of both tiers, attached to a device.

    A device, and a tensor, belong to one open worker of the process: the copies of a second one
    would go to the memory of the first, or overwrite its blocks.

    Args:
        regions: the device tensors, borrowed until ``close()``.
        device: attached by ``open()``, closed by ``close()``.
        checksums: gets the new tensors whenever they change.
        has_stores: stores access the host blocks, which are aligned and have a trailer then.
        host_state_slots: slots of recurrent state in host memory.

    Attributes:
        regions: the device tensors now; without memory while the device tier sleeps.
        asleep: tiers whose memory was released.
    """

    def __init__(
        self,
        regions: Regions,
        device: Device,
        checksums: Checksums | None,
        *,
        has_stores: bool = False,
        host_state_slots: int = 0,
    ) -> None:
        self.regions = regions
        self._has_stores = has_stores
        self._host_state_slots = host_state_slots
        self._host_blocks = 0
        self._device = device
        self._checksums = checksums
        self._block_bytes = 0
        self._addresses: set[int] = set()  # of the tensors that are this worker's
        self._arena: HostArena | None = None
        self._state_arena: HostArena | None = None  # None without slots in host memory
        self._num_blocks: dict[Pool, int] = {}
        self.asleep: frozenset[Tier] = frozenset()

    def open(self, host_blocks: int) -> None:
        """Reserve memory for ``host_blocks`` blocks, and attach the device. Called once.

        Raises:
            UsageError: another open engine has the device or a tensor. Nothing changed.
            ConfigError: there is no memory for the host tier. Nothing changed.
            LayoutError: the device cannot reach the tensors. Nothing changed.
        """
        self._host_blocks = host_blocks
        self._block_bytes = self.regions.block_bytes
        self._claim_tensors(self.regions)
        try:
            self._claim_device()
            arena, state_arena = self._new_arena(), self._new_state_arena()
            self._attach(arena, state_arena)
        except BaseException:
            self._disclaim()
            raise
        self._arena, self._state_arena = arena, state_arena
        self._num_blocks = self._sizes()

    @property
    def arena(self) -> HostArena:
        """Memory of the host tier.

        Raises:
            ClosedError: the worker was not opened.
        """
        if self._arena is None:
            raise ClosedError("the host tier has no memory: the worker was not opened")
        return self._arena

    @property
    def store_memories(self) -> dict[Pool, StoreMemory]:
        """The pools of host memory as the stores see them.

        Each pool gets the part of a store's limit that it has of the host memory.

        Raises:
            ClosedError: the worker was not opened, or the host tier is asleep.
        """
        arenas: dict[Pool, HostArena] = {"host": self.arena}
        if self._state_arena is not None:
            arenas["host_state"] = self._state_arena
        num_bytes = sum(arena.nbytes for arena in arenas.values())
        return {
            pool: StoreMemory(
                address=arena.pointer,
                num_blocks=arena.num_blocks,
                pitch_bytes=arena.block_bytes,
                payload_bytes=self._payload_bytes(pool),
                view=arena.blocks.reshape(-1).data,
                pool=pool,
                quota_share=arena.nbytes / num_bytes,
            )
            for pool, arena in arenas.items()
        }

    def _payload_bytes(self, pool: Pool) -> int:
        """Return the bytes that the device tier copies to a block of a pool of host memory."""
        regions = self.regions if pool == "host" else self.regions.state_blocks()
        return regions.host_block_bytes

    @property
    def device_blocks(self) -> int:
        """Blocks that the tensors hold; ``UNLIMITED_BLOCKS`` without tensors."""
        return device_blocks(self.regions)

    def check(self, plan: TransferPlan) -> int:
        """Return the bytes that a plan moves.

        Raises:
            UsageError: no blocks, unequal lists, ids out of range, a duplicate destination, a
                missing digest, or a route that the worker does not have.
        """
        if self._has_stores and plan.route in FETCH_ROUTES | SAVE_ROUTES:
            check_ids(plan, self._num_blocks)
            if len(plan.digests) != KEY_BYTES * plan.num_blocks:
                raise UsageError(
                    f"transfer {plan.transfer_id}: digests has {len(plan.digests)} bytes; it must "
                    f"have {KEY_BYTES} for each of the {plan.num_blocks} blocks"
                )
            pool = plan.route.target if plan.route in FETCH_ROUTES else plan.route.source
            return self._payload_bytes(pool) * plan.num_blocks
        if plan.route not in self._device.routes:
            raise UsageError(
                f"transfer {plan.transfer_id}: the device {self._device.name!r} has no route "
                f"{plan.route}"
            )
        check_ids(plan, self._num_blocks)
        if plan.route in STATE_ROUTES:
            return self.regions.state_slot_bytes * plan.num_blocks
        return self._block_bytes * plan.num_blocks

    def sleep(self, tiers: frozenset[Tier]) -> None:
        """Free the host arena, or the views of the device tensors. Idempotent."""
        falling = tiers - self.asleep
        if not falling:
            return
        self.asleep |= falling
        self._device.detach(keep_host="host" not in self.asleep)
        if "device" in falling:
            self._bind(self.regions.without_tensors())
        if "host" in falling:
            self._close_arenas()

    def wake_up(self, tiers: frozenset[Tier], regions: Regions | None = None) -> None:
        """Allocate a new arena, and bind ``regions``; tiers that are awake stay as they are.

        A cuda device pins the arena in the background, and may be used meanwhile.

        Raises:
            LayoutError: the tensors have another layout than the old ones. Still asleep.
            ConfigError: no memory for the arena. Still asleep.
        """
        waking = tiers & self.asleep
        if not waking:
            return
        previous, old_arena = self.regions, self.arena
        arena, state_arena = old_arena, self._state_arena
        if "device" in waking:
            regions = previous if regions is None and not previous.num_layers else regions
            if regions is None:
                raise LayoutError(
                    "wake_up: regions is None; the device tier needs its tensors",
                    hint="pass regions= with the new tensors",
                )
            previous.check_layout(regions)
            self._claim_tensors(regions)
            self._bind(regions)
        try:
            if "host" in waking:
                arena, state_arena = self._new_arena(), self._new_state_arena()
            if waking == self.asleep:
                self._attach(arena, state_arena)
        except BaseException:
            self._device.detach(keep_host="host" not in self.asleep)
            self._bind(previous)
            if arena is not old_arena:
                arena.close()
                if state_arena is not None:
                    state_arena.close()
            raise
        self._arena, self._state_arena = arena, state_arena
        self.asleep -= waking

    def close(self) -> None:
        """Close the device, then free the arena; no transfer is in flight. Called once."""
        if self._arena is None:
            return
        self._device.close()
        self._close_arenas()
        self._disclaim()

    def _claim_device(self) -> None:
        if _devices.setdefault(id(self._device), self) is not self:
            raise UsageError(
                f"the device {self._device.name!r} belongs to another engine that is open",
                hint="create one device per engine, or close the other engine first",
            )

    def _claim_tensors(self, regions: Regions) -> None:
        """Claim tensors before they are bound; earlier ones stay claimed until then."""
        pieces = [piece for piece in regions.all_pieces() if piece.pointer]
        for piece in pieces:
            if _tensors.get(piece.pointer, self) is not self:
                raise UsageError(
                    f"the tensor of region {piece.region!r}, layer {piece.layer}, belongs to "
                    "another engine that is open",
                    hint="register each tensor with one engine, or close the other engine first",
                )
        self._addresses.update(piece.pointer for piece in pieces)
        _tensors.update(dict.fromkeys(self._addresses, self))

    def _disclaim(self) -> None:
        """Let other workers use the device and the tensors."""
        self._keep_tensors(set())
        if _devices.get(id(self._device)) is self:
            del _devices[id(self._device)]

    def _keep_tensors(self, addresses: set[int]) -> None:
        for address in self._addresses - addresses:
            _tensors.pop(address, None)
        self._addresses &= addresses

    def _bind(self, regions: Regions) -> None:
        self.regions = regions
        self._keep_tensors({piece.pointer for piece in regions.all_pieces()})
        self._num_blocks = self._sizes()
        if self._checksums is not None:
            self._checksums.bind(regions)

    def _new_arena(self) -> HostArena:
        return HostArena(num_blocks=self._host_blocks, block_bytes=self._pitch_bytes("host"))

    def _new_state_arena(self) -> HostArena | None:
        if not self._host_state_slots:
            return None
        pitch_bytes = self._pitch_bytes("host_state")
        return HostArena(num_blocks=self._host_state_slots, block_bytes=pitch_bytes)

    def _pitch_bytes(self, pool: Pool) -> int:
        payload_bytes = self._payload_bytes(pool)
        return store_pitch_bytes(payload_bytes) if self._has_stores else payload_bytes

    def _close_arenas(self) -> None:
        self.arena.close()
        if self._state_arena is not None:
            self._state_arena.close()

    def _attach(self, arena: HostArena, state_arena: HostArena | None) -> None:
        if state_arena is None:
            self._device.attach(self.regions, arena)
        else:
            self._device.attach(self.regions, arena, state_arena)

    def _sizes(self) -> dict[Pool, int]:
        slots = self.regions.num_state_slots
        return {
            "device": self.device_blocks,
            "host": self._host_blocks,
            "state": UNLIMITED_BLOCKS if slots is None else slots,
            "store": UNLIMITED_BLOCKS,
            "host_state": self._host_state_slots,
        }
