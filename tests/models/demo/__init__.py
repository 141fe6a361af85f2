"""What `aiokv demo` offers in a checkout only: other models, their weights, and traces."""
