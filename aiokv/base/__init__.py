"""Leaves that any module may import."""
