"""A first broker that is alone for a while, with clients that have coordinators make their topics meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

from spark_broker.testing.simulation.swarm import Swarm

SHARE = 0.1
"""Share of the schedules with coordinators."""

ALONE_MS = (150.0, 2500.0)


def with_lone_start(seed: int, swarm: Swarm) -> Swarm:
    """The draw of a seed, with brokers that come after the first one. A generator of its own leaves the other seeds as
    they are.
    """
    rng = random.Random(f"{seed}/lone start draw")
    return replace(swarm, alone_ms=rng.uniform(*ALONE_MS)) if rng.random() < SHARE else swarm
