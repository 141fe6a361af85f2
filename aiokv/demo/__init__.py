"""The main job: a serving loop around a real (small) transformer, run against the cache.

A leaf: nothing in aiokv imports this package except ``aiokv.cli.demo``.
"""
