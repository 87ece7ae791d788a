"""What every test gets: the Hypothesis profiles. Warnings, markers, timeouts: pyproject.toml.

`--hypothesis-profile NAME` chooses one. Without it the runs are few and the same every time.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadline anywhere: a busy machine must not fail a property.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("ci-lite", max_examples=60, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("dev", max_examples=100, **_COMMON)
settings.register_profile("ci", max_examples=400, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("nightly", max_examples=20_000, print_blob=True, **_COMMON)
settings.load_profile("ci-lite")
