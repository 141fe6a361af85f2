"""``python -m aiokv``: the same as the ``aiokv`` command."""

import sys

from aiokv.cli import main

if __name__ == "__main__":
    sys.exit(main())
