"""Memory of a worker: the device tensors and the host arena, allocated or asleep."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from aiokv.base.groups import ATTENTION, STATE, layers_group, retention_of
from aiokv.base.plan import PEER_ROUTES, STORE_ROUTES, Pool
from aiokv.base.statistics import BlockSizes
from aiokv.errors import ClosedError, ConfigError, LayoutError, UsageError
from aiokv.layout.host_block import pitch_bytes
from aiokv.stores.base import KEY_BYTES, StoreMemory
from aiokv.worker.arena import HostArena
from aiokv.worker.base import UNLIMITED_BLOCKS
from aiokv.worker.device.base import blocks_of, host_pool
from aiokv.worker.device.cpu import device_blocks
from aiokv.worker.ids import check_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiokv.base.plan import AnyTier, Route, TransferPlan
    from aiokv.base.types import Tier
    from aiokv.layout.regions import Regions
    from aiokv.worker.checksums import Checksums
    from aiokv.worker.device.base import Device, DeviceSlots


_BLOCKS: Final = Pool(ATTENTION, "host")

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
        peer_slots_on_device: these slots are in the memory of the device.
        peer_slots: returns the slots, and the bytes of each, of the memory through which blocks
            move from and to peers; None without peers.
        peer_layers: returns the ranges of layers in which blocks move from and to peers.

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
        peer_slots: Callable[[Regions], tuple[int, int]] | None = None,
        peer_slots_on_device: bool = False,
        peer_layers: Callable[[Regions], list[tuple[int, int]]] = lambda regions: [],
    ) -> None:
        self._peer_layers = peer_layers
        self.regions = regions
        self._has_stores = has_stores
        self._host_state_slots = host_state_slots
        self._host_sizes: dict[str, int] = {}  # blocks in host memory, by group
        self._peer_slots = peer_slots
        self._peer_slots_on_device = peer_slots_on_device
        self._device_slots: DeviceSlots | None = None
        self._device = device
        self._checksums = checksums
        self._addresses: set[int] = set()  # addresses of this worker's tensors
        self._arena: HostArena | None = None
        self._side_arenas: dict[
            Pool, HostArena
        ] = {}  # arenas of state slots, window groups and peers
        self._copy_sizes: dict[tuple[str, Route], tuple[int, int]] = {}  # see _copy_size()
        self._payloads: dict[str, tuple[int, int]] = {}  # with stores: blocks, bytes of each
        self.asleep: frozenset[Tier] = frozenset()

    def open(self, host_blocks: int, host_windows: Mapping[str, int] | None = None) -> None:
        """Reserve host memory, and attach the device. Called once.

        Args:
            host_blocks: blocks of the host tier.
            host_windows: blocks of each window group in host memory.

        Raises:
            UsageError: another open engine has the device or a tensor. Nothing changed.
            ConfigError: there is no memory for the host tier. Nothing changed.
            LayoutError: the device cannot reach the tensors. Nothing changed.
        """
        others = {**(host_windows or {}), STATE: self._host_state_slots}
        self._host_sizes = {name: size for name, size in others.items() if size}
        self._host_sizes[ATTENTION] = host_blocks
        self._claim_tensors(self.regions)
        try:
            self._claim_device()
            arena, side_arenas = self._new_arena(), self._new_side_arenas()
            self._attach(arena, side_arenas)
        except BaseException:
            self._disclaim()
            raise
        self._arena, self._side_arenas = arena, side_arenas

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
    def peer_arena(self) -> HostArena:
        """Slots of the blocks that move from and to peers.

        Raises:
            UsageError: the worker has no peers, or was not opened.
        """
        slots = Pool(ATTENTION, "peer")
        if slots not in self._side_arenas:
            raise UsageError(
                "the worker has no memory for peers", hint="pass peers= to the engine, and open it"
            )
        return self._side_arenas[slots]

    @property
    def device_slots(self) -> DeviceSlots | None:
        """Slots for peers in the memory of the device; None if they are in host memory."""
        return self._device_slots

    @property
    def store_memories(self) -> dict[str, StoreMemory]:
        """The host memory of each group as the stores see it.

        Each group gets the part of a store's limit that it has of the host memory.

        Raises:
            ClosedError: the worker was not opened, or the host tier is asleep.
        """
        # Without the arenas of peers, because fragments in transit are not stored.
        arenas: dict[Pool, HostArena] = {_BLOCKS: self.arena}
        arenas |= {pool: own for pool, own in self._side_arenas.items() if pool.tier != "peer"}
        num_bytes = sum(arena.nbytes for arena in arenas.values())
        return {
            pool.group: StoreMemory(
                address=arena.pointer,
                num_blocks=arena.num_blocks,
                pitch_bytes=arena.pitch_bytes,
                payload_bytes=blocks_of(self.regions, pool).payload_bytes,
                view=arena.blocks.reshape(-1).data,
                group=pool.group,
                quota_share=arena.nbytes / num_bytes,
            )
            for pool, arena in arenas.items()
        }

    @property
    def device_blocks(self) -> int:
        """Blocks that the tensors hold; ``UNLIMITED_BLOCKS`` without tensors."""
        return device_blocks(self.regions)

    def pitch_bytes(self, group: str = ATTENTION) -> int:
        """Return the bytes that a block of a group takes in host memory."""
        payload_bytes = self.regions.group_blocks(group).payload_bytes
        return pitch_bytes(payload_bytes, with_stores=self._has_stores)

    @cached_property
    def block_sizes(self) -> dict[str, BlockSizes]:
        """Bytes of one block of each group that has tensors; the layout of tensors is constant."""
        sizes = {}
        for group in (ATTENTION, *self.regions.groups):
            device = self.regions.group_blocks(group).block_bytes
            if device:
                sizes[group] = BlockSizes(device=device, host=self.pitch_bytes(group))
        return sizes

    def check(self, plan: TransferPlan) -> int:
        """Return the bytes that a plan moves.

        Raises:
            UsageError: no blocks, unequal lists, ids out of range, a duplicate destination, a
                missing digest, or a route that the worker does not have.
        """
        if self._has_stores and plan.route in STORE_ROUTES:
            memory = self._payloads.get(plan.group)
            if memory is None:
                raise UsageError(
                    f"transfer {plan.transfer_id}: the group {plan.group!r} has no host memory"
                )
            num_blocks, payload_bytes = memory
            check_ids(plan, {"host": num_blocks, "store": UNLIMITED_BLOCKS})
            if len(plan.digests) != KEY_BYTES * plan.num_blocks:
                raise UsageError(
                    f"transfer {plan.transfer_id}: digests has {len(plan.digests)} bytes; it must "
                    f"have {KEY_BYTES} for each of the {plan.num_blocks} blocks"
                )
            return payload_bytes * plan.num_blocks
        if plan.route in PEER_ROUTES and self._peer_slots is None:
            raise UsageError(
                f"transfer {plan.transfer_id}: the route is {plan.route}, but the worker has no "
                "peers"
            )
        if plan.group_route not in self._device.routes:
            raise UsageError(
                f"transfer {plan.transfer_id}: the device {self._device.name!r} has no route "
                f"{plan.route} for the group {plan.group!r}"
            )
        is_window = retention_of(plan.group) == "window"
        if is_window:
            self._check_window(plan)
        num_blocks, block_bytes = self._copy_size(plan.group, plan.route)
        if plan.num_blocks or not (is_window and plan.route in PEER_ROUTES):
            sizes: dict[AnyTier, int] = {
                "device": num_blocks,
                "host": self._host_sizes.get(plan.group, 0),
                "store": UNLIMITED_BLOCKS,
                "peer": UNLIMITED_BLOCKS,
            }
            check_ids(plan, sizes)
        return block_bytes * plan.num_blocks

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
        arena, side_arenas = old_arena, self._side_arenas
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
                arena, side_arenas = self._new_arena(), self._new_side_arenas()
            if waking == self.asleep:
                self._attach(arena, side_arenas)
        except BaseException:
            self._device.detach(keep_host="host" not in self.asleep)
            self._bind(previous)
            if arena is not old_arena:
                _close(arena, side_arenas)
            raise
        self._arena, self._side_arenas = arena, side_arenas
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
        self._copy_sizes.clear()
        self._keep_tensors({piece.pointer for piece in regions.all_pieces()})
        if self._checksums is not None:
            self._checksums.bind(regions)

    def _new_arena(self) -> HostArena:
        return self._arena_of(ATTENTION, self._host_sizes[ATTENTION])

    def _new_side_arenas(self) -> dict[Pool, HostArena]:
        """Return new host memory for the other groups, and for peers."""
        arenas = {
            Pool(group, "host"): self._arena_of(group, num_blocks)
            for group, num_blocks in self._host_sizes.items()
            if group != ATTENTION
        }
        if self._peer_slots is not None and not self._peer_slots_on_device:
            slots, slot_bytes = self._peer_slots(self.regions)
            arena = HostArena(num_blocks=slots, pitch_bytes=slot_bytes)
            arenas |= {Pool(group, "peer"): arena for group in self._sent_groups()}
        return arenas

    def _sent_groups(self) -> list[str]:
        """Return the groups, and the ranges of layers, that peers exchange."""
        ranges = [layers_group(*layers) for layers in self._peer_layers(self.regions)]
        states = [STATE] if self.regions.state_pieces else []
        return [ATTENTION, *ranges, *states, *self.regions.num_window_blocks]

    def _arena_of(self, group: str, num_blocks: int) -> HostArena:
        if self._has_stores:
            payload_bytes = self.regions.group_blocks(group).payload_bytes
            self._payloads[group] = num_blocks, payload_bytes
        return HostArena(num_blocks=num_blocks, pitch_bytes=self.pitch_bytes(group))

    def _close_arenas(self) -> None:
        _close(self.arena, self._side_arenas)

    def _attach(self, arena: HostArena, side_arenas: Mapping[Pool, HostArena]) -> None:
        if side_arenas:
            self._device.attach(self.regions, arena, side_arenas)
        else:
            self._device.attach(self.regions, arena)
        if self._peer_slots is not None and self._peer_slots_on_device:
            self._device_slots = self._open_device_slots(*self._peer_slots(self.regions))

    def _open_device_slots(self, num_slots: int, slot_bytes: int) -> DeviceSlots:
        open_slots: Any = getattr(self._device, "open_peer_slots", None)
        if open_slots is None:
            raise ConfigError(
                f"the device {self._device.name!r} has no memory for peers",
                hint="use another Peers(transport=...), or the cuda device",
            )
        try:
            slots: DeviceSlots = open_slots(num_slots, slot_bytes)
        except BaseException:
            self._device.detach(keep_host=False)
            raise
        return slots

    def _copy_size(self, group: str, route: Route) -> tuple[int, int]:
        """Return the device blocks of a group, and the bytes per block that a route copies."""
        size = self._copy_sizes.get((group, route))
        if size is None:
            blocks = blocks_of(self.regions, host_pool(route, group))
            size = self._copy_sizes[group, route] = device_blocks(blocks), blocks.block_bytes
        return size

    def _check_window(self, plan: TransferPlan) -> None:
        """Raise unless the window group of a plan has the memory of its route."""
        what = f"transfer {plan.transfer_id}"
        if plan.route in PEER_ROUTES:
            if plan.group not in self.regions.num_window_blocks:
                raise UsageError(f"{what}: there are no tensors of the window group {plan.group!r}")
        elif plan.group not in self._host_sizes:
            raise UsageError(
                f"{what}: the window group {plan.group!r} has no blocks in host memory"
            )


def _close(arena: HostArena, side_arenas: Mapping[Pool, HostArena]) -> None:
    for each in (arena, *side_arenas.values()):
        each.close()
