"""Tests of peers: blocks that move between engines."""
