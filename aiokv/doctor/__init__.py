"""Checks of a machine: what aiokv needs, and what makes it slow.

Each check is a function of a :class:`~aiokv.doctor.machine.Machine`, which tests replace. A check
never raises, and an operation that can block has a deadline.
"""
