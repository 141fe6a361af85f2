"""Checks of a machine: requirements of aiokv, and causes of slowness.

Each check is a function of a :class:`~aiokv.doctor.machine.Machine`, which tests replace. A check
never raises, and an operation that can block has a deadline.
"""
