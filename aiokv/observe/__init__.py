"""Logs and units, which import nothing of aiokv; and views of an engine from above it."""
