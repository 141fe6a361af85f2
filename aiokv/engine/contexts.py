"""Contexts: the names under which prompts share blocks."""

from __future__ import annotations


def context_of(salt: str, adapter: str) -> str:
    """Return the context of a salt and an adapter; empty without both."""
    return f"{len(salt)}:{salt}{adapter}" if salt or adapter else ""


def parts_of(context: str) -> tuple[str, str]:
    """Return the (salt, adapter) of a context."""
    if not context:
        return "", ""
    length, _, names = context.partition(":")
    return names[: int(length)], names[int(length) :]
