"""Connectors: aiokv inside other servers, loaded by their own plugin settings.

A connector imports the server that it serves, so nothing here is imported by the rest of aiokv.
"""
