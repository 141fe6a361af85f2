"""LandingRing: credits, generations, fairness and quarantine; nothing is lost (I11)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aiokv.errors import InternalError, UsageError
from aiokv.peers.messages import SlotCredit
from aiokv.peers.ring import LandingRing


def granted(ring: LandingRing[str]) -> dict[str, list[SlotCredit]]:
    return dict(ring.grant())


def landed(ring: LandingRing[str], connection: str) -> SlotCredit:
    ring.want(connection, 1)
    (credit,) = granted(ring)[connection]
    assert ring.land(connection, credit)
    ring.landed(credit.slot)
    return credit


@pytest.mark.parametrize("num_slots", [0, -1, True, "2", 1.5])
def test_number_of_slots_is_checked(num_slots):
    with pytest.raises(UsageError, match="num_slots"):
        LandingRing(num_slots)


def test_credits_are_given_for_what_is_wanted_and_free():
    ring = LandingRing(3)
    assert ring.grant() == []
    ring.want("a", 2)
    assert granted(ring) == {"a": [(0, 1), (1, 1)]}
    ring.want("a", 2)
    assert granted(ring) == {"a": [(2, 1)]}
    assert ring.grant() == []
    assert ring.statistics().wanted == 1


def test_connection_with_fewer_credits_gets_the_next_slot():
    ring = LandingRing(6)
    ring.want("greedy", 100)
    assert len(granted(ring)["greedy"]) == 6
    ring.want("late", 2)
    for slot in range(3):
        assert ring.give_back("greedy", SlotCredit(slot, 1))
    assert granted(ring) == {"late": [(0, 2), (1, 2)], "greedy": [(2, 2)]}


def test_free_slots_are_shared_equally_by_those_that_wait():
    ring = LandingRing(7)
    for connection in "abc":
        ring.want(connection, 100)
    assert {c: len(slots) for c, slots in granted(ring).items()} == {"a": 3, "b": 2, "c": 2}


def test_stalled_connection_does_not_stop_others():
    ring = LandingRing(2)
    ring.want("stalled", 1)
    granted(ring)
    for _ in range(100):
        ring.free(landed(ring, "running").slot)


def test_connections_that_wait_for_the_same_slot_take_turns():
    ring = LandingRing(1)
    order = []
    for connection in "abc":
        ring.want(connection, 3)
    for _ in range(9):
        ((connection, (credit,)),) = ring.grant()
        order.append(connection)
        assert ring.land(connection, credit)
        ring.landed(credit.slot)
        ring.free(credit.slot)
    assert order == list("abcabcabc")
    assert ring.is_idle


def test_each_grant_of_a_slot_has_another_generation():
    ring = LandingRing(1)
    for generation in range(1, 5):
        credit = landed(ring, "a")
        assert credit == (0, generation)
        ring.free(0)


@pytest.mark.parametrize("credit", [(0, 2), (0, 0), (1, 1), (-1, 1), (2, 1), (1 << 40, 1)], ids=str)
def test_fragment_without_its_credit_is_stale(credit):
    ring = LandingRing(2)
    ring.want("a", 1)
    assert granted(ring) == {"a": [(0, 1)]}
    before = ring.statistics()
    assert not ring.land("a", SlotCredit(*credit))
    assert not ring.give_back("a", SlotCredit(*credit))
    assert ring.statistics().stale == before.stale + 1
    assert ring.statistics().granted == 1
    assert ring.violations() == []


def test_fragment_of_another_connection_is_stale():
    ring = LandingRing(1)
    ring.want("a", 1)
    (credit,) = granted(ring)["a"]
    assert not ring.land("b", credit)
    assert ring.land("a", credit)
    assert not ring.land("a", credit)


def test_late_fragment_of_an_earlier_generation_is_stale():
    ring = LandingRing(1)
    ring.want("a", 1)
    (early,) = granted(ring)["a"]
    ring.give_back("a", early)
    landed(ring, "a")
    ring.free(0)
    ring.want("a", 1)
    granted(ring)
    assert not ring.land("a", early)


def test_revoke_that_an_interrupt_repeats_returns_the_same_slots():
    """The caller must learn that the peer may still write."""
    ring = LandingRing(3)
    ring.want("a", 2)
    ring.grant()
    assert ring.revoke("a", may_write=True) == [0, 1]
    assert ring.revoke("a", may_write=True) == [0, 1]
    assert ring.confirm("a") == 2
    assert ring.violations() == []
    assert ring.is_idle


def test_slot_whose_fragment_is_being_copied_is_not_granted_and_not_revoked():
    ring = LandingRing(1)
    credit = landed(ring, "a")
    ring.want("b", 1)
    assert ring.grant() == []
    assert ring.revoke("a", may_write=True) == []
    assert ring.grant() == []
    ring.free(credit.slot)
    assert granted(ring) == {"b": [(0, 2)]}


@pytest.mark.parametrize("lands", [False, True])
def test_slots_of_a_lost_connection_are_free_at_once_if_it_cannot_write(lands):
    ring = LandingRing(2)
    ring.want("a", 2)
    credits_of_a = granted(ring)["a"]
    assert not lands or ring.land("a", credits_of_a[0])
    assert ring.revoke("a", may_write=False) == []
    assert ring.is_idle
    assert not ring.land("a", credits_of_a[0])
    assert ring.violations() == []


def test_slots_of_a_lost_connection_are_quarantined_while_it_may_write():
    ring = LandingRing(3)
    ring.want("a", 5)
    credits_of_a = granted(ring)["a"]
    assert ring.land("a", credits_of_a[1])
    ring.landed(1)
    assert ring.revoke("a", may_write=True) == [0, 2]
    assert ring.statistics().quarantined == 2
    assert ring.statistics().wanted == 0
    ring.want("b", 3)
    assert ring.grant() == []
    assert not ring.land("a", credits_of_a[0])
    assert not ring.give_back("a", credits_of_a[0])
    assert ring.confirm("b") == 0
    assert ring.confirm("a") == 2
    assert granted(ring) == {"b": [(0, 2), (2, 2)]}
    assert ring.violations() == []


def test_wishes_can_be_withdrawn():
    ring = LandingRing(1)
    assert ring.unwant("a", 1) == 0
    ring.want("a", 3)
    assert ring.unwant("a", 2) == 2
    assert len(granted(ring)["a"]) == 1
    assert ring.unwant("a", 2) == 0
    assert not ring.is_idle


@pytest.mark.parametrize("slot", [-1, 0, 1, 2, 7])
def test_end_of_a_fragment_that_did_not_begin_is_a_bug(slot):
    ring = LandingRing(2)
    ring.want("a", 1)
    granted(ring)
    with pytest.raises(InternalError, match=f"landing slot {slot} is"):
        ring.landed(slot)
    with pytest.raises(InternalError, match=f"landing slot {slot} is"):
        ring.free(slot)
    assert ring.violations() == []


def test_violations_are_found():
    ring = LandingRing(2)
    ring.want("a", 1)
    granted(ring)
    slots, free = ring._slots, ring._free
    free.append(0)
    assert "slot 0 is GRANTED, but listed otherwise" in ring.violations()
    free.pop()
    slots[0].owner = None
    assert any("owned by None" in problem for problem in ring.violations())
    assert any("counted as having 1" in problem for problem in ring.violations())
    slots[0].owner = "a"
    free.append(1)
    assert any("listed twice" in problem for problem in ring.violations())
    free.pop()
    assert ring.violations() == []
    ring._counts[0] += 1
    assert any("slots by state" in problem for problem in ring.violations())


CONNECTIONS = st.sampled_from("abcd")


class RingMachine(RuleBasedStateMachine):
    """Compare the ring with sets of credits, in any order of calls."""

    live = Bundle("live")  # (connection, credit): granted once, in any state since
    fragments = Bundle("fragments")  # slots whose fragment has landed

    def __init__(self) -> None:
        super().__init__()
        self.ring: LandingRing[str] = LandingRing(5)
        self.wanted = dict.fromkeys("abcd", 0)
        self.granted: dict[str, set[SlotCredit]] = {c: set() for c in "abcd"}
        self.landing: dict[str, set[SlotCredit]] = {c: set() for c in "abcd"}
        self.quarantined: dict[str, set[int]] = {c: set() for c in "abcd"}
        self.copying: set[int] = set()
        self.seen: set[SlotCredit] = set()

    def held(self, connection: str) -> int:
        return len(self.granted[connection]) + len(self.landing[connection])

    @rule(connection=CONNECTIONS, count=st.integers(1, 8))
    def want(self, connection: str, count: int) -> None:
        self.ring.want(connection, count)
        self.wanted[connection] += count

    @rule(connection=CONNECTIONS, count=st.integers(0, 8))
    def unwant(self, connection: str, count: int) -> None:
        assert self.ring.unwant(connection, count) == min(count, self.wanted[connection])
        self.wanted[connection] -= min(count, self.wanted[connection])

    @rule(target=live)
    def grant(self) -> tuple[str, SlotCredit]:
        free = self.ring.free_slots
        given = [(c, credit) for c, slots in self.ring.grant() for credit in slots]
        assert len(given) == min(free, sum(self.wanted.values()))
        before = {c: self.held(c) for c in "abcd"}
        for connection, credit in given:
            assert credit not in self.seen
            self.seen.add(credit)
            self.granted[connection].add(credit)
            self.wanted[connection] -= 1
        for poor in "abcd":  # waits still: no other connection was preferred to it
            if self.wanted[poor]:
                for rich in "abcd":
                    assert self.held(rich) <= max(self.held(poor) + 1, before[rich])
        return given[0] if given else ("a", SlotCredit(0, 1 << 50))

    @rule(pair=live)
    def land(self, pair: tuple[str, SlotCredit]) -> None:
        connection, credit = pair
        is_current = credit in self.granted[connection]
        assert self.ring.land(connection, credit) == is_current
        if is_current:
            self.granted[connection].remove(credit)
            self.landing[connection].add(credit)

    @rule(target=fragments, pair=live)
    def landed(self, pair: tuple[str, SlotCredit]) -> int:
        connection, credit = pair
        if credit in self.landing[connection]:
            self.ring.landed(credit.slot)
            self.landing[connection].remove(credit)
            self.copying.add(credit.slot)
        return credit.slot

    @rule(slot=consumes(fragments))
    def free(self, slot: int) -> None:
        if slot in self.copying:
            self.ring.free(slot)
            self.copying.remove(slot)

    @rule(pair=live)
    def give_back(self, pair: tuple[str, SlotCredit]) -> None:
        connection, credit = pair
        assert self.ring.give_back(connection, credit) == (credit in self.granted[connection])
        self.granted[connection].discard(credit)

    @rule(connection=CONNECTIONS, may_write=st.booleans())
    def revoke(self, connection: str, may_write: bool) -> None:
        slots = {c.slot for c in self.granted[connection] | self.landing[connection]}
        self.quarantined[connection] |= slots if may_write else set()
        found = self.ring.revoke(connection, may_write=may_write)
        assert set(found) == self.quarantined[connection]  # also by earlier calls
        self.granted[connection].clear()
        self.landing[connection].clear()
        self.wanted[connection] = 0

    @rule(connection=CONNECTIONS)
    def confirm(self, connection: str) -> None:
        assert self.ring.confirm(connection) == len(self.quarantined[connection])
        self.quarantined[connection].clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.ring.violations() == []
        statistics = self.ring.statistics()
        assert statistics.granted == sum(map(len, self.granted.values()))
        assert statistics.landing == sum(map(len, self.landing.values()))
        assert statistics.quarantined == sum(map(len, self.quarantined.values()))
        assert statistics.landed == len(self.copying)
        assert statistics.free == self.ring.free_slots
        assert statistics.wanted == sum(self.wanted.values())
        assert self.ring.num_slots == sum(
            (statistics.free, statistics.granted, statistics.landing, statistics.landed)
        ) + (statistics.quarantined)


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
