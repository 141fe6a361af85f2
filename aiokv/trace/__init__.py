"""Request traces: reading them, making small ones, and replaying them against an engine."""
