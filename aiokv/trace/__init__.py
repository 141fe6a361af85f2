"""Request traces: read them, generate small ones, and replay them against an engine."""
