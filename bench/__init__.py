"""Benches of aiokv: each module answers one question with ``run(quick) -> dict``."""
