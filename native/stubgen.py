"""Print the type stub of the built extension: ``python native/stubgen.py > aiokv/_native.pyi``.

The cuda submodule is left out: the stub is the same whether or not it was compiled in.
"""

from __future__ import annotations

import sys

from nanobind.stubgen import StubGen

from aiokv import _native


def stub() -> str:
    """The stub's text."""
    generator = StubGen(module=_native)
    generator.put(_native)
    text: str = generator.get()
    return text.replace("from aiokv._native import cuda as cuda\n\n", "")


if __name__ == "__main__":
    sys.stdout.write(stub())
