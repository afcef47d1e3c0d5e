"""The rules of a member, without thread, clock or socket: what it says, which answers it takes, when it has lost."""

from __future__ import annotations

import itertools
import random

import pytest

from spark_broker.client.membership import Key, MemberPhase, Membership, SendHeartbeat
from spark_broker.client.retry import Backoff
from spark_broker.errors import (
    CoordinatorNotAvailableError,
    FencedInstanceIdError,
    FencedMemberEpochError,
    GroupMaxSizeReachedError,
    SparkBrokerError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
)
from spark_broker.protocol.messages import ConsumerGroupHeartbeatResponse, MemberAbout, TopicPartitions

SESSION_MS = 9000
POLL_MS = 60_000
T = "ab" * 16


class Rig:
    """A member for which the test plays the coordinator, the caller and the clock."""

    def __init__(self, instance_id: str = "", poll_ms: int = POLL_MS) -> None:
        ids = (f"m{number}" for number in itertools.count())
        about = MemberAbout([], "", "", "c", "h", SESSION_MS, poll_ms, "")
        backoff = Backoff(100, 100, rng=random.Random(1))
        self.member = Membership("g", instance_id, lambda: next(ids), backoff, about)
        self.now_ms = 1000.0
        self.member.subscribe(["t"], "", self.now_ms)
        self.member.polling(self.now_ms)

    def sent(self) -> SendHeartbeat:
        """The one heartbeat that is sent now."""
        (heartbeat,) = self.member.heartbeats(self.now_ms)
        return heartbeat

    def between(self) -> bool:
        return self.member.is_between

    def silent(self) -> bool:
        return self.member.heartbeats(self.now_ms) == []

    def answer(self, sent: SendHeartbeat, epoch: int, *numbers: int, assigns: bool = True, generation: int = 1) -> None:
        """`assigns`: the answer has an assignment, these partitions."""
        assignment = [TopicPartitions(T, list(numbers), "t")] if numbers else []
        self.member.answered(
            sent,
            ConsumerGroupHeartbeatResponse(
                sent.request.sequence, generation, epoch, 100, assignment if assigns else None
            ),
            self.now_ms,
        )

    def fail(self, sent: SendHeartbeat, error: SparkBrokerError) -> None:
        self.member.failed(sent, error, self.now_ms)

    def reading(self, *numbers: int, epoch: int = 1) -> None:
        """The member owns these, and the coordinator knows."""
        self.answer(self.sent(), epoch, *numbers)
        if numbers:
            self.member.took(keys(*numbers))
        else:
            self.later(100)
        self.answer(self.sent(), epoch, assigns=False)

    def later(self, ms: float) -> None:
        self.now_ms += ms


def keys(*numbers: int) -> frozenset[Key]:
    return frozenset((T, number) for number in numbers)


def named(sent: SendHeartbeat) -> frozenset[Key] | None:
    owned = sent.request.owned
    return None if owned is None else frozenset((t.topic_id, n) for t in owned for n in t.partitions)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_member_joins_takes_what_it_is_given_and_says_so_at_once(rig: Rig) -> None:
    join = rig.sent()
    assert (join.request.member_epoch, join.request.member_id, named(join)) == (0, "m0", frozenset())
    assert join.request.about is not None
    assert join.request.about.topics == ["t"]
    assert rig.silent(), "one answer at a time"
    rig.answer(join, 1, 0, 1)
    assert rig.member.pending == keys(0, 1)
    assert rig.member.owned == frozenset()
    rig.member.took(keys(0, 1))
    said = rig.sent()
    assert (said.request.member_epoch, said.request.generation, named(said)) == (1, 1, keys(0, 1))
    rig.answer(said, 1, assigns=False)
    rig.later(100)
    assert named(rig.sent()) is None, "nothing has changed"


def test_what_it_may_begin_to_read_it_names_as_well(rig: Rig) -> None:
    """KAFKA-19862: a heartbeat that is sent before an assignment is carried out must not free it."""
    rig.answer(rig.sent(), 1, 0)
    rig.later(1000)
    assert named(rig.sent()) == keys(0)


