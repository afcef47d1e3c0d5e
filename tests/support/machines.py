"""How many stories a state machine of Hypothesis tries."""

from __future__ import annotations

from hypothesis import settings

STORIES_MAX = 200
"""In `make test-all`. There the day is the seed, so that every day tries others."""


def machine_settings(steps: int) -> settings:
    """The settings of the run, for stories of so many steps."""
    return settings(stateful_step_count=steps, max_examples=min(settings().max_examples, STORIES_MAX))
