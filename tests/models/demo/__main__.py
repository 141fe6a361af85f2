"""Run the demo with the models and workloads of the repository."""

import sys

from tests.models.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
