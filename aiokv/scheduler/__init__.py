"""Scheduler: decides on matches, grants, transfers and evictions. Never awaits."""
