"""Lookups of offsets over the simulated network: one round, as the production lookup has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from spark_broker.client.cluster_view import ClusterView
from spark_broker.client.offset_lookup import OffsetLookup
from spark_broker.protocol.messages import ListOffsetsRequest
from spark_broker.testing.simulation.network import Network, NetworkNode


def look_up(
    network: Network,
    node: NetworkNode,
    lookup: OffsetLookup,
    view: ClusterView,
    done: Callable[[], object],
    timeout_ms: float,
) -> None:
    """Ask the leaders that this view shows. `done` is called once each of them has answered, or failed to."""
    requests = lookup.requests(view)
    waiting = len(requests)

    def answered(request: ListOffsetsRequest, answer: object) -> None:
        nonlocal waiting
        waiting -= 1
        lookup.answered(request, answer)
        if not waiting:
            done()

    for broker, request in requests.items():
        hear = partial(answered, request)
        place = broker.host, (broker.host, broker.port)
        network.call(node, *place, request, timeout_ms=timeout_ms, on_answer=hear, on_error=hear)
    if not requests:
        done()
