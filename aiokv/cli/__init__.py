"""The ``aiokv`` command."""
