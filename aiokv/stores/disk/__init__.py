"""Disk store: blocks in files of a local disk."""
