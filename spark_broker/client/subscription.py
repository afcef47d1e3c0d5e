"""What a consumer subscribes to, and who it is in its group."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from spark_broker.client import given
from spark_broker.client.membership import Membership
from spark_broker.client.rebalance_listener import Listens, RebalanceListener, listener_of
from spark_broker.client.retry import Backoff
from spark_broker.config import ConsumerConfig
from spark_broker.core.groups.patterns import LENGTH_MAX
from spark_broker.core.groups.requests import TOPICS_MAX
from spark_broker.errors import InvalidConfigError, InvalidRegularExpressionError, InvalidSubscriptionError
from spark_broker.model import NAME_MAX
from spark_broker.protocol.messages import MemberAbout


class Subscription(NamedTuple):
    """Topics by name, or those that match a pattern, or both. `listener`: None where it stays as it was."""

    topics: tuple[str, ...]
    pattern: str
    listener: RebalanceListener | None


def subscription_of(topics: Sequence[str] | str | None, pattern: str | None, listener: Listens | None) -> Subscription:
    """What a caller hands in. Raises InvalidDataError, InvalidTopicError, InvalidSubscriptionError and
    InvalidRegularExpressionError.
    """
    names = () if topics is None else tuple(given.topic_names(topics))
    if len(names) > TOPICS_MAX:
        raise InvalidSubscriptionError(f"a subscription names {len(names):,} topics; {TOPICS_MAX:,} may be")
    text = "" if pattern is None else given.text(pattern, "pattern")
    if len(text) > LENGTH_MAX:
        raise InvalidRegularExpressionError(f"a pattern of {len(text):,} characters; {LENGTH_MAX} may be")
    return Subscription(
        names,
        text,
        None if listener is None else listener_of(listener),
    )


def membership_of(config: ConsumerConfig, backoff: Backoff) -> Membership | None:
    """The membership of a consumer that has not subscribed yet; None without a group. Raises InvalidConfigError."""
    if not config.group_id:
        return None
    for name, value in (("group.instance.id", config.group_instance_id), ("client.rack", config.client_rack)):
        if len(value) > NAME_MAX:
            raise InvalidConfigError(f"{name} has {len(value):,} characters; {NAME_MAX} may be")
    about = MemberAbout(
        [],
        "",
        config.client_rack,
        config.client_id[:NAME_MAX],
        socket.gethostname()[:NAME_MAX],
        config.session_timeout_ms,
        config.max_poll_interval_ms,
        config.group_remote_assignor,
    )
    return Membership(config.group_id, config.group_instance_id, lambda: uuid.uuid4().hex, backoff, about)
