"""`python -m tests.models.demo`: `aiokv demo` with other models, their weights, and traces."""
