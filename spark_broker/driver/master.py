"""What the URL of a Spark master says. It needs no Spark: what a machine lacks is found with it, too."""

from __future__ import annotations

import re

_LOCAL = re.compile(r"local(\[.*\])?$")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\]$")


def is_local(master: str | None) -> bool:
    """Whether the application has one executor, inside the driver (`local`, `local[4]`, `local[*]`)."""
    return _LOCAL.match(master or "") is not None


def local_cluster(master: str | None) -> tuple[int, int] | None:
    """Executors, and cores of each, of a `local-cluster[...]`; None for any other master."""
    match = _LOCAL_CLUSTER.match(master or "")
    return None if match is None else (int(match[1]), int(match[2]))


def is_loopback(master: str | None) -> bool:
    """Whether every process of the application is on this machine (`local...` and `local-cluster[...]`)."""
    return is_local(master) or local_cluster(master) is not None
