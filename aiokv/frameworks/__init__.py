"""Support for tensor frameworks beyond DLPack; no other module imports a framework."""
