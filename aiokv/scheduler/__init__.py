"""Decides: what is cached, who gets blocks, what is copied and what goes. Never awaits."""
