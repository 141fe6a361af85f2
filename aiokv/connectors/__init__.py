"""Connectors: aiokv inside other servers, loaded by their plugin settings."""
