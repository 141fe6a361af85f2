"""Script: rules that change calls of a scripted device or store, and gates for held calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable


class Gate:
    """A barrier that held calls wait for.

    Args:
        on_open: called by each ``open``; None for no call.

    Attributes:
        opened: ``open`` was called.
    """

    def __init__(self, on_open: Callable[[], None] | None = None) -> None:
        self._on_open = on_open
        self._waiting: list[asyncio.Future[None]] = []
        self.opened = False

    def open(self) -> None:
        """Let the calls that wait go on, and all later ones."""
        self.opened = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        if self._on_open is not None:
            self._on_open()

    async def wait(self) -> None:
        """Wait until the gate is open.

        Cancellation: stops waiting.
        """
        while not self.opened:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                self._waiting.remove(waiter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A change of some calls.

    Attributes:
        operation: operation of a store, or direction of a copy.
        call: number of the call; None for all.
        layer: layer of a copy; None for all.
    """

    operation: str
    call: int | None
    layer: int | None = None

    def covers(self, operation: str, call: int, layer: int | None) -> bool:
        """Return True when the rule changes a call, or one layer of it."""
        return (
            operation == self.operation
            and self.call in (None, call)
            and (self.layer is None or layer is None or self.layer == layer)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay(Rule):
    """The call ends ``seconds`` later, by the loop's clock."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Rule):
    """The call ends after the gate was opened."""

    gate: Gate


_R = TypeVar("_R", bound=Rule)


class Script:
    """The rules that are in force, in the order in which they were added."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []

    def add(self, rule: Rule) -> None:
        """Apply a rule from now on."""
        self._rules.append(rule)

    def end(self) -> None:
        """Remove all rules, and open their gates."""
        rules, self._rules = self._rules, []
        for rule in rules:
            if isinstance(rule, Hold):
                rule.gate.open()

    def matching(
        self, kind: type[_R], operation: str, call: int, layer: int | None = None
    ) -> list[_R]:
        """Return the rules of one kind that cover a call, or one layer of it."""
        return [
            rule
            for rule in self._rules
            if isinstance(rule, kind) and rule.covers(operation, call, layer)
        ]
