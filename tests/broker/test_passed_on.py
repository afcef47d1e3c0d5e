"""What clients ask of the controller goes through a broker, and only through one that the controller has let in."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from spark_broker.broker.group_coordinator import GroupCoordinator
from spark_broker.broker.reply import Answer
from spark_broker.broker.requests import BrokerRequests
from spark_broker.config import ClusterConfig
from spark_broker.controller.image import EMPTY_IMAGE
from spark_broker.errors import NotControllerError
from spark_broker.protocol.messages import (
    CallRequest,
    DeleteTopicRequest,
    Message,
    MetadataRequest,
    RaiseLogStartsRequest,
)


@pytest.mark.parametrize(
    "request_",
    [MetadataRequest(["t"], certain=True), DeleteTopicRequest("t"), RaiseLogStartsRequest("1" * 32, [(0, 5)])],
    ids=lambda request: type(request).__name__,
)
def test_a_broker_that_was_not_let_in_passes_nothing_on(request_: CallRequest) -> None:
    """Story: the controller had an older copy of the metadata, and took what such a broker had passed on. When the
    newest copy was put back, rows of a table were deleted that it knew nothing of."""
    manager = SimpleNamespace(image=EMPTY_IMAGE)
    asked: list[Message] = []

    def ask(request: Message, reply: object) -> None:
        asked.append(request)

    answers: list[Answer] = []
    requests = BrokerRequests(manager, GroupCoordinator(manager, ClusterConfig()), lambda *_: False, ask)  # type: ignore[arg-type]
    with pytest.raises(NotControllerError, match="has not heard from the controller"):
        requests.answer(request_, answers.append)
    assert (asked, answers) == ([], [])
    manager.image = replace(EMPTY_IMAGE, cluster_id="c")
    requests.answer(request_, answers.append)
    assert asked == [request_]
