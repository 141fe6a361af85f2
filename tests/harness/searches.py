"""Hypothesis: a fixed, quick selection by default; ``AIOKV_DEEP=1`` searches longer, at random."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

_quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
settings.register_profile(
    "quick",
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=_quiet,
)
settings.register_profile(
    "deep",
    max_examples=1000,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=_quiet,
)
settings.register_profile(  # of `make mutate`: it only needs to know that an example fails
    "mutation", settings.get_profile("quick"), phases=[Phase.explicit, Phase.generate]
)
if os.environ.get("AIOKV_MUTATION"):
    settings.load_profile("mutation")
else:
    settings.load_profile("deep" if os.environ.get("AIOKV_DEEP") else "quick")
