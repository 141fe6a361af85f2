"""AssemblySlots: a slot has one owner, and is free again exactly once."""

from __future__ import annotations

from aiokv.peers.assembly import AssemblySlots


def test_slot_of_a_dropped_assembly_is_free_when_no_thread_writes_it():
    slots = AssemblySlots(2)
    assembly = slots.begin()
    assembly.placing += 2
    slots.drop(assembly)
    slots.end_write(assembly, (0, 0))
    assert slots.num_free == 1
    slots.end_write(assembly, (0, 1))
    assert slots.num_free == 2
    slots.drop(assembly)  # again, after an interrupt
    assert slots.violations(0) == []


def test_slot_of_an_assembly_that_goes_on_is_not_free_behind_a_write():
    slots = AssemblySlots(1)
    assembly = slots.begin()
    assembly.placing += 1
    slots.end_write(assembly, (1, 4))
    assert assembly.placed == {(1, 4)}
    assert slots.num_free == 0
    assert slots.violations(1) == []
    slots.free(assembly.slot)
    assert slots.violations(0) == []


def test_violations_name_slots_that_are_lost_or_free_twice():
    slots = AssemblySlots(3)
    slot = slots.begin().slot
    assert slots.violations(0) == ["0 assembly slots are used and 2 free, of 3: [0, 1]"]
    slots.free(slot)
    slots.free(slot)
    assert slots.violations(0) == ["0 assembly slots are used and 4 free, of 3: [0, 1, 2, 2]"]
