"""Configuration of an engine."""
