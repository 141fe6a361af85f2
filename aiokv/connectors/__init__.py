"""Connectors: aiokv inside other servers, behind the interfaces of their caches."""
