"""Peers: blocks that one engine computes and another, on a different server, decodes with."""