def test_it_gives_up_what_it_has_to_and_the_coordinator_hears_of_it_at_once(rig: Rig) -> None:
    rig.reading(0, 1)
    rig.later(100)
    rig.answer(rig.sent(), 1, 0)
    assert rig.member.pending == keys(0)
    rig.member.released(keys(1))
    assert named(rig.sent()) == keys(0)


def test_news_overtake_a_heartbeat_that_is_held_back(rig: Rig) -> None:
    rig.reading(0)
    rig.later(100)
    held = rig.sent()
    rig.member.subscribe(["t", "u"], "", rig.now_ms)
    news = rig.sent()
    assert news.request.about is not None
    assert news.request.about.topics == ["t", "u"]
    rig.answer(held, 7, 5)
    assert (rig.member.epoch, rig.member.pending) == (1, None), "only the answer to the latest heartbeat counts"
    rig.answer(news, 2, assigns=False)
    assert rig.member.epoch == 2


def test_two_heartbeats_at_a_time_are_all(rig: Rig) -> None:
    rig.reading(0)
    rig.later(100)
    rig.sent()
    rig.member.subscribe(["u"], "", rig.now_ms)
    last = rig.sent()
    rig.member.subscribe(["v"], "", rig.now_ms)
    assert rig.silent()
    rig.answer(last, 1, assigns=False)
    assert rig.sent().request.about is not None


def test_after_an_answer_that_did_not_come_it_says_everything(rig: Rig) -> None:
    rig.reading(0)
    rig.later(100)
    rig.fail(rig.sent(), CoordinatorNotAvailableError("moved"))
    rig.later(200)
    assert named(rig.sent()) == keys(0)


def test_after_an_answer_of_the_next_coordinator_it_says_everything(rig: Rig) -> None:
    rig.reading(0)
    rig.later(100)
    rig.answer(rig.sent(), 1, assigns=False, generation=2)
    rig.later(100)
    said = rig.sent()
    assert (named(said), said.request.generation) == (keys(0), 2)


def test_a_session_that_nobody_answers_is_over(rig: Rig) -> None:
    rig.reading(0)
    rig.later(SESSION_MS - 1)
    assert len(rig.member.heartbeats(rig.now_ms)) == 1
    rig.later(1)
    assert rig.silent()
    assert (rig.member.phase, rig.member.owned) == (MemberPhase.LOST, keys(0))
    with pytest.raises(UnknownMemberIdError):
        rig.member.identity()
    rig.member.told(rig.now_ms)
    again = rig.sent()
    assert (again.request.member_id, again.request.member_epoch, named(again)) == ("m1", 0, frozenset())


def test_an_answer_after_the_session_brings_nothing_back(rig: Rig) -> None:
    rig.reading(0)
    rig.later(100)
    late = rig.sent()
    rig.later(SESSION_MS)
    rig.answer(late, 1, assigns=False)
    assert rig.silent()
    assert rig.member.phase is MemberPhase.LOST


@pytest.mark.parametrize(
    ("error", "member_id"), [(UnknownMemberIdError("gone"), "m1"), (FencedMemberEpochError("old"), "m0")]
)
def test_a_member_that_was_removed_joins_again_when_its_caller_knows(
    rig: Rig, error: SparkBrokerError, member_id: str
) -> None:
    rig.reading(0)
    rig.later(100)
    rig.fail(rig.sent(), error)
    assert rig.silent(), "the caller still reads"
    rig.member.told(rig.now_ms)
    again = rig.sent()
    assert (again.request.member_id, again.request.member_epoch) == (member_id, 0)


def test_whoever_had_nothing_joins_again_by_itself(rig: Rig) -> None:
    rig.reading()
    rig.later(100)
    rig.fail(rig.sent(), UnknownMemberIdError("gone"))
    assert rig.sent().request.member_id == "m1"


