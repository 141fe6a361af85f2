"""The demo's transformer in numpy: what runs anywhere, and the reference for the others."""
