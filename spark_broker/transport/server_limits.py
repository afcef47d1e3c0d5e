"""Bounds of a server: connections, and bytes of requests and of answers to calls."""

from __future__ import annotations

from dataclasses import dataclass

from spark_broker.config import ClusterConfig

ANSWER_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of a server. `queued_bytes`: of requests that it holds, for clients and for brokers each.

    `answer_bytes`: of answers to calls that their peers have not taken; it may hold more by those that were being made.
    `idle_s`: a connection without streams and calls is closed after so long.
    """

    connections: int
    connections_per_ip: int
    idle_s: float
    queued_bytes: int
    answer_bytes: int = ANSWER_BYTES

    @staticmethod
    def of(settings: ClusterConfig) -> ServerLimits:
        """As a broker is configured."""
        return ServerLimits(
            settings.broker_max_connections,
            settings.max_connections_per_ip,
            settings.connections_max_idle_ms / 1000,
            settings.queued_max_request_bytes,
        )
