"""Connectors: aiokv behind the cache interfaces of other servers.

Importing a connector loads neither the server nor its framework, unless its base class is theirs.
"""
