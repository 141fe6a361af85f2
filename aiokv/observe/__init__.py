"""Logs and units. Nothing here decides, and nothing here imports the engine."""
