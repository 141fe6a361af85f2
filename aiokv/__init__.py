"""Asyncio event-driven KV-cache engine for LLM serving."""
