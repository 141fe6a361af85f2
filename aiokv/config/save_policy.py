"""Save policies: when blocks are saved to the tier below."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast

from aiokv.base import checks
from aiokv.errors import AiokvError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

SaveMoment = Literal["none", "write_through", "nth_use", "write_back"]
_NTH_USE: Final = re.compile(r"nth_use:([1-9][0-9]{0,8})")
_FORMER_NAMES: Final = {
    "write_through_selective": "nth_use:2",
    "at_commit": "write_through",
    "at_nth_use": "nth_use:2",
    "on_eviction": "write_back",
}


class SavePolicy(NamedTuple):
    """A save policy, such as ``"write_through"`` or ``"nth_use:2"``.

    Attributes:
        moment: ``"write_through"``: as soon as a block is complete; ``"nth_use"``: at its n-th use,
            of which computing it is the first; ``"write_back"``: shortly before its eviction;
            ``"none"``: never.
        uses: the n of ``"nth_use"``; 1 for the others.
    """

    moment: SaveMoment
    uses: int = 1

    def __str__(self) -> str:
        return f"nth_use:{self.uses}" if self.moment == "nth_use" else self.moment

    @classmethod
    def parse(
        cls,
        field: str,
        text: object,
        accepted: Sequence[SaveMoment],
        error: type[AiokvError] = ConfigError,
    ) -> SavePolicy:
        """Return the policy that a text names.

        Args:
            field: name of the text in error messages.
            text: one of ``accepted``, with ``"nth_use:N"`` for ``"nth_use"``.
            accepted: moments that the tier supports.
            error: class of the error.

        Raises:
            AiokvError: of the class ``error``; ``text`` names none of the ``accepted`` policies.
        """
        if isinstance(text, str):
            if text in accepted and text != "nth_use":
                return cls(cast("SaveMoment", text))
            if "nth_use" in accepted and (found := _NTH_USE.fullmatch(text)):
                return cls("nth_use", int(found[1]))
        names = ["nth_use:N" if name == "nth_use" else name for name in accepted]
        former = _FORMER_NAMES.get(text) if isinstance(text, str) else None
        raise error(
            f"{field} is {checks.shown(text)}; it must be one of {', '.join(map(repr, names))}",
            hint="" if former is None else f"use {former!r}, its new name",
        )
