"""Links of the API reference: roles in docstrings, such as ``:class:`Lease```, become links.

mkdocs.yml names this extension of Griffe, the library that reads the docstrings for the site. It is
no page of the site and no part of the package.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):`(~?)([^`]+)`")


class Roles(griffe.Extension):
    """Replace roles by links to names of the site, or by code if the site lacks the name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the docstrings of a package that was read completely."""
        self._rewrite(pkg)

    def _rewrite(self, owner: griffe.Object) -> None:
        if owner.docstring is not None:
            owner.docstring.value = ROLE.sub(
                lambda role: link(owner, role[2], is_short=bool(role[1])), owner.docstring.value
            )
        for member in owner.members.values():
            if isinstance(member, griffe.Object):
                self._rewrite(member)


def link(owner: griffe.Object, name: str, *, is_short: bool) -> str:
    """Return HTML for the name as the docstring of ``owner`` uses it."""
    shown = name.rpartition(".")[2] if is_short else name
    return f'<autoref optional identifier="{path_of(owner, name)}"><code>{shown}</code></autoref>'


def path_of(owner: griffe.Object, name: str) -> str:
    """Return the full path of a name that is relative to an object, its class or its module."""
    first, dot, rest = name.partition(".")
    try:
        return f"{owner.resolve(first)}{dot}{rest}"
    except griffe.NameResolutionError:
        return name
