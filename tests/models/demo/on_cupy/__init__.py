"""The demo's transformer on a GPU, in CuPy."""
