"""The part of aiokv that moves bytes: memory, streams, events, transfers. It never decides."""
