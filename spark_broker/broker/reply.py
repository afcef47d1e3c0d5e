"""The answer to a call, now or later."""

from __future__ import annotations

from collections.abc import Callable

from spark_broker.errors import SparkBrokerError
from spark_broker.protocol.messages import Message

Answer = Message | SparkBrokerError
Reply = Callable[[Answer], None]
"""Takes the answer to a request; called once, outside of every lock, and must not block."""
