"""The demo: a serving loop over the cache, and one model, for readers who write such a loop.

Read ``serving`` (the loop) first, then ``requests``, ``runner`` (the thread that computes),
``batch`` and ``transformer`` (a model with a paged cache). ``runs`` serves one ``workload`` three
times, ``ledger`` compares the bits of the runs, and ``report`` prints them. Models in CuPy and
Paddle, images, checkpoints and traces are in ``tests/models/demo`` of the repository.

Nothing of aiokv imports this package, except for its command line.
"""
