"""The engine's parts: each joins scheduler and worker for one kind of event."""
