<<<<<<< HEAD
"""aiokv.connectors: aiokv behind the cache interfaces of other servers.

Each connector is a package of its own, and imports neither the server nor its framework when it is
imported.
"""
=======
"""Connectors: aiokv inside other servers, loaded by their plugin settings."""
>>>>>>> trunk