def test_what_an_earlier_life_has_read_is_not_committed_by_a_later_one(rig: Rig) -> None:
    rig.reading(0)
    life = rig.member.life
    assert rig.member.identity(life).member_id == "m0"
    rig.later(SESSION_MS)
    assert rig.silent()
    rig.member.told(rig.now_ms)
    rig.answer(rig.sent(), 5, 0)
    rig.member.took(keys(0))
    assert rig.member.identity().member_epoch == 5
    with pytest.raises(UnknownMemberIdError):
        rig.member.identity(life)


def test_a_caller_that_does_not_poll_leaves_and_joins_again_with_its_next_poll(rig: Rig) -> None:
    rig.reading(0)
    rig.member.polled(rig.now_ms)
    for _ in range(POLL_MS // 5000):
        rig.later(5000)
        for heartbeat in rig.member.heartbeats(rig.now_ms):
            if heartbeat.request.member_epoch >= 0:
                rig.answer(heartbeat, 1, assigns=False)
    assert rig.member.phase is MemberPhase.LOST
    assert "max.poll.interval.ms" in rig.member.why_lost
    rig.member.polling(rig.now_ms)
    rig.member.told(rig.now_ms)
    assert rig.member.life == 2


def test_a_process_that_stood_still_knows_with_its_next_poll(rig: Rig) -> None:
    rig.reading(0)
    rig.later(SESSION_MS)
    rig.member.polling(rig.now_ms)
    assert rig.member.phase is MemberPhase.LOST


def test_what_no_answer_has_confirmed_as_given_up_is_late_by_the_coordinators_clock() -> None:
    """Simulator, seed 3661: the next coordinator waited for it again, and removed a member that did not know."""
    rig = Rig(poll_ms=SESSION_MS)
    rig.reading(0, 1)
    told_ms = rig.now_ms
    rig.later(100)
    rig.answer(rig.sent(), 1, 0)
    rig.member.released(keys(1))
    rig.fail(rig.sent(), CoordinatorNotAvailableError("moved"))
    while rig.now_ms < told_ms + SESSION_MS - 1000:
        rig.later(500)
        for heartbeat in rig.member.heartbeats(rig.now_ms):
            rig.answer(heartbeat, 1, 0, generation=int(rig.now_ms))
    assert not rig.member.is_over(rig.now_ms)
    rig.now_ms = told_ms + SESSION_MS
    assert rig.member.is_over(rig.now_ms)
    rig.member.heartbeats(rig.now_ms)
    assert rig.member.phase is MemberPhase.LOST


def test_an_answer_that_confirms_it_ends_the_wait() -> None:
    rig = Rig(poll_ms=SESSION_MS)
    rig.reading(0, 1)
    rig.later(100)
    rig.answer(rig.sent(), 1, 0)
    rig.member.released(keys(1))
    rig.answer(rig.sent(), 2, assigns=False)
    for _ in range(30):
        rig.later(500)
        for heartbeat in rig.member.heartbeats(rig.now_ms):
            rig.answer(heartbeat, 2, assigns=False)
    assert rig.member.phase is MemberPhase.IN


def test_a_static_member_waits_for_its_instance_id_for_two_sessions_and_then_says_so() -> None:
    """An earlier process that was killed holds it until its session ends."""
    rig = Rig("i")
    held = UnreleasedInstanceIdError("of another")
    began_ms = rig.now_ms
    while rig.now_ms < began_ms + 2 * SESSION_MS - 200:
        for heartbeat in rig.member.heartbeats(rig.now_ms):
            rig.fail(heartbeat, held)
        assert rig.member.failure is None
        rig.later(130)
    rig.now_ms = began_ms + 2 * SESSION_MS + 1000
    rig.fail(rig.sent(), held)
    assert rig.member.failure is held


def test_a_static_member_releases_its_id_when_its_session_is_over() -> None:
    rig = Rig("i")
    rig.reading(0)
    rig.later(SESSION_MS)
    farewell = rig.sent()
    assert (farewell.request.member_epoch, farewell.request.member_id, farewell.request.instance_id) == (-2, "m0", "i")


def test_an_instance_id_that_another_has_taken_ends_the_membership() -> None:
    rig = Rig("i")
    rig.reading(0)
    rig.later(100)
    rig.fail(rig.sent(), FencedInstanceIdError("taken"))
    rig.member.told(rig.now_ms)
    assert (rig.member.phase, rig.member.is_fatal) == (MemberPhase.OUT, True)
    assert rig.silent()


def test_a_fenced_member_that_subscribes_again_begins_anew() -> None:
    """Story: it joined, and was given partitions. Its caller got the old error from each poll, and nobody read them."""
    rig = Rig("i")
    rig.reading(0)
    rig.later(100)
    rig.fail(rig.sent(), FencedInstanceIdError("taken"))
    rig.member.told(rig.now_ms)
    rig.member.subscribe(["t"], "", rig.now_ms)
    assert (rig.member.phase, rig.member.failure, rig.member.is_fatal) == (MemberPhase.IN, None, False)
    rig.reading(0)
    rig.later(100)
    rig.fail(rig.sent(), UnknownMemberIdError("gone"))
    rig.member.told(rig.now_ms)
    assert rig.member.phase is MemberPhase.IN, "what it loses now is no fatal error"


def test_a_subscription_before_the_caller_knows_that_it_is_fenced_hides_nothing() -> None:
    rig = Rig("i")
    rig.reading(0)
    rig.later(100)
    rig.fail(rig.sent(), FencedInstanceIdError("taken"))
    rig.member.subscribe(["t"], "", rig.now_ms)
    rig.member.told(rig.now_ms)
    assert (rig.member.phase, rig.member.is_fatal) == (MemberPhase.OUT, True)
    assert isinstance(rig.member.failure, FencedInstanceIdError)


def test_a_refusal_that_will_not_pass_is_told_and_tried_again(rig: Rig) -> None:
    refusal = GroupMaxSizeReachedError("full")
    rig.fail(rig.sent(), refusal)
    assert rig.member.failure is refusal
    assert rig.silent()
    rig.later(1000)
    assert rig.sent().request.member_epoch == 0


@pytest.mark.parametrize(("instance_id", "epoch"), [("", -1), ("i", -2)])
def test_it_leaves_and_says_so_again_when_nobody_has_heard(instance_id: str, epoch: int) -> None:
    rig = Rig(instance_id)
    rig.reading(0)
    rig.member.leave(rig.now_ms, "it was closed")
    leave = rig.sent()
    assert (leave.request.member_epoch, leave.request.reason) == (epoch, "it was closed")
    rig.fail(leave, CoordinatorNotAvailableError("moved"))
    assert rig.member.is_leaving
    rig.later(200)
    again = rig.sent()
    assert again.request == leave.request
    rig.answer(again, epoch, assigns=False)
    assert rig.member.phase is MemberPhase.OUT
    assert rig.silent()


def test_whoever_leaves_before_its_join_is_answered_waits_for_that(rig: Rig) -> None:
    """The join would come after the goodbye, and the member would be there until its session ends."""
    join = rig.sent()
    rig.member.leave(rig.now_ms)
    assert rig.silent()
    rig.answer(join, 1, 0)
    assert rig.sent().request.member_epoch == -1


def test_nobody_knows_who_commits_while_a_join_or_a_goodbye_is_not_answered(rig: Rig) -> None:
    join = rig.sent()
    assert rig.between()
    rig.answer(join, 1, 0)
    assert not rig.between()
    assert rig.member.identity().member_epoch == 1
    rig.member.leave(rig.now_ms)
    assert rig.between()
    rig.answer(rig.sent(), -1, assigns=False)
    assert not rig.between()
    assert rig.member.identity().member_id == ""


def test_it_does_not_wait_for_a_join_that_is_held_back(rig: Rig) -> None:
    rig.sent()
    rig.member.leave(rig.now_ms)
    rig.later(499)
    assert rig.silent()
    rig.later(1)
    assert rig.member.wake_ms() <= rig.now_ms
    assert rig.sent().request.member_epoch == -1


def test_whoever_waits_to_carry_out_an_assignment_has_little_to_say(rig: Rig) -> None:
    rig.answer(rig.sent(), 1, 0)
    rig.later(999)
    assert rig.silent()
    rig.later(1)
    assert named(rig.sent()) == keys(0)
