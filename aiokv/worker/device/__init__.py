"""Backends: memory, streams and copies of one kind of device."""
