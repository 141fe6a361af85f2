"""Quota of a salt: an earlier request passes those that wait, a later one does not."""

from __future__ import annotations

from aiokv.scheduler.quota import SaltQuota


class Waiting:
    """A request that waits for the quota."""

    salt = "tenant"

    def enter_at(self, line, ticket):
        self.ticket = ticket
        line.insert(self, ticket)


def test_request_passes_if_it_came_before_the_first_that_waits():
    quotas = SaltQuota(10)
    assert quotas.passes("tenant", 10, 6)
    quotas.join(Waiting(), arrival=5)
    assert quotas.passes("tenant", 10, 4)
    assert not quotas.passes("tenant", 11, 4)
    assert not quotas.passes("tenant", 1, 6)
    assert quotas.passes("other", 10, 6)
    assert not quotas.admits("tenant", 1)
    assert quotas.admits("other", 10)
