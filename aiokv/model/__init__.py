"""Bytes of a model's KV, and tensors for it."""
