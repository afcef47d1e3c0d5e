"""A metadata log that lacks what brokers have seen: nobody is let in, unless an operator accepts it."""

from __future__ import annotations

from functools import partial

import pytest

from spark_broker.controller import lineage
from spark_broker.controller.events import ControllerStarted
from spark_broker.controller.image import WRITERS_MAX, MetadataImage
from spark_broker.controller.lineage import NewestBatch
from spark_broker.controller.records import ControllerEpochRecord, LaunchRecord
from spark_broker.controller.snapshot import image_from_snapshot, to_records
from spark_broker.errors import NotControllerError, OlderMetadataError, SparkBrokerError
from spark_broker.model import NO_LEADER
from spark_broker.protocol.messages import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    AlterPartitionRequest,
    AlterTopicConfigRequest,
    CreatePartitionsRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    MetadataRequest,
    MetadataResponse,
    MetadataSeen,
    RegisterBrokerResponse,
)
from tests.unit.controller.cluster import CLUSTER_ID, Cluster, registration


def image_of(*runs: tuple[str, int]) -> MetadataImage:
    """Controllers, one after the other, with so many records each."""
    image = MetadataImage()
    for epoch, (writer, records) in enumerate(runs):
        image = image.apply([ControllerEpochRecord(epoch, writer), *[LaunchRecord(1)] * (records - 1)])
    return image


def place(next_offset: int, epoch: int, writer: str) -> MetadataSeen:
    return MetadataSeen(next_offset, epoch, writer, -1, -1, -1)


@pytest.mark.parametrize(
    ("known", "contained"),
    [
        (place(3, 0, "a"), True),
        (place(10, 0, "a"), True),
        (place(11, 0, "a"), False),  # The copy lacks its newest records, and another controller has gone on.
        (place(11, 1, "b"), True),
        (place(15, 1, "b"), True),
        (place(16, 1, "b"), False),
        (place(11, 1, "c"), False),  # Another controller had the epoch.
        (place(11, 2, "c"), False),
    ],
)
def test_a_place_is_in_the_log_or_is_not(known: MetadataSeen, contained: bool) -> None:
    image = image_of(("a", 10), ("b", 5))
    assert lineage.has(image, known) is contained
    restored = image_from_snapshot(to_records(image), image.next_offset)
    assert lineage.has(restored, known) is contained


def test_what_is_seen_of_an_image_is_in_each_image_that_follows() -> None:
    image = image_of(("a", 10))
    for writer in "bcd":
        seen = lineage.seen(image)
        image = image.apply([LaunchRecord(1), ControllerEpochRecord(image.controller_epoch + 1, writer)])
        assert lineage.has(image, seen)


def test_a_controller_that_the_image_has_forgotten_wrote_nothing_beyond_where_the_oldest_known_one_began() -> None:
    """Story: an older copy was refused at a thousand starts, and taken at the next one."""
    image = image_of(("a", 2))
    within, beyond = place(2, 0, "a"), place(500, 0, "a")
    for epoch in range(1, WRITERS_MAX + 2):
        image = image.apply([ControllerEpochRecord(epoch, "b")])
    assert (len(image.writers), image.writers[0].epoch) == (WRITERS_MAX, 2)
    assert lineage.has(image, within)
    assert not lineage.has(image, beyond)


def _same(newest: NewestBatch | None) -> NewestBatch | None:
    return newest


class Story:
    """A cluster of three, its image in an older copy, and what its brokers saw after the copy was made."""

    def __init__(self) -> None:
        cluster = Cluster()
        cluster.start_brokers(3)
        cluster.create_topic("t", 2, 3)
        self.older = cluster.image
        cluster.create_topic("u", 1, 3)
        broker = cluster.start_broker("directory-3")
        assert broker == 3
        self.newest = cluster.image
        self.seen = lineage.seen(self.newest)

    def restored(self, *, accept: bool, writer: str = "v" * 32) -> Cluster:
        """A cluster on the older copy, with a new controller."""
        cluster = Cluster(self.older)
        cluster.handle(ControllerStarted(writer, CLUSTER_ID, accept_older_metadata=accept))
        return cluster

    def register(self, cluster: Cluster, directory: int) -> RegisterBrokerResponse | SparkBrokerError:
        request = registration(
            cluster.new_launch(), f"directory-{directory}", broker_id=directory, cluster_id=CLUSTER_ID, seen=self.seen
        )
        return cluster.register(request)


def test_a_broker_that_has_seen_more_is_refused_and_nothing_changes() -> None:
    story = Story()
    cluster = story.restored(accept=False)
    for directory in (0, 3):  # The copy does not know the directory of broker 3.
        launched = cluster.image.last_launch + 1
        answer = story.register(cluster, directory)
        assert isinstance(answer, OlderMetadataError), answer
        assert cluster.image.last_launch == launched
        assert cluster.image.brokers == story.restored(accept=False).image.brokers


