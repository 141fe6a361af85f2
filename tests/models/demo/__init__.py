"""Parts of `aiokv demo` that need a checkout: other models, their weights, and traces."""
