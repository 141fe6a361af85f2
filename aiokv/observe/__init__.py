"""What the engine tells about itself. A leaf: nothing here decides."""