def test_accepted_metadata_goes_on_above_every_number_that_was_given_out() -> None:
    story = Story()
    cluster = story.restored(accept=True)
    for directory in range(4):
        answer = story.register(cluster, directory)
        assert isinstance(answer, RegisterBrokerResponse), answer
        assert answer.broker_id == directory
        assert answer.broker_epoch > story.newest.next_offset
    assert cluster.image.next_broker_id > 4
    assert cluster.image.last_launch >= story.newest.last_launch
    assert cluster.image.next_producer_id > story.newest.next_producer_id
    assert lineage.has(cluster.image, lineage.seen(cluster.image))
    assert not lineage.has(cluster.image, story.seen), "what was lost stays unknown"


def test_accepted_metadata_is_ahead_of_what_clients_have_seen_though_no_broker_has_saved_it() -> None:
    """Story: clients took every broker for one that lags behind, for ever."""
    story = Story()
    assert story.restored(accept=True).image.next_offset > story.newest.next_offset + 1000


def test_accepted_metadata_spares_ids_though_no_broker_has_saved_any() -> None:
    """Found by the simulator with seed 160008397: ids that were given out after the copy was made were given again."""
    story = Story()
    assert story.restored(accept=True).image.next_producer_id > story.older.next_producer_id + 1000


def test_a_directory_that_has_saved_nothing_keeps_its_id_though_accepted_metadata_does_not_know_it() -> None:
    cluster = Story().restored(accept=True)
    request = registration(cluster.new_launch(), "directory-3", broker_id=3, cluster_id=CLUSTER_ID)
    answer = cluster.register(request)
    assert isinstance(answer, RegisterBrokerResponse), answer
    assert answer.broker_id == 3
    assert cluster.image.next_broker_id > 4


def test_a_new_directory_does_not_make_older_metadata_speak() -> None:
    story = Story()
    cluster = story.restored(accept=False)
    assert isinstance(story.register(cluster, 0), OlderMetadataError)
    new = cluster.register(registration(cluster.new_launch(), "a-new-one", cluster_id=CLUSTER_ID))
    assert isinstance(new, RegisterBrokerResponse)
    with pytest.raises(NotControllerError):
        cluster.call(MetadataRequest(["u"], certain=True))
    story.seen = lineage.seen(story.older)
    assert isinstance(story.register(cluster, 1), RegisterBrokerResponse)
    assert isinstance(cluster.call(MetadataRequest(["t"], certain=True)), MetadataResponse)
    story.seen = lineage.seen(story.newest)
    assert isinstance(story.register(cluster, 2), OlderMetadataError)
    answer = cluster.call(MetadataRequest(["t"], certain=True))
    assert isinstance(answer, MetadataResponse), "one broker of another history keeps the others from nothing"


def test_a_new_directory_gets_no_id_of_a_broker_that_accepted_metadata_does_not_know() -> None:
    """Story: a new machine came first and got that id. The broker to which it belongs never started again."""
    story = Story()
    cluster = story.restored(accept=True)
    new = cluster.register(registration(cluster.new_launch(), "a-new-one", cluster_id=CLUSTER_ID))
    assert isinstance(new, RegisterBrokerResponse), new
    answer = story.register(cluster, 3)
    assert isinstance(answer, RegisterBrokerResponse), answer
    assert answer.broker_id == 3 != new.broker_id


def test_a_partition_that_is_added_again_is_not_the_one_that_accepted_metadata_does_not_know() -> None:
    """Story: the old partition's last replica came late, and was deleted: both were in epoch 0."""
    story = Story()
    cluster = story.restored(accept=True)
    for directory in range(3):
        story.register(cluster, directory)
        cluster.beat(directory)
    cluster.call(CreatePartitionsRequest("t", 3))
    state = cluster.partition("t", 2)
    assert state.leader_epoch == state.unclean_epoch == lineage.NUMBERS_SPARED
    topic_id = cluster.topic("t").topic_id
    assert not lineage.may_be_deleted(cluster.image, topic_id, 2, lambda: NewestBatch(0, is_empty=False))
    cluster.create_topic("new", 1, 3)
    assert cluster.partition("new", 0).leader_epoch == 0, "nothing can be left of a new topic"


