"""Layout of the bytes of a block, on a device, on the host and between servers."""
