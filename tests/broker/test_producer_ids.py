"""Producer ids come in blocks: one request asks the controller, and others wait for its answer."""

from __future__ import annotations

from typing import cast

import pytest

from spark_broker.broker.replica_manager import ReplicaManager
from spark_broker.broker.reply import Answer, Reply
from spark_broker.broker.requests import _ProducerIds
from spark_broker.errors import UnknownServerError
from spark_broker.protocol.messages import AllocateProducerIdsResponse, InitProducerIdResponse, Message


class Registered:
    """What of a broker's replicas is asked for."""

    broker_id = 1
    broker_epoch = 2


def test_a_bug_in_the_request_for_a_block_leaves_nobody_waiting() -> None:
    """Story: since such an error ends no broker, nobody would have asked for a block again."""
    answers: list[Answer] = []
    fails = [True]

    def ask(_: Message, reply: Reply) -> None:
        if fails:
            fails.clear()
            ids.take(answers.append)  # another request comes meanwhile
            raise TypeError("nobody has thought of this value")
        reply(AllocateProducerIdsResponse(7, 1))

    ids = _ProducerIds(cast("ReplicaManager", Registered()), ask)
    with pytest.raises(TypeError):
        ids.take(answers.append)
    assert [type(answer) for answer in answers] == [UnknownServerError] * 2

    ids.take(answers.append)
    assert answers[-1] == InitProducerIdResponse(7, 0)
