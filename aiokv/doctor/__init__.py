"""Checks of a machine: what aiokv needs, and what makes it slow.

Each check is a function of a :class:`~aiokv.doctor.machine.Machine`, so that tests run it on files
and answers of their own. A check never raises, and what can block has a deadline.
"""
