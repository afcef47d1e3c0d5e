"""Where a member of a group begins to read what it is given, with auto.offset.reset=latest and without an offset."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TypeVar

import pytest

from spark_broker.client.cluster_view import ClusterView
from spark_broker.client.consumer_effects import Effect, FetchCommitted, ListTopics, LookUpOffsets, RefreshMetadata
from spark_broker.client.consumer_machine import ConsumerMachine
from spark_broker.client.membership import Membership, SendHeartbeat
from spark_broker.client.partition_position import Start
from spark_broker.client.retry import Backoff
from spark_broker.config import ConsumerConfig
from spark_broker.errors import InvariantError, RequestTimedOutError
from spark_broker.protocol.messages import ConsumerGroupHeartbeatResponse, MemberAbout, TopicPartitions
from spark_broker.times import EARLIEST, LATEST, Moment
from tests.unit.test_consumer_machine import view

E = TypeVar("E")

OLD, NEW = "ab" * 16, "cd" * 16
NOW_MS = 1000.0


def named(topic_id: str, partitions: int, name: str) -> ClusterView:
    """A view with one topic."""
    shown = view(*[(0, 0)] * partitions, topic_id=topic_id)
    return replace(shown, topics={name: replace(shown.topics["t"], name=name)})


class Rig:
    """A member that subscribes to `t`. The test plays the brokers, of which the coordinator has no offsets."""

    def __init__(self, pattern: str = "") -> None:
        backoff = Backoff(100, 100, rng=random.Random(1))
        about = MemberAbout([], "", "", "c", "h", 9000, 60_000, "")
        config = ConsumerConfig(group_id="g", auto_offset_reset="latest")
        self.member = Membership("g", "", lambda: "m", backoff, about)
        self.machine = ConsumerMachine(config, None, backoff, membership=self.member)
        self.machine.subscribe([] if pattern else ["t"], pattern, now_ms=NOW_MS)
        self.machine.polling(NOW_MS)
        self._cluster: ClusterView | None = None
        self._effects: list[Effect] = []

    def last(self, kind: type[E]) -> E:
        """The last effect of this kind. Others are kept; metadata comes as soon as there is any."""
        self._step()
        effect = [effect for effect in self._effects if isinstance(effect, kind)][-1]
        self._effects.remove(effect)
        return effect

    def _step(self) -> None:
        self._effects += self.machine.step(NOW_MS)
        asked = [effect for effect in self._effects if isinstance(effect, RefreshMetadata)]
        if asked and self._cluster is not None:
            self._effects.remove(asked[0])
            self.machine.metadata_came(self._cluster, NOW_MS)
            self._step()

    def assign(self, topic_id: str, *numbers: int, epoch: int = 1, name: str = "t") -> None:
        sent = self.last(SendHeartbeat)
        given = [TopicPartitions(topic_id, list(numbers), name)]
        answer = ConsumerGroupHeartbeatResponse(sent.request.sequence, 1, epoch, 0, given)
        self.member.answered(sent, answer, NOW_MS)
        self._step()

    def metadata(self, topic_id: str, partitions: int) -> None:
        self._cluster = view(*[(0, 0)] * partitions, topic_id=topic_id)
        self._step()

    def nothing_there(self) -> None:
        """A broker answers that the topic is not there."""
        self._cluster = ClusterView()
        self._step()

    def lists(self, cluster: ClusterView) -> None:
        """A broker answers which topics there are."""
        self.last(ListTopics)
        self.machine.topics_listed(cluster.topics, NOW_MS)

    def begins(self) -> dict[int, Moment]:
        """Where partitions begin, by their numbers."""
        self.machine.committed_came(self.last(FetchCommitted), {}, NOW_MS)
        return {tp.partition: moment for tp, moment in self.last(LookUpOffsets).moments.items()}


def test_an_assignment_that_comes_before_the_metadata_has_no_partition_that_was_added_later() -> None:
    rig = Rig()
    rig.assign(OLD, 0, 1, 2)
    rig.metadata(OLD, 3)
    assert rig.begins() == {0: LATEST, 1: LATEST, 2: LATEST}


def test_a_partition_that_was_added_since_the_member_knows_the_topic_begins_at_its_first_record() -> None:
    """Also where the member had none of the topic before."""
    rig = Rig()
    rig.metadata(OLD, 1)
    rig.assign(OLD, 1)
    rig.metadata(OLD, 2)
    assert rig.begins() == {1: EARLIEST}


def test_every_partition_of_a_topic_that_was_created_again_begins_at_its_first_record() -> None:
    rig = Rig()
    rig.metadata(OLD, 2)
    rig.assign(NEW, 0, 1)
    rig.metadata(NEW, 2)
    assert rig.begins() == {0: EARLIEST, 1: EARLIEST}


def test_a_topic_that_was_not_there_when_the_member_subscribed_begins_at_its_first_record() -> None:
    """Story: of a topic that was created later, all was passed that came before the member noticed it."""
    rig = Rig()
    rig.nothing_there()
    rig.assign(NEW, 0, 1)
    rig.metadata(NEW, 2)
    assert rig.begins() == {0: EARLIEST, 1: EARLIEST}


def test_metadata_that_was_asked_for_before_says_nothing_of_a_topic_that_is_subscribed_since() -> None:
    rig = Rig()
    rig.last(RefreshMetadata)
    rig.machine.subscribe(["t", "late"], now_ms=NOW_MS)
    rig.machine.metadata_came(ClusterView(), NOW_MS)
    rig.assign(OLD, 0, name="late")
    rig.machine.learned(named(OLD, 1, "late"))
    assert rig.begins() == {0: LATEST}


def test_a_topic_that_a_pattern_finds_later_begins_at_its_first_record() -> None:
    rig = Rig(pattern="t.*")
    rig.lists(ClusterView())
    rig.assign(NEW, 0)
    rig.metadata(NEW, 1)
    assert rig.begins() == {0: EARLIEST}


def test_a_partition_that_is_added_to_a_topic_that_a_pattern_has_found_begins_at_its_first_record() -> None:
    rig = Rig(pattern="t.*")
    rig.lists(view((0, 0), topic_id=OLD))
    rig.assign(OLD, 0, 1)
    rig.metadata(OLD, 2)
    assert rig.begins() == {0: LATEST, 1: EARLIEST}


def test_no_partition_begins_before_it_is_known_which_topics_the_pattern_has_found() -> None:
    """The group may give partitions to a member that has no metadata yet."""
    rig = Rig(pattern="t.*")
    rig.assign(OLD, 0)
    with pytest.raises(IndexError):
        rig.last(FetchCommitted)
    rig.lists(view((0, 0), topic_id=OLD))
    rig.metadata(OLD, 1)
    assert rig.begins() == {0: LATEST}


def test_a_list_of_topics_that_no_broker_gives_is_asked_for_again() -> None:
    rig = Rig(pattern="t.*")
    rig.last(ListTopics)
    rig.machine.round_failed(RequestTimedOutError("nobody answered"), NOW_MS)
    again_ms = rig.machine.wake_ms(NOW_MS)
    assert NOW_MS < again_ms < NOW_MS + 1000
    assert any(isinstance(effect, ListTopics) for effect in rig.machine.step(again_ms))


def test_another_pattern_is_compared_with_the_topics_of_its_own_time() -> None:
    rig = Rig(pattern="other")
    rig.lists(ClusterView())
    rig.machine.subscribe([], "t.*", now_ms=NOW_MS)
    rig.lists(view((0, 0), topic_id=OLD))
    rig.assign(OLD, 0)
    rig.metadata(OLD, 1)
    assert rig.begins() == {0: LATEST}


def test_a_pattern_that_comes_back_is_compared_with_the_topics_of_its_own_time() -> None:
    rig = Rig(pattern="t.*")
    rig.lists(ClusterView())
    rig.machine.subscribe(["other"], now_ms=NOW_MS)
    rig.machine.subscribe([], "t.*", now_ms=NOW_MS)
    rig.lists(view((0, 0), topic_id=OLD))
    rig.assign(OLD, 0)
    rig.metadata(OLD, 1)
    assert rig.begins() == {0: LATEST}


def test_a_seek_counts_for_a_topic_that_is_made_later() -> None:
    """Also after an assignment without partitions: nobody has read anything of the topic."""
    rig = Rig()
    rig.metadata(OLD, 0)
    rig.assign(OLD)
    rig.machine.seek_all_to(Start.EARLIEST)
    rig.assign(OLD, 0)
    rig.metadata(OLD, 1)
    assert {tp.partition: moment for tp, moment in rig.last(LookUpOffsets).moments.items()} == {0: EARLIEST}


def test_a_seek_counts_for_no_topic_that_another_member_reads() -> None:
    rig = Rig()
    rig.metadata(OLD, 1)
    rig.assign(OLD)
    rig.machine.seek_all_to(Start.EARLIEST)
    rig.assign(OLD, 0)
    assert rig.begins() == {0: LATEST}


def test_what_a_topic_was_before_a_subscription_ended_counts_for_none_that_follows() -> None:
    rig = Rig()
    rig.metadata(OLD, 1)
    rig.machine.subscribe(["other"], now_ms=NOW_MS)
    rig.metadata(OLD, 2)
    rig.machine.subscribe(["t"], now_ms=NOW_MS)
    rig.assign(OLD, 0, 1)
    assert rig.begins() == {0: LATEST, 1: LATEST}


def test_what_the_group_has_decided_otherwise_meanwhile_is_not_taken_up() -> None:
    """Story: between a look at the change and its taking, a heartbeat's answer came. Two members read one partition."""
    rig = Rig()
    rig.machine.group.has_listener = True  # type: ignore[union-attr]
    rig.assign(OLD, 0, 1)
    group = rig.machine.group
    assert group is not None
    change = group.next_change()
    assert change is not None
    rig.member.pending = frozenset({(OLD, 0)})  # as an answer says that comes now
    assert not group.still_holds(change)
    with pytest.raises(InvariantError):
        group.carried_out(change, NOW_MS)
    assert not rig.machine.partitions
    assert not rig.member.owned
