"""Contexts: names under which prompts share blocks, made of salt and adapter."""

from __future__ import annotations


def context_of(salt: str, adapter: str) -> str:
    """Return the name under which prompts share blocks."""
    return f"{len(salt)}:{salt}{adapter}" if salt or adapter else ""


def split_context(context: str) -> tuple[str, str]:
    """Return the salt and the adapter of a context."""
    length, _, names = context.partition(":")
    end = int(length or 0)
    return names[:end], names[end:]
