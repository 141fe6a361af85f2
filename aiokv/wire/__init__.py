"""Connections between processes of aiokv: frames, keepalive, listeners and their limits."""