def test_a_controller_that_has_let_no_broker_in_neither_answers_nor_acts() -> None:
    """Story: it gave producer ids a second time to a broker that it was about to refuse."""
    story = Story()
    cluster = story.restored(accept=False)
    epochs = {broker.id: broker.epoch for broker in cluster.image.brokers.values()}
    before = cluster.image
    for request in (
        AllocateProducerIdsRequest(0, epochs[0]),
        AlterPartitionRequest(0, epochs[0], []),
        DeleteTopicRequest("t"),
        CreateTopicRequest("t", 1, 1, b"", {}),
        AlterTopicConfigRequest("u", {}),
        MetadataRequest(["u"], certain=True),
    ):
        with pytest.raises(NotControllerError):
            cluster.call(request)
    assert cluster.image == before
    cluster = story.restored(accept=True)
    answer = story.register(cluster, 0)
    assert isinstance(answer, RegisterBrokerResponse)
    assert isinstance(cluster.call(MetadataRequest(["t"], certain=True)), MetadataResponse)
    assert isinstance(cluster.call(AllocateProducerIdsRequest(0, answer.broker_epoch)), AllocateProducerIdsResponse)
    with pytest.raises(NotControllerError):
        cluster.call(AllocateProducerIdsRequest(1, cluster.image.brokers[1].epoch))


def test_accepted_metadata_elects_nobody_before_all_replicas_were_compared() -> None:
    story = Story()
    cluster = story.restored(accept=True)
    before = story.older.topic("t")
    assert before is not None
    for number, was in enumerate(before.partitions):
        state = cluster.partition("t", number)
        assert (state.leader, state.isr, state.elr) == (NO_LEADER, (), ())
        assert state.leader_epoch > was.leader_epoch + 1
        assert state.unclean_epoch == state.leader_epoch


def test_a_copy_that_is_accepted_again_gives_no_leader_epoch_twice() -> None:
    """Found by the simulator with seed 60007652: both times the same leader epochs were spared, and then given out."""
    story = Story()
    first = story.restored(accept=True)
    story.seen = lineage.seen(first.image)
    second = story.restored(accept=True, writer="x" * 32)
    for directory in range(3):
        assert isinstance(story.register(second, directory), RegisterBrokerResponse)
    for number in (0, 1):
        given, state = first.partition("t", number), second.partition("t", number)
        assert state.leader_epoch > given.leader_epoch + 1000
        assert state.unclean_epoch == state.leader_epoch
    assert second.image.next_offset > first.image.next_offset + 1000
    epochs = [state.leader_epoch for _, _, state in second.image.partitions()]
    story.seen = lineage.seen(first.image)
    assert isinstance(story.register(second, 0), RegisterBrokerResponse)
    assert [state.leader_epoch for _, _, state in second.image.partitions()] == epochs, "once"


def test_a_copy_that_is_accepted_often_gives_no_leader_epoch_twice() -> None:
    """Story: after the third acceptance, epochs were below those of the logs, and no broker could go on."""
    story = Story()
    given = {("t", number): -1 for number in (0, 1)}
    for writer in "abcd":
        cluster = story.restored(accept=True, writer=writer * 32)
        for directory in range(3):
            assert isinstance(story.register(cluster, directory), RegisterBrokerResponse)
        before, given = given, {key: cluster.partition(*key).leader_epoch for key in given}
        assert all(epoch > before[key] + 1000 for key, epoch in given.items())
        story.seen = lineage.seen(cluster.image)


def test_the_acceptance_ends_with_its_controller() -> None:
    story = Story()
    cluster = story.restored(accept=True)
    cluster.handle(ControllerStarted("u" * 32, CLUSTER_ID))
    assert isinstance(story.register(cluster, 0), OlderMetadataError)


def test_only_what_the_metadata_says_is_deleted() -> None:
    cluster = Cluster()
    cluster.start_brokers(3)
    cluster.create_topic("t", 1, 2)
    cluster.create_topic("gone", 1, 2)
    gone, topic = cluster.topic("gone").topic_id, cluster.topic("t").topic_id
    assert not lineage.may_be_deleted(cluster.image, "f" * 32, 0, lambda: NewestBatch(-1, is_empty=True))
    cluster.call(DeleteTopicRequest("gone"))
    restored = image_from_snapshot(to_records(cluster.image), cluster.image.next_offset)
    for image in (cluster.image, restored):
        assert lineage.may_be_deleted(image, gone, 0, lambda: None)
    epoch = cluster.partition("t").leader_epoch
    for newest, deleted in (
        (NewestBatch(epoch, is_empty=False), True),
        (NewestBatch(epoch + 1, is_empty=False), False),  # A leader has written it that this metadata does not know.
        (NewestBatch(epoch + 1, is_empty=True), True),
        (None, False),  # Its files cannot be read.
    ):
        assert lineage.may_be_deleted(cluster.image, topic, 0, partial(_same, newest)) is deleted
    assert not lineage.may_be_deleted(cluster.image, topic, 1, lambda: NewestBatch(-1, is_empty=True))
